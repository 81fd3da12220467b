"""Let torch.compile take a training step of the model on the Triton path, as for an H200, and list what comes of it.

`python tests/kernels/compile_model.py` prints a JSON object:
- graphs: of each model, how many; one forward and one backward where nothing broke in between;
- kept: of each model, how many tensors as wide as an MLP's hidden layer its backward pass is given;
- written: for every kernel of ours the arguments that torch found it to write (the others are not copied);
- built: the names of all kernels that Inductor called for, its own and ours, and that Triton compiled for sm_90.

The tensors are fake, and traced on the CPU: PyTorch's autograd asks a real driver about every other device. For
Inductor the graphs then move to a GPU of which there is as much here as it asks about.
"""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels are not traced

import torch
import triton
from torch._dynamo import device_interface
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget

import model.dropout
import model.mlp
from model.adamae import AdaMAE
from model.config import ModelConfig
from training.compiling import compile_in_place

MODELS = {
    "checkpointing": ModelConfig("tiny", encoder_depth=1, decoder_depth=2, activation_checkpointing=True),
    "sampler's gradient reaches the tokens": ModelConfig(
        "tiny", encoder_depth=1, decoder_depth=1, detach_sampler_input=False
    ),
}
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Properties:
    """What Inductor asks about an H200."""

    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    total_memory: int = 141 * 10**9
    L2_cache_size: int = 50 * 2**20
    warp_size: int = 32


class Driver:
    """As much of a GPU as Triton asks about."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return DEVICE


class Interface(device_interface.CudaInterface):
    """As much of a GPU as Inductor asks about."""

    device = staticmethod(lambda index: nullcontext())
    synchronize = staticmethod(lambda device=None: None)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    get_compute_capability = staticmethod(lambda device=None: 90)
    get_device_properties = staticmethod(lambda device=None: Properties())

    class Worker(device_interface.CudaInterface.Worker):
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: Properties())


def take_the_paths_of_a_gpu() -> None:
    """In the model, for the rest of this process."""
    for name, module in sys.modules.items():
        if name.startswith("kernels.") and hasattr(module, "runs_triton"):
            module.runs_triton = lambda tensor: True
    for module in (model.dropout, model.mlp):
        module.drop = lambda x, kept, p: torch.ops.aten.native_dropout_backward(x, kept, 1 / (1 - p))
    triton.runtime.driver.set_active(Driver())


def pretend_there_is_a_gpu() -> None:
    """To Inductor, for the rest of this process."""
    device_interface.get_interface_for_device("cuda")  # registers the real one first
    device_interface.register_interface_for_device("cuda", Interface)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: Properties()
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_rng_state = lambda device=None: torch.zeros(16, dtype=torch.uint8)
    has_triton.cache_clear()
    triton_helpers.set_driver_to_gpu = lambda: None
    # Traced on the CPU, a random draw is an operator of PyTorch's; on a GPU Inductor would make it one of its own.
    inductor.fallback_random = True
    inductor.force_disable_caches = True
    inductor.compile_threads = 1


def trace(config: ModelConfig) -> list[GraphModule]:
    """The graphs of a step in bf16, forward and backward, divided as torch.compile's own backend divides them."""
    graphs = []

    def keep(graph: GraphModule, example: list) -> GraphModule:
        graphs.append(graph)
        return graph

    adamae = AdaMAE(config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        clip = torch.zeros(2, config.num_frames, config.image_size, config.image_size, 3, dtype=torch.uint8)
        scalar = torch.zeros((), dtype=torch.int64)
        backend = aot_autograd(
            fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )  # fmt: skip
        compile_in_place(adamae, fullgraph=True, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            output = adamae(clip.permute(0, 4, 1, 2, 3), scalar, scalar)
        output.loss.backward()
    return graphs


def hidden_layers_kept(forward: GraphModule, config: ModelConfig) -> int:
    """How many outputs of the forward graph are activations of the width of an MLP's hidden layer."""
    hidden = {4 * config.dimensions.encoder_width, 4 * config.dimensions.decoder_width}
    (outputs,) = forward.graph.output_node().args
    values = [node.meta["val"] for node in outputs if isinstance(node, torch.fx.Node) and node.op != "placeholder"]
    return sum(value.is_floating_point() and value.ndim > 1 and value.shape[-1] in hidden for value in values)


def kernel_name(index: int) -> str:
    kernel = kernel_side_table.get_kernel(index)
    while not hasattr(kernel, "__name__"):  # torch wraps a kernel that is told its number of warps
        kernel = kernel.fn
    return kernel.__name__


def generated(graph: GraphModule) -> str:
    """The program that Inductor makes of a graph for a GPU."""

    def on_gpu(value: Any) -> Any:
        return DEVICE if isinstance(value, torch.device) else value

    for node in graph.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, on_gpu), map_aggregate(node.kwargs, on_gpu)
    graph.recompile()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE) for x in values]
    programs: list[str] = []

    def keep(lowering: GraphLowering) -> None:
        program = lowering.codegen()[0]
        programs.append(getattr(program, "value", program))
        raise NotImplementedError("to load it takes a GPU")

    with patch.object(GraphLowering, "_compile_to_module", keep), tracing(TracingContext(fake)), V.set_fake_mode(fake):
        try:
            compile_fx.compile_fx_inner(graph, inputs)
        except Exception:
            if not programs:
                raise
    return programs[0]


def built(code: str) -> set[str]:
    """The kernels that a program of Inductor's calls for, each compiled by Triton, in the first of its block sizes."""
    names = set()

    def precompile(kernel: CachingAutotuner, *_: Any, **__: Any) -> None:
        kernel._precompile_config(kernel.configs[0])
        names.add(kernel.fn.__name__)

    with patch.object(CachingAutotuner, "precompile", precompile):
        PyCodeCache.load(code)
    return names


if __name__ == "__main__":
    take_the_paths_of_a_gpu()
    graphs = {name: trace(config) for name, config in MODELS.items()}
    pretend_there_is_a_gpu()
    everything = list(chain(*graphs.values()))
    written = {
        kernel_name(node.kwargs["kernel_idx"]): node.kwargs["tensors_to_clone"]
        for graph in everything
        for node in graph.graph.nodes
        if "triton_kernel_wrapper_functional" in str(node.target)
    }
    found = {
        "graphs": {name: len(of_model) for name, of_model in graphs.items()},
        "kept": {name: hidden_layers_kept(graphs[name][0], config) for name, config in MODELS.items()},
        "written": written,
        "built": sorted(set().union(*(built(generated(graph)) for graph in everything))),
    }
    print(json.dumps(found))
