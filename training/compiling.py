"""torch.compile, set to keep less for the backward pass."""

from typing import Any

from torch import nn
from torch._functorch import config as partitioner

from common.errors import InputError
from training.config import Compile


def compile_in_place(model: nn.Module, how: Compile = True, **options: Any) -> None:
    """Have the model compiled at its first call; its parameters keep their names. `options` are torch.compile's.

    What a matrix product of the backward pass reads, PyTorch would keep even where other kept tensors give it again at
    no product's cost: outputs of GELU and LayerNorm, weights in bf16. Made again instead, 1.3 GiB are kept of 2.3
    (ViT-Base, ρ .95, 16 clips, counted in the graphs), and a step moves 0.4 GB more, by Inductor's count.
    """
    partitioner.ban_recompute_materialized_backward = False
    if how == "reduce-overhead":
        options |= {"mode": how}
    model.compile(**options)


def check_graphs(how: Compile, device_type: str, passes: int) -> None:
    """Raises InputError where compile=reduce-overhead cannot be had: a graph's gradients lie in its own memory, and the
    next forward pass of the same step would overwrite them."""
    if how != "reduce-overhead":
        return
    if device_type != "cuda":
        raise InputError("compile=reduce-overhead is for a GPU: on a CPU, compile=true is all there is")
    if passes > 1:
        raise InputError(
            f"compile=reduce-overhead takes one forward pass a step, and batch_size makes {passes} of it: set"
            " compile=true, which small batches need graphs for and these do not"
        )
