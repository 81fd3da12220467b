"""GPUs that cannot be used are named in one sentence, before anything is written."""

from pathlib import Path

import gpu
import pytest

PROGRAM = """
import os
import adamae.common.errors

def main():
    import torch
    from adamae.common.devices import choose_device
    kind = os.environ.get("KIND", "cuda")
    index = int(os.environ.get("LOCAL_RANK", 0))
    torch.zeros(2**24, device=choose_device(kind, index))

adamae.common.errors.run_command(main)
"""
FAULTS = {
    "no driver": (
        {"LD_PRELOAD": ""},
        "(Found no NVIDIA driver on your system): see what nvidia-smi says",
    ),
    "an old driver, and no run starts on the CPU instead": (
        {"FAKE_DRIVER": 12040, "KIND": "auto"},
        "(The NVIDIA driver on your system is too old (found version 12040)): PyTorch for CUDA 13"
        " needs driver 580",
    ),
    "an old GPU": (
        {"FAKE_CAPABILITY": 75},
        "has compute capability 7.5: the kernels here need 8.0 or more",
    ),
    "a GPU newer than PyTorch": (
        {"FAKE_CAPABILITY": 130},
        "has compute capability 13.0: the kernels here need",
    ),
    "somebody else's GPU": (
        {"FAKE_BUSY": 1},
        "busy or unavailable: another process has this GPU for itself",
    ),
    "a full GPU": (
        {"FAKE_USED": 85_000_000_000},
        "CUDA out of memory: lower the batch size, or end what else runs",
    ),
    "none visible": (
        {"CUDA_VISIBLE_DEVICES": ""},
        "No CUDA GPUs are available; CUDA_VISIBLE_DEVICES is ''",
    ),
    "a second process": (
        {"LOCAL_RANK": 1},
        "PyTorch finds 1 GPUs on this node, none for local rank 1: start fewer",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_gpu_that_cannot_be_used_is_one_sentence(
    fault: str, library: Path, tmp_path: Path
) -> None:
    settings, message = FAULTS[fault]
    (tmp_path / "program.py").write_text(PROGRAM)
    done = gpu.run(library, str(tmp_path / "program.py"), [], **settings)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
