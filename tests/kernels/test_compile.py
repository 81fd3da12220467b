"""The compiler takes every kernel, for three generations of GPUs, on a machine that has none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

pytestmark = pytest.mark.slow  # minutes of compiling

HERE = Path(__file__).parent
WRITTEN = {  # by every kernel of the model; what torch.compile would have to copy before a launch if it could not tell
    "gumbel_topk_kernel": ["visible_ptr", "masked_ptr", "log_probs_ptr", "is_finite_ptr"],
    "log_softmax_backward_kernel": ["out_ptr"],
    "gather_kernel": ["out_ptr"],
    "gather_backward_kernel": ["out_ptr"],
    "scatter_kernel": ["out_ptr"],
    "mask_token_gradient_kernel": ["partial_ptr"],
    "patchify_kernel": ["out_ptr"],
    "loss_kernel": ["loss_ptr", "statistics_ptr"],
    "loss_backward_kernel": ["out_ptr"],
    "sampling_loss_kernel": ["partial_ptr", "grad_ptr"],
}


def run(script: str, *arguments: str) -> str:
    """In a process of its own: kernels are compiled or interpreted, not both."""
    root = HERE.parents[1]
    command = [sys.executable, HERE / script, *arguments]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_without_spills(capability):
    rows = [json.loads(line) for line in run("compile_kernels.py", str(capability)).splitlines()]
    assert {row["kernel"] for row in rows} == {"crop_resize_kernel", *WRITTEN}
    for row in rows:
        print(row["kernel"], row["registers"], "registers", row["shared_bytes"], "B shared", row["constants"])
        one_register = (
            row["kernel"] == "gumbel_topk_kernel" and capability == 100 and triton.__version__.startswith("3.6")
        )
        assert row["spill_bytes"] <= (8 if one_register else 0), row
        assert row["shared_bytes"] <= 99 * 1024, row  # what the smallest GPU of these generations grants a program


def test_torch_compile_makes_a_program_for_a_gpu_of_a_whole_step(tmp_path, monkeypatch):
    """On torch 2.15 a kernel whose addresses come out of unrolled loops would keep this busy for hours."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = json.loads(run("compile_model.py"))
    assert list(found["graphs"].values()) == [2, 2], "not a forward and a backward graph, without a break"
    # One a block that is not run once more; GELU's output would be a second.
    assert found["kept"] == {"checkpointing": 2, "none": 3}
    assert found["written"] == WRITTEN
    assert set(found["built"]) > set(WRITTEN), "Inductor's own kernels, and all of ours"
    assert 0.5 * found["peak_uncompiled"] < found["peak"] < found["peak_uncompiled"]
