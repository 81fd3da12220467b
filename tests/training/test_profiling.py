"""The profile of a few steps of a run."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from adamae.training.profiling import ACTIVE, WARMUP, profile_steps


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_few_steps_after_warm_up_are_traced(tmp_path: Path, device: str) -> None:
    folder = tmp_path / "profile"
    with profile_steps(folder, torch.device(device), enabled=True) as profile_step:
        for _ in range(WARMUP + ACTIVE + 4):
            x = torch.ones(1024, 1024, device=device)
            x = x @ x
            profile_step()
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{WARMUP + i}" for i in range(ACTIVE)}
    assert len([event for event in events if event["name"] == "aten::mm"]) == ACTIVE
    assert (folder / "memory.pickle").exists() == (device == "cuda")
