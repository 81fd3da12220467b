"""count_steps.py OUTPUT FIRST LAST RUNS: train with each list of arguments (JSON); write what steps FIRST to LAST
called into the folder OUTPUT, a file for each rank with a line of JSON for each run."""

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
    steps = 0

    def counted(*inputs: Any) -> dict[str, torch.Tensor]:
        nonlocal steps
        steps += 1
        if steps == first:
            LIBRARY.fake_reset()
            LIBRARY.fake_tell_waits(1)
        scalars = train_step(*inputs)
        if steps == last:
            LIBRARY.fake_tell_waits(0)
            buffer = ctypes.create_string_buffer(1 << 20)
            LIBRARY.fake_counts(buffer, len(buffer))
            lines = (line.split("\t") for line in buffer.value.decode().splitlines())
            found["calls"] = {what: int(number) for number, what in lines}
        return scalars

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    q = torch.empty(1, 3, 8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    print("attention by", SDPBackend(torch._fused_sdp_choice(q, q, q)).name, file=sys.stderr)
    train.train_step = counted  # type: ignore[assignment]
    for arguments in runs:
        found: dict[str, Any] = {"rank": rank}
        steps = 0
        torch.cuda.empty_cache()  # kernels compute nothing: a run finds zeros, not what another one has uploaded
        found["ended"] = train.train(parse(arguments))
        with (output / f"rank{rank}.jsonl").open("a") as file:  # ranks' lines in one pipe would mix
            print(json.dumps(found), file=file)


main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
