"""Let torch.compile trace a training step of the model on the Triton path, as on a GPU, and list what it finds.

`python tests/kernels/trace_kernels.py` prints a JSON object: for every kernel in the graphs the arguments that torch
found it to write (the others are not copied), and the number of graphs of each model: one forward, one backward.

The tensors are fake, and on the CPU: PyTorch's autograd asks a real driver about every other device.
"""

import json
import os
import sys
from itertools import chain

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels are not traced

import torch
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from triton.backends.compiler import GPUTarget

from model.adamae import AdaMAE
from model.config import ModelConfig

MODELS = {
    "checkpointing": ModelConfig("tiny", decoder_depth=2, activation_checkpointing=True),
    "sampler's gradient reaches the tokens": ModelConfig("tiny", decoder_depth=1, detach_sampler_input=False),
}


class Driver:
    """As much of a GPU as the tracing of a kernel asks about."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def take_the_triton_path() -> None:
    for name, module in sys.modules.items():
        if name.startswith("kernels.") and hasattr(module, "runs_triton"):
            module.runs_triton = lambda tensor: True


def trace(config: ModelConfig) -> list[GraphModule]:
    """The graphs of a step in bf16, forward and backward, divided as torch.compile's own backend divides them."""
    graphs = []

    def keep(graph: GraphModule, example: list) -> GraphModule:
        graphs.append(graph)
        return graph

    model = AdaMAE(config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = 2, 3, config.num_frames, config.image_size, config.image_size
        clip, scalar = torch.zeros(shape, dtype=torch.uint8), torch.zeros((), dtype=torch.int64)
        partition = min_cut_rematerialization_partition
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
        with torch.autocast("cpu", torch.bfloat16):
            output = torch.compile(model, fullgraph=True, backend=backend)(clip, scalar, scalar)
        output.loss.backward()
    return graphs


def kernel_name(index: int) -> str:
    kernel = kernel_side_table.get_kernel(index)
    while not hasattr(kernel, "__name__"):  # torch wraps a kernel that is told its number of warps
        kernel = kernel.fn
    return kernel.__name__


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    take_the_triton_path()
    graphs = {name: trace(config) for name, config in MODELS.items()}
    written = {
        kernel_name(node.kwargs["kernel_idx"]): node.kwargs["tensors_to_clone"]
        for graph in chain(*graphs.values())
        for node in graph.graph.nodes
        if "triton_kernel_wrapper_functional" in str(node.target)
    }
    print(json.dumps({"graphs": {name: len(found) for name, found in graphs.items()}, "written": written}))
