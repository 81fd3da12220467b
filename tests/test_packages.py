"""Heavy and optional packages are imported only by what uses them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = [
    *sorted(file for file in ROOT.glob("*.py") if file.name != "hubconf.py"),
    *(ROOT / f"shard_tools/{name}.py" for name in ("make_shards", "check_shards")),
]
HEAVY = {"torch", "timm", "torchvision", "triton", "transformers", "matplotlib", "nvidia.dali"}

HELP = """
import contextlib, io, runpy, sys
for script in sys.argv[2:]:
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, script
    assert "usage: " in out.getvalue(), script
    assert not {HEAVY} & set(sys.modules), (script, {HEAVY} & set(sys.modules))
"""


def test_help_texts_need_no_heavy_package() -> None:
    program = HELP.replace("{HEAVY}", repr(HEAVY))
    subprocess.run([sys.executable, "-c", program, "-", *COMMANDS], cwd=ROOT, check=True, timeout=60)


@pytest.mark.slow  # imports everything in a fresh process
def test_commands_start_without_optional_packages() -> None:
    program = """
import runpy, sys
for name in ("nvidia.dali", "wandb", "ray", "s3fs"):
    sys.modules[name] = None
sys.argv = ["train.py", "data.shards=nowhere"]
runpy.run_path("train.py", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
