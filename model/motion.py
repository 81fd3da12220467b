"""How much each token of a clip moves, seen in the pixels alone: what masking by motion goes by, without learning."""

import torch
from einops import reduce
from jaxtyping import Float, UInt8
from torch import Tensor


def log_motion(clip: UInt8[Tensor, "B T H W C"], tubelet_size: int, patch_size: int) -> Float[Tensor, "B N"]:
    """Logits for a draw: the logarithm of 1 + the mean difference, in grey levels, to the neighbouring token frames.

    As EVEREST does with embeddings (Hwang et al. 2024). 1 grey level, about what a sensor's noise makes, is added so
    that what stands still keeps a chance. Of the first and the last token frame there is one neighbour.
    """
    later, earlier = clip[:, tubelet_size:], clip[:, :-tubelet_size]
    change = torch.maximum(later, earlier) - torch.minimum(later, earlier)  # in bytes: floats would take four times it
    step = reduce(
        # A sum of bytes needs no copy of them in another type.
        change.sum(dim=4, dtype=torch.int32), "b (t pt) (h ph) (w pw) -> b t h w", "sum",
        pt=tubelet_size, ph=patch_size, pw=patch_size,
    )  # fmt: skip
    step = step.float() / (clip.shape[4] * tubelet_size * patch_size**2)
    to_next, to_previous = torch.cat((step, step[:, -1:]), dim=1), torch.cat((step[:, :1], step), dim=1)
    return ((to_next + to_previous) / 2).log1p().flatten(1)
