"""A look into a few steps of a run: what ran when, and what memory was held meanwhile."""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.profiler import ProfilerActivity, profile, schedule

from common.atomic_io import atomic_write
from common.logging import log

WARMUP, ACTIVE = 3, 3  # steps
CUDA_DEVICE = 1  # "Device Type" of a trace's memory events; 0 is the CPU


class StepProfiler:
    """Watches ACTIVE steps after WARMUP others and writes into a folder: `trace.json.gz` for chrome://tracing or
    ui.perfetto.dev, `memory.png`, and on CUDA `memory.pickle`, whose allocations pytorch.org/memory_viz names.

    Does nothing without a folder.
    """

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self.folder, self.on_cuda = folder, device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_cuda else [])]
        self.profile = profile(
            activities=activities, schedule=schedule(wait=0, warmup=WARMUP, active=ACTIVE, repeat=1),
            on_trace_ready=self._write, profile_memory=True, record_shapes=True,
        )  # fmt: skip
        self.steps = 0

    def step(self) -> None:
        """To be called after every step."""
        if self.folder is None or self.steps == WARMUP + ACTIVE:
            return
        self.steps += 1
        if self.on_cuda and self.steps == WARMUP:
            torch.cuda.memory._record_memory_history()
        self.profile.step()

    def _write(self, profiled: profile) -> None:
        if self.folder is None or self.steps < WARMUP + ACTIVE:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.on_cuda:
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        trace = self.folder / "trace.json.gz"
        profiled.export_chrome_trace(str(trace))
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            draw_memory(json.load(file)["traceEvents"], self.on_cuda, self.folder / "memory.png")
        log(f"profiled {ACTIVE} steps: {self.folder}", sys.stderr)

    def __enter__(self) -> "StepProfiler":
        if self.folder is not None:
            self.profile.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.folder is None:
            return
        self.profile.__exit__(kind, error, at)
        if self.steps < WARMUP + ACTIVE:
            log(f"nothing was profiled: that takes {WARMUP + ACTIVE} steps, and there were {self.steps}", sys.stderr)


def draw_memory(events: list[dict[str, Any]], on_cuda: bool, path: Path) -> None:
    """PNG of the memory that the events of a trace allocate and free, over time and relative to its start."""
    steps = [event["ts"] / 1e6 for event in events if event["name"].startswith("ProfilerStep#")]
    moments, mebibytes = zip(*_held(events, on_cuda), strict=True)
    seconds = [moment - min(steps) for moment in moments]
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots()
    axes.step(seconds, mebibytes, where="post", color="#2471a3", linewidth=0.8)
    axes.fill_between(seconds, mebibytes, step="post", alpha=0.25)
    for step in steps:
        axes.axvline(step - min(steps), color="black", linewidth=0.8, linestyle=":")
    whose = "the GPU" if on_cuda else "tensors"
    axes.set(
        title=f"memory of {whose} in {ACTIVE} steps, at most {max(mebibytes):,.0f} MiB above the start",
        xlabel="seconds", ylabel="MiB since the start",
    )  # fmt: skip
    with atomic_write(path) as aside:
        figure.savefig(aside, format="png", dpi=120)


def _held(events: list[dict[str, Any]], on_cuda: bool) -> Iterator[tuple[float, float]]:
    """(seconds, MiB held since the trace began) at every allocation and release of the device."""
    held = 0.0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        if (event["args"]["Device Type"] == CUDA_DEVICE) == on_cuda:
            held += event["args"]["Bytes"] / 2**20
            yield event["ts"] / 1e6, held
