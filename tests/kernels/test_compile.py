"""The compiler takes every kernel, for three generations of GPUs, on a machine that has none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
KERNELS = {
    "draw_kernel", "log_softmax_backward_kernel", "gather_kernel", "gather_backward_kernel", "scatter_kernel",
    "mask_token_gradient_kernel", "patchify_kernel", "loss_kernel", "loss_backward_kernel", "sampling_loss_kernel",
}  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_without_spills(capability):
    root = SCRIPT.parents[2]
    done = subprocess.run(
        [sys.executable, SCRIPT, str(capability)],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == KERNELS
    for row in rows:
        print(row["kernel"], row["registers"], "registers", row["shared_bytes"], "B shared", row["constants"])
        assert row["spill_bytes"] == 0, row
        assert row["shared_bytes"] <= 99 * 1024, row  # what the smallest GPU of these generations grants a program
