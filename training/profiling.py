"""Profile a few steps of a run: what ran when, and what memory was held meanwhile."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import profile

from adamae.common.logging import log

# The profiler traces these steps too and drops them: starting it slows down the first ones.
WARMUP = 3
# Steps that are kept.
ACTIVE = 3


@contextmanager
def profile_steps(
    folder: Path, device: torch.device, enabled: bool
) -> Iterator[Callable[[], None]]:
    """Yield a function to be called after every step; profile ACTIVE steps after WARMUP others.

    Written to `folder`: `trace.json.gz` for ui.perfetto.dev, and on CUDA `memory.pickle` for
    pytorch.org/memory_viz. Unless `enabled`, the function does nothing.
    """
    if not enabled:
        yield lambda: None
        return
    on_cuda = device.type == "cuda"

    def write(profiled: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(folder / "trace.json.gz"))
        if on_cuda:
            torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        log(f"profiled {profiled.step_num - WARMUP} steps: {folder}", sys.stderr)

    if on_cuda:
        torch.cuda.memory._record_memory_history()
    schedule = torch.profiler.schedule(wait=0, warmup=WARMUP, active=ACTIVE, repeat=1)
    with profile(
        schedule=schedule, on_trace_ready=write, profile_memory=True, record_shapes=True
    ) as profiled:
        yield profiled.step
