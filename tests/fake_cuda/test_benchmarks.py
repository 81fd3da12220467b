"""Benchmarks on the stand-in for CUDA: what they call, and what PyTorch's allocator gives them."""

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


compile_to_module = GraphLowering.compile_to_module
GraphLowering.compile_to_module = count
# Triton would compile kernels for a minute that then do nothing.
async_compile.AsyncCompile.triton = lambda *_, **__: NoKernel()
for how, checkpointing in ((True, False), (True, True), ("reduce-overhead", False)):
    moved = []
    config = ModelConfig(activation_checkpointing=checkpointing)
    measured = measure_config(config, 16, 1, torch.device("cuda", 0), how)
    print(json.dumps([measured["peak_memory_gib"], sum(moved) / 1e9, len(moved)]))
"""
# Kernels compute nothing here, so boolean masks would select nothing: they select by their shape.
# The main of a module is called, so that processes forked for a measurement find it by name.
UNCHECKED = """
import sys
from importlib import import_module

import torch
from torch._inductor import async_compile
from adamae.benchmarks import harness
from adamae.pipeline.decoding import gpu_codecs

torch.distributions.Distribution.set_default_validate_args(False)
# cuDNN and DALI look for the GPU by themselves, and find none.
torch.backends.cudnn.enabled = False
gpu_codecs.try_decoding = lambda *_: "it needs a GPU"
harness.require = lambda *_: None
from adamae.benchmarks import kernel_speed, memory_vs_ratio, train_throughput
from adamae.model.config import SIZES

# One block each: compiling takes as long as a model is deep.
SIZES["tiny"] = SIZES["tiny"]._replace(encoder_depth=1, decoder_depth=1)
# Each point has a process of its own: two and the compiled one are enough.
memory_vs_ratio.RATIOS = (memory_vs_ratio.PAPER_POINT.mask_ratio,)


class NoKernel:
    def run(self, *_, **__):
        pass


# Triton would compile kernels for minutes that then do nothing; test_training.py lets it.
async_compile.AsyncCompile.triton = lambda *_, **__: NoKernel()
kernel_speed.check = train_throughput.check_losses = lambda *_: None
get = torch.Tensor.__getitem__
invert = torch.Tensor.__invert__


def select(values, index):
    # An inverted mask is that of the visible tokens: it selects the first eighth, others the rest.
    if not isinstance(index, torch.Tensor) or index.dtype != torch.bool:
        return get(values, index)
    num_selected = index.numel() // 8
    if not hasattr(index, "inverted"):
        num_selected = index.numel() - num_selected
    return values.flatten(0, index.dim() - 1)[:num_selected]


def mark_inverted(mask):
    inverted = invert(mask)
    inverted.inverted = True
    return inverted


torch.Tensor.__getitem__ = select
torch.Tensor.__invert__ = mark_inverted
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    name = sys.argv[0].removesuffix(".py").replace("/", ".")
    module = import_module(f"adamae.{name}")
    sys.exit(module.main(sys.argv[1:]))
"""
# Stands for the interpreter: everything but pytest runs by UNCHECKED.
PYTHON = """#!/bin/sh
[ "$1" = -m ] && exec {python} "$@"
exec {python} {program} "$@"
"""
CALL = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
# Tests that need a GPU and compare no values. Two others cannot run here: they need NVML and CUPTI.
GPU_TESTS = [
    "tests/training/test_accounting.py",
    "tests/common/test_devices.py::test_a_gpu_that_is_full_is_explained",
    "tests/kernels/test_gpu.py::test_no_tensor_of_the_targets_size_is_allocated",
    "tests/model/test_adamae_in_triton.py::test_the_host_never_waits",
    "tests/training/test_numerics.py",
]


# They train, and count steps of ViT-Small, for some minutes.
@pytest.mark.slow
def test_tests_for_a_gpu_that_compare_no_values_pass(library: Path) -> None:
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-m", "gpu"]
    done = gpu.run(library, "-m", ["pytest", *options, *GPU_TESTS])
    assert done.returncode == 0, done.stdout


# ViT-Base is compiled three times.
@pytest.mark.slow
def test_the_compiled_steps_memory_and_traffic_are_what_the_docs_say(
    library: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(COMPILED)
    done = gpu.run(library, str(program), [], TORCHINDUCTOR_FORCE_DISABLE_CACHES=1)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    gib, traffic, kernels = zip(*rows, strict=True)
    # PyTorch does not count the memory of CUDA graphs, the third row, as allocated.
    assert gib[:2] == pytest.approx([3.00, 2.40], rel=0.02)
    # GB and kernels beside products and attention. With graphs, cheap outputs are not recomputed.
    assert traffic == pytest.approx([10.6, 12.0, 9.63], rel=0.05)
    assert kernels == pytest.approx([419, 449, 418], rel=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of all stages, in which their videos and shards are made once."""
    folder = tmp_path_factory.mktemp("stages")
    program = folder / "unchecked.py"
    program.write_text(UNCHECKED)
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable, program=program))
    python.chmod(0o755)
    return folder


# The commands of a measurement on a GPU, at their smallest, take half a minute to four minutes.
@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["step", "end_to_end", "few_cores", "decode", "memory", "kernels", "resume"]
)
def test_a_stage_ends(stage: str, library: Path, folder: Path) -> None:
    """The stage `tests` is left out, as it compares values."""
    command = ["bash", "benchmarks/on_gpu.sh", folder / "out", stage]
    done = gpu.run(
        library,
        "-c",
        [CALL, *command],
        SMALL=1,
        STAGE_SECONDS=1350,
        PYTHON=folder / "python",
    )
    assert done.returncode == 0, done.stdout
