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
KERNELS = {
    f"{name}_kernel" for name in "crop_resize gumbel_topk gather scatter patchify loss".split()
}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_without_spills(capability):
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
        is_triton_36 = row["kernel"] == "gumbel_topk_kernel" and triton.__version__.startswith(
            "3.6"
        )
        assert row["spill_bytes"] <= (8 if is_triton_36 and capability == 100 else 0), row
        assert row["shared_bytes"] <= 99 * 1024, (
            row
        )  # what the smallest GPU of these generations grants a program
