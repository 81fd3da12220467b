"""The token path as the published code goes it: boolean masks, float targets of every patch, a Categorical a clip.

Written from its behavior, for naive_adamae.py and for benchmarks/kernel_speed.py to measure against. Masks are bool
[B, N], True = masked.
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate

from adamae.kernels.crop_resize import split_planes
from adamae.kernels.patchify import IMAGENET_MEAN, IMAGENET_STD


def crop_resize(
    frames: Tensor,
    stored: tuple[int, int],
    box: tuple[int, int, int, int],
    matrix: Tensor,
    height: int,
    width: int,
) -> Tensor:
    """8-bit planes uint8 [B, T, bytes], one box of even numbers -> RGB uint8 [B, T, H, W, 3]; chroma is centered."""
    x, y, w, h = box
    luma, *chroma = split_planes(frames.flatten(0, 1), *stored, 1)
    crops = (
        luma[:, y : y + h, x : x + w],
        *(half[:, y // 2 : (y + h) // 2, x // 2 : (x + w) // 2] for half in chroma),
    )
    planes = [
        interpolate(crop[:, None], (height, width), mode="bilinear", antialias=True)
        for crop in crops
    ]
    rgb = torch.cat(planes, dim=1).movedim(1, 3) @ matrix[:, :3].T + matrix[:, 3]
    return rgb.clamp(0, 255).round().to(torch.uint8).unflatten(0, frames.shape[:2])


def sample_mask(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits [B, N] -> mask, probabilities [B, N]."""
    probabilities = torch.softmax(logits.float(), dim=-1)
    visible = torch.multinomial(probabilities, k, replacement=False)
    mask = torch.ones_like(probabilities)
    mask.scatter_(dim=-1, index=visible, value=0.0)
    return mask.to(torch.bool), probabilities


def gather(x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
    """Positions are added to all tokens [B, N, D] before the visible ones are picked."""
    x = x + table.to(x.dtype)
    return x[~mask].reshape(x.shape[0], -1, x.shape[2])


def scatter(features: Tensor, mask_token: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    batch, _, width = features.shape
    positions = table.to(features.dtype).expand(batch, -1, -1).clone().detach()
    visible = positions[~mask].reshape(batch, -1, width)
    masked = positions[mask].reshape(batch, -1, width)
    return torch.cat([features + visible, mask_token.to(features.dtype) + masked], dim=1)


def normalized_clip(clip: Tensor) -> Tensor:
    """uint8 [B, T, H, W, 3] -> what the published loader hands to the model: float [B, 3, T, H, W], normalized."""
    mean, std = (
        torch.tensor(values, device=clip.device).view(3, 1, 1, 1)
        for values in (IMAGENET_MEAN, IMAGENET_STD)
    )
    return (clip.movedim(4, 1).float() / 255 - mean) / std


def patches(clip: Tensor, tubelet_size: int, patch_size: int, dtype: torch.dtype) -> Tensor:
    """The tokenizer's input as one matrix, from a uint8 clip."""
    pattern = "b c (t p0) (h p1) (w p2) -> b (t h w) (p0 p1 p2 c)"
    return rearrange(
        normalized_clip(clip), pattern, p0=tubelet_size, p1=patch_size, p2=patch_size
    ).to(dtype)


def patch_loss(
    pred: Tensor, clip: Tensor, mask: Tensor, tubelet_size: int, patch_size: int
) -> Tensor:
    """MSE of normalized patches [B, M]; the float clip is there already, as the published loader gives it."""
    with torch.no_grad():
        mean, std = (
            torch.tensor(v, device=clip.device).view(3, 1, 1, 1)
            for v in (IMAGENET_MEAN, IMAGENET_STD)
        )
        pixels = clip * std + mean  # in [0, 1]
        pattern = "b c (t p0) (h p1) (w p2) -> b (t h w) (p0 p1 p2) c"
        squeezed = rearrange(pixels, pattern, p0=tubelet_size, p1=patch_size, p2=patch_size)
        centered = squeezed - squeezed.mean(dim=-2, keepdim=True)
        normalized = centered / (squeezed.var(dim=-2, unbiased=True, keepdim=True).sqrt() + 1e-6)
        labels = rearrange(normalized, "b n p c -> b n (p c)")[mask].reshape(
            clip.shape[0], -1, pred.shape[-1]
        )
    return (pred.float() - labels).square().mean(dim=-1)


def sampling_loss(probabilities: Tensor, mask: Tensor, loss_per_token: Tensor) -> Tensor:
    losses = []
    for clip_probabilities, clip_mask, losses_of_clip in zip(
        probabilities, mask, loss_per_token.detach(), strict=True
    ):
        distribution = torch.distributions.Categorical(probs=clip_probabilities)
        log_probs = distribution.log_prob(torch.arange(len(clip_mask), device=mask.device))
        losses.append(-(log_probs[clip_mask] * losses_of_clip).mean())
    return torch.stack(losses).mean()
