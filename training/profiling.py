"""Profile a few steps of a run: what ran when, and what memory was held meanwhile."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.profiler import ProfilerActivity, profile, schedule

from common.atomic_io import atomic_write
from common.logging import log

WARMUP, ACTIVE = 3, 3  # steps
CUDA_DEVICE = 1  # "Device Type" of a trace's memory events; 0 is the CPU


class StepProfiler:
    """Profiles ACTIVE steps after WARMUP others into a folder, if one is given: `trace.json.gz` for ui.perfetto.dev,
    `memory.png`, and on CUDA `memory.pickle` for pytorch.org/memory_viz."""

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
        trace = self._folder / "trace.json.gz"
        profiled.export_chrome_trace(str(trace))
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            plot_memory(json.load(file)["traceEvents"], self._on_cuda, self._folder / "memory.png")
        log(f"profiled {ACTIVE} steps: {self._folder}", sys.stderr)


def plot_memory(events: list[dict[str, Any]], on_cuda: bool, path: Path) -> None:
    """Plot the memory that the events of a trace allocate and free, over time and relative to its start."""
    steps = [event["ts"] / 1e6 for event in events if event["name"].startswith("ProfilerStep#")]
    changes = sorted(
        (event["ts"] / 1e6 - min(steps), event["args"]["Bytes"] / 2**20)
        for event in events
        if event["name"] == "[memory]" and (event["args"]["Device Type"] == CUDA_DEVICE) == on_cuda
    )
    seconds, mebibytes = np.array(changes).T
    held = mebibytes.cumsum()
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots()
    axes.step(seconds, held, where="post", color="#2471a3", linewidth=0.8)
    axes.fill_between(seconds, held, step="post", alpha=0.25)
    for step in steps:
        axes.axvline(step - min(steps), color="black", linewidth=0.8, linestyle=":")
    axes.set(
        title=f"{'GPU' if on_cuda else 'tensor'} memory in {ACTIVE} steps: peak {held.max():,.0f} MiB above start",
        xlabel="seconds", ylabel="MiB since the start",
    )  # fmt: skip
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
