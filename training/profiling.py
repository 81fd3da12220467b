"""Profile a few steps of a run: what ran when, and what memory was held meanwhile."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from common.logging import log

WARMUP, ACTIVE = 3, 3  # steps


@contextmanager
def profile_steps(folder: Path | None, device: torch.device) -> Iterator[Callable[[], None]]:
    """Profile ACTIVE steps after WARMUP others into a folder, if one is given: `trace.json.gz` for ui.perfetto.dev, and
    on CUDA `memory.pickle` for pytorch.org/memory_viz. Yield a function to be called after every step."""
    if folder is None:
        yield lambda: None
        return
    on_cuda, steps = device.type == "cuda", 0

    def write(profiled: profile) -> None:
        if steps < WARMUP + ACTIVE:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if on_cuda:
            torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        profiled.export_chrome_trace(str(folder / "trace.json.gz"))
        log(f"profiled {ACTIVE} steps: {folder}", sys.stderr)

    def step() -> None:
        nonlocal steps
        steps += 1
        if on_cuda and steps == WARMUP:
            torch.cuda.memory._record_memory_history()
        profiled.step()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    schedule = torch.profiler.schedule(wait=0, warmup=WARMUP, active=ACTIVE, repeat=1)
    with profile(
        activities=activities, schedule=schedule, on_trace_ready=write, profile_memory=True, record_shapes=True
    ) as profiled:
        yield step
    if steps < WARMUP + ACTIVE:
        log(f"nothing was profiled: that takes {WARMUP + ACTIVE} steps, the run had {steps}", sys.stderr)
