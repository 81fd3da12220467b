"""Let torch.compile trace the Triton path on tensors that claim to be on a GPU, and list what it finds.

`python tests/kernels/trace_kernels.py` prints a JSON object: for every kernel in the graph the arguments that torch
found it to write (the others are not copied), and the number of graphs.
"""

import json
import os

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels are not traced

import torch
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget

from kernels.gather_tokens import gather_tokens_backward_op
from kernels.gumbel_topk import gumbel_topk_backward_op
from kernels.masked_patch_loss import masked_patch_loss_backward_op
from kernels.scatter_tokens import mask_token_gradient_op
from tests.kernels.test_definitions import token_path, token_path_inputs


class Driver:
    """As much of a GPU as the tracing of a kernel asks about."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def backward_path(grad, ids, pred, clip, statistics, log_probs):
    return (
        gather_tokens_backward_op(grad, ids, 1568),
        mask_token_gradient_op(grad, 3, torch.float32),
        masked_patch_loss_backward_op(log_probs[:, :500], pred, clip, ids, statistics, 2, 8, "mse", True),
        gumbel_topk_backward_op(log_probs, log_probs, torch.bfloat16),
    )


def trace(function, *inputs) -> list:
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph

    torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*inputs)
    return graphs


def kernel_name(index: int) -> str:
    kernel = kernel_side_table.get_kernel(index)
    while not hasattr(kernel, "__name__"):  # torch wraps a kernel that is told its number of warps
        kernel = kernel.fn
    return kernel.__name__


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), torch.device("cuda"):
        scalar = torch.empty((), dtype=torch.int64)
        clip, *learnt = token_path_inputs("cuda")
        graphs = trace(token_path, clip, *learnt, scalar, scalar)
        ids = torch.empty(2, 500, dtype=torch.int64)
        grad, pred, statistics = torch.empty(2, 500, 32), torch.empty(2, 500, 384), torch.empty(2, 500, 6)
        graphs += trace(backward_path, grad, ids, pred, clip, statistics, torch.empty(2, 1568))
    written = {
        kernel_name(node.kwargs["kernel_idx"]): node.kwargs["tensors_to_clone"]
        for graph in graphs
        for node in graph.graph.nodes
        if "triton_kernel_wrapper_functional" in str(node.target)
    }
    print(json.dumps({"graphs": len(graphs), "written": written}))
