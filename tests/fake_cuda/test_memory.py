"""What PyTorch's own allocator gives a step, on a GPU that is not there."""

import json
from pathlib import Path

import gpu
import pytest

if REASON := gpu.why_not():
    pytest.skip(f"{REASON}: no GPU can be pretended", allow_module_level=True)

PROGRAM = """
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


@pytest.mark.slow  # it compiles the GPU, and PyTorch starts
def test_predicted_memory_is_the_allocators_peak(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = gpu.run(gpu.build(tmp_path), str(tmp_path / "program.py"), [])
    assert done.returncode == 0, done.stderr
    for predicted, measured in map(json.loads, done.stdout.splitlines()):
        assert predicted == pytest.approx(measured, rel=0.02)
