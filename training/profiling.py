"""Profile a few steps of a run: what ran when, and what memory was held meanwhile."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from common.logging import log

WARMUP, ACTIVE = 3, 3  # steps


class StepProfiler:
    """Profiles ACTIVE steps after WARMUP others into a folder, if one is given: `trace.json.gz` for ui.perfetto.dev,
    and on CUDA `memory.pickle` for pytorch.org/memory_viz."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self._folder, self._on_cuda, self._steps = folder, device.type == "cuda", 0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        self._profile = profile(
            activities=activities, schedule=schedule(wait=0, warmup=WARMUP, active=ACTIVE, repeat=1),
            on_trace_ready=self._write, profile_memory=True, record_shapes=True,
        )  # fmt: skip

    def __enter__(self) -> "StepProfiler":
        if self._folder is not None:
            self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._folder is not None:
            self._profile.__exit__(*error)
            if self._steps < WARMUP + ACTIVE:
                log(f"nothing was profiled: that takes {WARMUP + ACTIVE} steps, the run had {self._steps}", sys.stderr)

    def step(self) -> None:
        """To be called after every step."""
        if self._folder is None or self._steps == WARMUP + ACTIVE:
            return
        self._steps += 1
        if self._on_cuda and self._steps == WARMUP:
            torch.cuda.memory._record_memory_history()
        self._profile.step()

    def _write(self, profiled: profile) -> None:
        if self._folder is None or self._steps < WARMUP + ACTIVE:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._on_cuda:
            torch.cuda.memory._dump_snapshot(str(self._folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        profiled.export_chrome_trace(str(self._folder / "trace.json.gz"))
        log(f"profiled {ACTIVE} steps: {self._folder}", sys.stderr)
