"""What benchmarks call and PyTorch's allocator gives them, on a GPU that is not there."""

import json
import sys
from pathlib import Path

import gpu
import pytest

COMPILED = """
import json

import torch
from torch._inductor import async_compile
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import UserDefinedTritonKernel
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from adamae.benchmarks.step import measure_config
from adamae.model.config import ModelConfig


class NoKernel:
    def run(self, *_, **__):
        pass


def count(graph):
    module = compile_to_module(graph)
    for node in graph.scheduler.nodes:
        is_product_or_attention = isinstance(node, ExternKernelSchedulerNode) and not isinstance(
            node.node, UserDefinedTritonKernel
        )
        if not is_product_or_attention and not isinstance(node, NopKernelSchedulerNode):
            moved.append(node.get_read_write_buffers_sizes())
    return module


compile_to_module, GraphLowering.compile_to_module = GraphLowering.compile_to_module, count
async_compile.AsyncCompile.triton = lambda *_, **__: NoKernel()  # Triton compiles them for a minute, to do nothing
for how, checkpointing in ((True, False), (True, True), ("reduce-overhead", False)):
    moved = []
    config = ModelConfig(activation_checkpointing=checkpointing)
    measured = measure_config(config, 16, 1, torch.device("cuda", 0), how)
    print(json.dumps([measured["peak_memory_gib"], sum(moved) / 1e9, len(moved)]))
"""
# Kernels compute nothing here, so that boolean masks would select nothing: they select by their shape. A module's main
# is called, so that processes forked for a measurement find it by name.
UNCHECKED = """
import sys
from importlib import import_module

import torch
from adamae.benchmarks import harness
from adamae.pipeline.decoding import dali

torch.distributions.Distribution.set_default_validate_args(False)
torch.backends.cudnn.enabled = False  # it looks for the GPU by itself, and so does DALI
dali.try_decoding = lambda *_: "it needs a GPU"
harness.require = lambda *_: None
from adamae.benchmarks import kernel_speed, train_throughput

kernel_speed.check = train_throughput.check_losses = lambda *_: None
get, invert = torch.Tensor.__getitem__, torch.Tensor.__invert__


def select(values, index):  # the first tokens: an eighth by an inverted mask, of visible ones, the rest by another
    if not isinstance(index, torch.Tensor) or index.dtype != torch.bool:
        return get(values, index)
    visible = index.numel() // 8
    return values.flatten(0, index.dim() - 1)[: visible if hasattr(index, "inverted") else index.numel() - visible]


def mark_inverted(mask):
    inverted = invert(mask)
    inverted.inverted = True
    return inverted


torch.Tensor.__getitem__, torch.Tensor.__invert__ = select, mark_inverted
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.exit(import_module(sys.argv[0].removesuffix(".py").replace("/", ".")).main(sys.argv[1:]))
"""
# Stands for the interpreter: everything but pytest runs by UNCHECKED.
PYTHON = """#!/bin/sh
[ "$1" = -m ] && exec {python} "$@"
exec {python} {program} "$@"
"""
CALL = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
# Of the tests that need a GPU, those that compare no values. One more needs NVML, one CUPTI.
GPU_TESTS = [
    "tests/training/test_accounting.py",
    "tests/common/test_devices.py::test_a_gpu_that_is_full_is_explained",
    "tests/kernels/test_gpu.py::test_no_tensor_of_the_targets_size_is_allocated",
    "tests/model/test_adamae_in_triton.py::test_the_host_never_waits",
    "tests/training/test_numerics.py",
]


@pytest.mark.slow  # they train, and count steps of ViT-Small
def test_tests_for_a_gpu_that_compare_no_values_pass(library: Path) -> None:
    done = gpu.run(
        library,
        "-m",
        ["pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "gpu", *GPU_TESTS],
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(1500)
@pytest.mark.slow  # torch.compile of ViT-Base, three times
def test_the_compiled_steps_memory_and_traffic_are_what_the_docs_say(
    library: Path, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(COMPILED)
    done = gpu.run(
        library,
        str(tmp_path / "program.py"),
        [],
        seconds=1400,
        TORCHINDUCTOR_FORCE_DISABLE_CACHES=1,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    gib, traffic, kernels = zip(*found, strict=True)
    assert gib[:2] == pytest.approx(
        [3.00, 2.40], rel=0.02
    )  # what graphs write does not count as allocated
    # GB and kernels beside products and attention; with graphs, what is cheap is not recomputed.
    assert traffic == pytest.approx([10.6, 12.0, 9.63], rel=0.05)
    assert kernels == pytest.approx([419, 449, 418], rel=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of all stages: their videos and shards are made once."""
    folder = tmp_path_factory.mktemp("stages")
    (folder / "unchecked.py").write_text(UNCHECKED)
    (folder / "python").write_text(
        PYTHON.format(python=sys.executable, program=folder / "unchecked.py")
    )
    (folder / "python").chmod(0o755)
    return folder


@pytest.mark.timeout(1500)
@pytest.mark.slow  # commands that a GPU is to run, at their smallest: half a minute to four
@pytest.mark.parametrize("stage", ["step", "end_to_end", "decode", "memory", "kernels", "resume"])
def test_a_stage_ends(stage: str, library: Path, folder: Path) -> None:
    """But `tests`, which compares values."""
    command = ["bash", "benchmarks/on_gpu.sh", folder / "out", stage]
    done = gpu.run(
        library,
        "-c",
        [CALL, *command],
        seconds=1400,
        SMALL=1,
        STAGE_SECONDS=1350,
        PYTHON=folder / "python",
    )
    assert done.returncode == 0, done.stdout
