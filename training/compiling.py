"""torch.compile, set to keep less for the backward pass."""

from typing import Any

from torch import nn
from torch._functorch import config as partitioner


def compile_in_place(model: nn.Module, **options: Any) -> None:
    """Have the model compiled at its first call; its parameters keep their names. `options` are torch.compile's.

    What a matrix product of the backward pass reads, PyTorch would keep even where other kept tensors give it again at
    no product's cost: outputs of GELU and LayerNorm, weights in bf16. Made again instead, 1.3 GiB are kept of 2.3
    (ViT-Base, ρ .95, 16 clips, counted in the graphs), and a step moves 0.4 GB more, by Inductor's count.
    """
    partitioner.ban_recompute_materialized_backward = False
    model.compile(**options)
