"""The tokenizer's input: patches of the uint8 clip, scaled and normalised as ImageNet's."""

import torch
from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def patchify(
    clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """clip uint8 [B, 3, T, H, W] of any strides, ids int64 [B, K] or None for all -> (clip/255 - mean)/std, [B, K, P].

    A patch's values are in the order (p_t, p_h, p_w, c).
    """
    return definition(clip, ids, tubelet_size, patch_size, dtype)


def definition(clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int, dtype: torch.dtype) -> Tensor:
    mean = torch.tensor(IMAGENET_MEAN, device=clip.device) * 255
    std = torch.tensor(IMAGENET_STD, device=clip.device) * 255
    patches = gather_patches(clip, ids, tubelet_size, patch_size)
    return ((patches.float() - mean) / std).flatten(2).to(dtype)


def gather_patches(clip: Tensor, ids: Tensor | None, tubelet_size: int, patch_size: int) -> Tensor:
    """uint8 [B, K, p_t·p_h·p_w, C]: the patches named by `ids`, or all of them, in the order of tokens (t, h, w)."""
    batch, channels, _, height, width = clip.shape
    grid = (
        clip.unflatten(4, (-1, patch_size))
        .unflatten(3, (-1, patch_size))
        .unflatten(2, (-1, tubelet_size))
        .permute(0, 2, 4, 6, 3, 5, 7, 1)  # B, T/p_t, H/p_h, W/p_w, p_t, p_h, p_w, C; a view
    )
    if ids is None:
        return grid.reshape(batch, -1, tubelet_size * patch_size**2, channels)
    rows, columns = height // patch_size, width // patch_size
    row = torch.arange(batch, device=ids.device)[:, None]
    patches = grid[row, ids // (rows * columns), ids // columns % rows, ids % columns]
    return patches.reshape(batch, -1, tubelet_size * patch_size**2, channels)
