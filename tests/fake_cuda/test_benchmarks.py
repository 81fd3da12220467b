"""What benchmarks call and PyTorch's allocator gives them, on a GPU that is not there."""

import json
from pathlib import Path

import gpu
import pytest

STEPS = """
import json, os
os.environ.pop("PYTORCH_ALLOC_CONF")  # there is no NVML here: segments that expand would end the process
import common.devices
import torch
from benchmarks.accounting import predict
from benchmarks.step import measure_config
from model.config import ModelConfig

torch.backends.cudnn.enabled = False
for changes in ({}, {"masking": "tube"}, {"activation_checkpointing": True}):
    config = ModelConfig(size="small", **changes)
    _, measured = measure_config(config, 16, 1, torch.device("cuda", 0))
    print(json.dumps([predict(config, 16, with_flops=False).peak_bytes / 2**30, measured["measured_peak_gib"]]))
"""


KERNELS = """
import sys
from benchmarks import kernel_speed

kernel_speed.check = lambda case, name: None  # kernels compute nothing here
kernel_speed.main(["--batch-size", "2", "--mask-ratio", "0.9", "--repetitions", "2", *sys.argv[1:]])
"""


@pytest.mark.slow  # it compiles the GPU, and PyTorch starts
def test_predicted_memory_is_the_allocators_peak(library: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STEPS)
    done = gpu.run(library, str(tmp_path / "program.py"), [])
    assert done.returncode == 0, done.stderr
    for predicted, measured in map(json.loads, done.stdout.splitlines()):
        assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.slow
def test_kernels_are_timed_by_replays_of_graphs_and_the_published_way_by_calls(library: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(KERNELS)
    done = gpu.run(library, str(tmp_path / "program.py"), ["--op", "gather_tokens", "--output", tmp_path])
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "kernel_speed.json").read_text())["rows"]
    timed = {(row["implementation"], row["phase"]) for row in rows if row["kernel_ms"] is not None}
    assert {phase for name, phase in timed if name == "ours"} == {"forward", "backward", "both"}
    assert "published" not in {name for name, _ in timed}
