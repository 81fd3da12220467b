"""Packages that only some runs need: where one is missing, everything else works."""

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = ("train", "evaluate", "visualize", "export", "model.features")
WITHOUT_VIDEOS = (
    *("ablations", "data.index_scale", "gpu.probe", "gpu.resume_check", "kernel_speed"),
    *("memory_vs_ratio", "on_gpu", "train_throughput"),
)


def test_dali_and_torchao_are_imported_only_where_they_are_used() -> None:
    for file in chain.from_iterable(ROOT.glob(f"{room}/**/*.py") for room in ("pipeline", "training", "benchmarks")):
        assert not re.search("^(import|from) (nvidia|torchao)", file.read_text(encoding="utf-8"), re.MULTILINE), file


def test_without_them_commands_start_and_say_what_they_miss() -> None:
    program = """
import sys
for name in ("nvidia.dali", "torchao", "av", "jsonargparse"):
    sys.modules[name] = None
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
import train
train.run_command(lambda: train.train(train.configured(["data.shards=x"])))
"""
    modules = [*COMMANDS, *(f"benchmarks.{name}" for name in WITHOUT_VIDEOS)]
    done = subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True)
    sentence = "error: this needs the package jsonargparse, which is not installed: pip install jsonargparse\n"
    assert (done.returncode, done.stderr) == (2, sentence)
