"""The reconstruction loss of every masked token, against targets that are made from the uint8 clip where it is used."""

from typing import Literal

from torch import Tensor

from kernels.patchify import gather_patches

Kind = Literal["mse", "l1"]
EPSILON = 1e-6  # added to the standard deviation of pixels in [0, 1], SPEC §4


def masked_patch_loss(
    pred: Tensor,
    clip: Tensor,
    masked_ids: Tensor,
    tubelet_size: int,
    patch_size: int,
    kind: Kind = "mse",
    normalize: bool = True,
) -> Tensor:
    """pred [B, M, P], clip uint8 [B, C, T, H, W] of any strides, masked_ids int64 [B, M] -> fp32 [B, M].

    The mean over a patch's P values of the squared ("mse") or absolute ("l1") difference to the patch, which is
    normalised by channel with its mean and unbiased standard deviation, or only scaled to [0, 1].
    """
    return definition(pred, clip, masked_ids, tubelet_size, patch_size, kind, normalize)


def definition(
    pred: Tensor, clip: Tensor, masked_ids: Tensor, tubelet_size: int, patch_size: int, kind: Kind, normalize: bool
) -> Tensor:
    pixels = gather_patches(clip, masked_ids, tubelet_size, patch_size).float()
    if normalize:
        # In pixels of 0…255, whose sums are exact in fp32: a flat patch is then exactly 0.
        mean = pixels.mean(dim=2, keepdim=True)
        pixels = (pixels - mean) / (pixels.std(dim=2, keepdim=True) + 255 * EPSILON)
    else:
        pixels = pixels / 255
    difference = pred.float() - pixels.flatten(2)
    return (difference.square() if kind == "mse" else difference.abs()).mean(dim=-1)
