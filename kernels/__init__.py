"""From decoded planes to the loss: every op runs Triton on CUDA and its `*_ref` in plain PyTorch elsewhere."""

from kernels.crop_resize import crop_resize
from kernels.gather_tokens import gather_tokens
from kernels.gumbel_topk import gumbel_topk
from kernels.masked_patch_loss import masked_patch_loss
from kernels.patchify import patchify
from kernels.sampling_loss import sampling_loss
from kernels.scatter_tokens import scatter_tokens

__all__ = [
    "crop_resize",
    "gather_tokens",
    "gumbel_topk",
    "masked_patch_loss",
    "patchify",
    "sampling_loss",
    "scatter_tokens",
]
