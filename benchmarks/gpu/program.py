"""Compile a training step for an H200 with torch.compile on a machine without one, and predict its memory.

The model is traced with tensors that have shapes but no memory, on the CPU: PyTorch's autograd asks a real driver about
every other device. For Inductor the graphs then move to a GPU that answers what Inductor asks. All functions here
change torch and triton for the rest of the process: run them in one of their own.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import triton
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo import device_interface
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
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
from torch.fx.node import Node, map_aggregate
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget

from benchmarks.accounting import LiveBytes
from benchmarks.harness import noise_clip
from model.adamae import AdaMAE
from model.config import ModelConfig
from training.parallelize import compile_in_place

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Properties:
    """The properties of an H200 that Inductor asks for."""

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


class Interface(device_interface.CudaInterface):
    """The part of a GPU that Inductor asks for."""

    device = staticmethod(lambda index: nullcontext())  # type: ignore[assignment]
    synchronize = staticmethod(lambda device=None: None)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    get_compute_capability = staticmethod(lambda device=None: 90)
    get_device_properties = staticmethod(lambda device=None: Properties())  # type: ignore[assignment]

    class Worker(device_interface.CudaInterface.Worker):
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: Properties())


def take_gpu_code_paths() -> None:
    """Have the project's ops use their Triton kernels on any tensor."""
    for name, module in sys.modules.items():
        if name.startswith("kernels.") and hasattr(module, "runs_triton"):
            module.runs_triton = lambda tensor: True  # type: ignore[attr-defined]
    target = GPUTarget("cuda", 90, 32)  # all that Triton asks a driver
    driver = SimpleNamespace(get_current_target=lambda: target, get_active_torch_device=lambda: DEVICE)
    triton.runtime.driver.set_active(driver)


def pretend_there_is_a_gpu() -> None:
    """Make Inductor compile for an H200."""
    device_interface.get_interface_for_device("cuda")  # registers the real one first
    device_interface.register_interface_for_device("cuda", Interface)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: Properties()  # type: ignore
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_rng_state = lambda device=None: torch.zeros(16, dtype=torch.uint8)
    has_triton.cache_clear()
    triton_helpers.set_driver_to_gpu = lambda: None
    # Traced on the CPU, a random number is an operator of PyTorch's; on a GPU Inductor would generate its own.
    inductor.fallback_random = True
    inductor.force_disable_caches = True
    inductor.compile_threads = 1


def trace(config: ModelConfig, batch_size: int) -> list[GraphModule]:
    """Trace a step in bf16 into its forward and backward graph, partitioned as torch.compile's own backend does."""
    graphs = []

    def keep(graph: GraphModule, example: list) -> Callable:
        graphs.append(graph)
        return make_boxed_func(graph)

    take_gpu_code_paths()
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    with torch.device("meta"):  # FakeTensorMode cannot initialize weights: it has no values
        adamae = AdaMAE(config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        adamae.to_empty(device="cpu")
        compile_in_place(adamae, fullgraph=True, dynamic=False, backend=backend)
        clip = noise_clip(config, batch_size, torch.device("cpu"))
        seed, offset = (torch.zeros((), dtype=torch.int64) for _ in range(2))
        with torch.autocast("cpu", torch.bfloat16):
            output = adamae(clip, seed, offset)
        output.loss.backward()
    return graphs


def generate_program(graph: GraphModule) -> str:
    """Return the program that Inductor generates from a graph for a GPU."""

    def on_gpu(value: Any) -> Any:
        return DEVICE if isinstance(value, torch.device) else value

    for node in graph.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, on_gpu), map_aggregate(node.kwargs, on_gpu)
    graph.recompile()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        inputs = [_empty_like(node, DEVICE) for node in _inputs(graph)]
    programs: list[str] = []

    def keep(lowering: GraphLowering) -> None:
        program: Any = lowering.codegen()[0]
        programs.append(getattr(program, "value", program))
        raise NotImplementedError("loading it needs a GPU")

    GraphLowering._compile_to_module = keep  # type: ignore[assignment, method-assign]
    with tracing(TracingContext(fake)), V.set_fake_mode(fake):
        try:
            compile_fx.compile_fx_inner(graph, inputs)
        except Exception:
            if not programs:
                raise
    return programs[0]


def predict_compiled_peak(config: ModelConfig, batch_size: int) -> int:
    """Return the peak bytes of a compiled step, without what `accounting.predict` leaves out too. Takes a minute."""
    torch._logging.set_logs(inductor=logging.ERROR)  # it would warn about the program that is not loaded
    with TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        graphs = trace(config, batch_size)
        pretend_there_is_a_gpu()
        return count_peak(config, graphs, [generate_program(graph) for graph in graphs])


def count_peak(config: ModelConfig, graphs: list[GraphModule], programs: list[str]) -> int:
    """Run the programs without their kernels, with AdamW's moments allocated, and return the peak bytes."""
    with torch.device("meta"):
        weights = list(AdaMAE(config).parameters())
    live = LiveBytes("step", on_gpu=True)
    skip_kernels()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        forward, backward = (load_program(program) for program in programs)
        moments = [torch.empty_like(weight, device="cpu") for weight in weights for _ in range(2)]
        outputs = forward([_empty_like(node) for node in _inputs(graphs[0])])
        # The backward pass takes what the forward pass keeps, its last outputs, and the losses' gradients.
        gradients = [node for node in _inputs(graphs[1]) if node.name.startswith("tangents")]
        kept = len(_inputs(graphs[1])) - len(gradients)
        given = [*outputs[-kept:], *(_empty_like(node) for node in gradients)]
        del outputs
        backward(given)  # empties the list, and so frees what it has used
        moments.clear()
    return live.at_peak.total()


def skip_kernels() -> None:
    """Have programs launch nothing, and random operators of checkpointing work on fake tensors."""
    CachingAutotuner.precompile = CachingAutotuner.run = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    torch.cuda._DeviceGuard = lambda index: nullcontext()  # type: ignore[assignment, misc, return-value]
    torch.cuda.set_device = lambda device: None
    random: Any = torch.ops.higher_order
    random.run_and_save_rng_state = lambda op, *args: (torch.empty(16, dtype=torch.uint8), op(*args))
    random.run_with_rng_state = lambda state, op, *args: op(*args)


def load_program(program: str) -> Callable[[list], tuple]:
    """Load a program of Inductor's so that it allocates fake tensors and calls no library."""

    class Products:
        def __getattr__(self, name: str) -> Callable[..., Tensor]:
            return lambda *_, out, **__: out

    def allocate(shape: tuple, stride: tuple, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")

    module: Any = PyCodeCache.load(program)
    module.empty_strided_cuda, module.extern_kernels = allocate, Products()
    module.reinterpret_tensor = lambda x, shape, stride, offset=0: x.as_strided(
        shape, stride, x.storage_offset() + offset
    )
    module.get_raw_stream = lambda index: 0
    module.copy_if_misaligned = lambda x: x
    for name in [name for name in vars(module) if name.startswith("assert_")]:
        setattr(module, name, lambda *_: None)
    entry: Callable[[list], tuple] = module.call
    return entry


def _inputs(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _empty_like(node: Node, device: str | torch.device = "cpu") -> Tensor:
    """int(): the size of a random generator's state is symbolic."""
    value = node.meta["val"]
    shape, stride = ([int(size) for size in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=device)
