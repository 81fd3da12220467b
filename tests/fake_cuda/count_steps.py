"""Train, and count the calls of CUDA in some of the steps.

    count_steps.py OUTPUT FIRST LAST RUNS

RUNS is a JSON list of lists of arguments of train.py. For each run, write a line of JSON with the
calls of the steps FIRST to LAST into a file of the rank in the folder OUTPUT.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from adamae import train
from adamae.training.config import parse

LIBRARY = ctypes.CDLL("libcuda.so.1")


def main(output: Path, first: int, last: int, runs: list[list[str]]) -> None:
    rank = int(os.environ.get("RANK", "0"))
    train_step = train.train_step
    num_steps = 0
    calls: dict[str, int] = {}

    def count_step(*inputs: Any) -> dict[str, torch.Tensor]:
        nonlocal num_steps, calls
        num_steps += 1
        if num_steps == first:
            LIBRARY.fake_reset()
            LIBRARY.fake_tell_waits(1)
        scalars = train_step(*inputs)
        if num_steps == last:
            LIBRARY.fake_tell_waits(0)
            calls = read_counts()
        return scalars

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    q = torch.empty(1, 3, 8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    print("attention by", SDPBackend(torch._fused_sdp_choice(q, q, q)).name, file=sys.stderr)
    train.train_step = count_step  # type: ignore[assignment]
    for arguments in runs:
        num_steps = 0
        # Kernels compute nothing, so a run reads zeros only if its memory is new.
        torch.cuda.empty_cache()
        ended = train.train(parse(arguments))
        # Each rank has a file, as lines of several ranks in one pipe would mix.
        with (output / f"rank{rank}.jsonl").open("a") as file:
            print(json.dumps({"rank": rank, "ended": ended, "calls": calls}), file=file)


def read_counts() -> dict[str, int]:
    """Return how often each function, kernel and kind of copy was called."""
    buffer = ctypes.create_string_buffer(1 << 20)
    LIBRARY.fake_counts(buffer, len(buffer))
    counts = {}
    for line in buffer.value.decode().splitlines():
        number, name = line.split("\t")
        counts[name] = int(number)
    return counts


main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
