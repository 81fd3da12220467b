"""Let torch.compile make the program of a training step for a GPU, have Triton compile its kernels, and list both.

`python tests/kernels/compile_model.py` prints a JSON object:
- graphs: of each model, how many; one forward and one backward where nothing broke in between;
- kept: of each model, how many tensors as wide as an MLP's hidden layer its backward pass is given;
- written: for every kernel of ours the arguments that torch found it to write (the others are not copied);
- built: the names of all kernels that Inductor called for, its own and ours, and that Triton compiled for sm_90;
- peak, peak_uncompiled: the bytes alive at the moment of a step when most is, and so of a plain step.
built and peak are of the model with checkpointing: a program takes half a minute.
"""

import json
import os
from itertools import chain
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels are not traced
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that the same happens where there is a GPU

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.fx import GraphModule

from benchmarks.accounting import predict
from benchmarks.gpu.program import count_peak, generate_program, pretend_there_is_a_gpu, trace
from model.config import ModelConfig

MODELS = {
    "checkpointing": ModelConfig(
        "tiny", encoder_depth=1, decoder_depth=2, activation_checkpointing=True, detach_sampler_input=False
    ),
    "none": ModelConfig("tiny", encoder_depth=1, decoder_depth=1),
}
BUILT = "checkpointing"  # the model that a program is made of: its sampler's gradient reaches the tokens


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
    graphs = {name: trace(config, batch_size=2) for name, config in MODELS.items()}
    written = {
        kernel_name(node.kwargs["kernel_idx"]): node.kwargs["tensors_to_clone"]
        for graph in chain(*graphs.values())
        for node in graph.graph.nodes
        if "triton_kernel_wrapper_functional" in str(node.target)
    }
    kept = {name: hidden_layers_kept(graphs[name][0], config) for name, config in MODELS.items()}
    pretend_there_is_a_gpu()
    programs = [generate_program(graph) for graph in graphs[BUILT]]
    found = {
        "graphs": {name: len(of_model) for name, of_model in graphs.items()},
        "kept": kept,
        "written": written,
        "built": sorted(set().union(*map(built, programs))),
        "peak": count_peak(MODELS[BUILT], graphs[BUILT], programs),
        "peak_uncompiled": predict(MODELS[BUILT], 2).peak_bytes,
    }
    print(json.dumps(found))
