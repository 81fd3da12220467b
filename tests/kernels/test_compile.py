"""The compiler takes every kernel, for three generations of GPUs, on a machine that has none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

# Minutes of compiling.
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
KERNELS = {
    "crop_resize_kernel",
    "gumbel_topk_kernel",
    "keep_mask_kernel",
    "gather_kernel",
    "scatter_kernel",
    "patchify_kernel",
    "loss_kernel",
}
# What the smallest GPU of these generations grants a program.
MAX_SHARED_BYTES = 99 * 1024


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_without_spills(capability: int) -> None:
    """In a process of its own: kernels are compiled or interpreted, not both."""
    command = [sys.executable, HERE / "compile_kernels.py", str(capability)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == KERNELS
    for row in rows:
        max_spills = 0
        if row["kernel"] == "gumbel_topk_kernel" and capability == 100:
            # Two registers spill with this version of the compiler.
            max_spills = 8 if triton.__version__.startswith("3.6") else 0
        assert row["spill_bytes"] <= max_spills, row
        assert row["shared_bytes"] <= MAX_SHARED_BYTES, row
