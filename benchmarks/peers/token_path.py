"""The token path as the published code goes it.

It has boolean masks, float targets of every patch, and a Categorical per clip. This is written from
its behavior, for naive_adamae.py and for benchmarks/kernel_speed.py to measure against. Masks are
bool [B, N], True where a token is masked.
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
    """Turn 8-bit planes uint8 [B, T, bytes] into RGB uint8 [B, T, height, width, 3].

    box: left, top, width and height, all even: chroma has half the size of luma, and is centered.
    """
    x, y, w, h = box
    luma, *chroma = split_planes(frames.flatten(0, 1), *stored, 1)
    crops = [luma[:, y : y + h, x : x + w]]
    rows = slice(y // 2, (y + h) // 2)
    columns = slice(x // 2, (x + w) // 2)
    crops += [plane[:, rows, columns] for plane in chroma]
    size = (height, width)
    scaled = []
    for crop in crops:
        plane = interpolate(crop[:, None], size, mode="bilinear", antialias=True)
        scaled.append(plane)
    planes = torch.cat(scaled, dim=1).movedim(1, 3)
    rgb = planes @ matrix[:, :3].T + matrix[:, 3]
    return rgb.clamp(0, 255).round().to(torch.uint8).unflatten(0, frames.shape[:2])


def sample_mask(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return a mask of all but `k` tokens, and the probabilities, both [B, N], of logits [B, N]."""
    probabilities = torch.softmax(logits.float(), dim=-1)
    # Sampling without replacement, as by the k largest of Gumbel-perturbed logits in kernels/.
    visible = torch.multinomial(probabilities, k, replacement=False)
    mask = torch.ones_like(probabilities)
    mask.scatter_(dim=-1, index=visible, value=0.0)
    return mask.to(torch.bool), probabilities


def gather(x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
    """Return the visible ones of tokens [B, N, D]; positions are added to all of them before."""
    # A boolean mask as an index makes the host wait for the GPU, to learn the size of the result.
    x = x + table.to(x.dtype)
    return x[~mask].reshape(x.shape[0], -1, x.shape[2])


def scatter(features: Tensor, mask_token: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """Return the decoder's input [B, N, E]: visible features [B, K, E], then mask tokens.

    Each has its position added, of which the table [N, E] is first copied for every clip.
    """
    batch, _, width = features.shape
    positions = table.to(features.dtype).expand(batch, -1, -1).clone().detach()
    visible = positions[~mask].reshape(batch, -1, width)
    masked = positions[mask].reshape(batch, -1, width)
    return torch.cat([features + visible, mask_token.to(features.dtype) + masked], dim=1)


def normalized_clip(clip: Tensor) -> Tensor:
    """Turn uint8 [B, T, H, W, 3] into what the published loader hands to the model.

    That is float [B, 3, T, H, W], normalized.
    """
    mean = channel_values(IMAGENET_MEAN, clip.device)
    std = channel_values(IMAGENET_STD, clip.device)
    return (clip.movedim(4, 1).float() / 255 - mean) / std


def channel_values(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a value per channel, to be used with [B, 3, T, H, W]."""
    return torch.tensor(values, device=device).view(3, 1, 1, 1)


def patches(clip: Tensor, tubelet_size: int, patch_size: int, dtype: torch.dtype) -> Tensor:
    """Return the tokenizer's input as a matrix [B, N, P], from a uint8 clip."""
    pattern = "b c (t p0) (h p1) (w p2) -> b (t h w) (p0 p1 p2 c)"
    pixels = normalized_clip(clip)
    return rearrange(pixels, pattern, p0=tubelet_size, p1=patch_size, p2=patch_size).to(dtype)


def patch_loss(
    pred: Tensor, clip: Tensor, mask: Tensor, tubelet_size: int, patch_size: int
) -> Tensor:
    """Return the mean squared error [B, M] to the normalized patches of a normalized clip."""
    with torch.no_grad():
        mean = channel_values(IMAGENET_MEAN, clip.device)
        std = channel_values(IMAGENET_STD, clip.device)
        # In [0, 1] again: the loader has normalized the clip, but targets are patches of pixels.
        pixels = clip * std + mean
        pattern = "b c (t p0) (h p1) (w p2) -> b (t h w) (p0 p1 p2) c"
        squeezed = rearrange(pixels, pattern, p0=tubelet_size, p1=patch_size, p2=patch_size)
        centered = squeezed - squeezed.mean(dim=-2, keepdim=True)
        normalized = centered / (squeezed.var(dim=-2, unbiased=True, keepdim=True).sqrt() + 1e-6)
        # Every patch has been normalized by now; the mask chooses at the end.
        vectors = rearrange(normalized, "b n p c -> b n (p c)")
        labels = vectors[mask].reshape(clip.shape[0], -1, pred.shape[-1])
    return (pred.float() - labels).square().mean(dim=-1)


def sampling_loss(probabilities: Tensor, mask: Tensor, loss_per_token: Tensor) -> Tensor:
    """Return the sampling loss: the mean over clips, which are computed one after the other."""
    losses = []
    token_losses = loss_per_token.detach()
    ids = torch.arange(mask.shape[1], device=mask.device)
    # A few small kernels for each clip: on a GPU, a batch of 64 pays for hundreds of launches.
    for index in range(len(mask)):
        distribution = torch.distributions.Categorical(probs=probabilities[index])
        log_probs = distribution.log_prob(ids)
        losses.append(-(log_probs[mask[index]] * token_losses[index]).mean())
    return torch.stack(losses).mean()
