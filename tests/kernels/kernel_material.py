"""What the tests of kernels share: references to compare with, and the whole token path."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adamae.kernels import launch
from adamae.kernels.gather_tokens import gather_tokens
from adamae.kernels.gumbel_topk import gumbel_topk
from adamae.kernels.masked_patch_loss import masked_patch_loss
from adamae.kernels.patchify import patchify
from adamae.kernels.scatter_tokens import scatter_tokens
from adamae.model.sampling_loss import sampling_loss

# 2·2·3 = 12 patches of 2·8·8 pixels in each clip.
GENERATOR = torch.Generator().manual_seed(0)
CLIP = torch.randint(0, 256, (2, 4, 16, 24, 3), dtype=torch.uint8, generator=GENERATOR)
IDS = torch.tensor([[0, 3, 11], [1, 2, 7]])


def run_reference(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call an op on the CPU, where it runs its reference."""
    on_cpu = [arg.cpu() if isinstance(arg, Tensor) else arg for arg in args]
    before = launch.triton_on_cpu
    launch.triton_on_cpu = False
    try:
        return op(*on_cpu, **options)
    finally:
        launch.triton_on_cpu = before


def token_path(
    clip: Tensor,
    logits: Tensor,
    x: Tensor,
    mask_token: Tensor,
    weight: Tensor,
    seed: Tensor,
    offset: Tensor,
) -> Tensor:
    """Go from clip to loss as the model does, in few tokens."""
    visible, masked, log_probs = gumbel_topk(logits, 3, seed, offset)
    table = torch.ones(x.shape[1], x.shape[2], device=x.device)
    patches = patchify(clip, None, 2, 8, torch.bfloat16)
    features = gather_tokens(x + patches.float().mean(), visible, table)
    pred = scatter_tokens(features, mask_token, table, visible, masked)[:, 3:] @ weight
    losses = masked_patch_loss(pred, clip, masked, 2, 8)
    return losses.mean() + sampling_loss(log_probs, masked, losses)


def token_path_inputs(device: torch.device | str) -> tuple[Tensor, ...]:
    """Make clip, logits, tokens, mask token and a decoder of one matrix for `token_path`."""
    shapes = ((2, 12), (2, 12, 8), (8,), (8, 384))
    parameters = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    return CLIP.to(device), *parameters
