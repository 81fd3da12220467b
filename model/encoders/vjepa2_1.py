"""V-JEPA 2.1, from the files that its authors publish (`vjepa2_1_vitl_dist_vitG_384.pt`).

They hold several networks: the encoder that is averaged over the training is taken. Architecture
after facebookresearch/vjepa2, `app/vjepa_2_1/models/vision_transformer.py`.
"""

from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from timm.models.eva import EvaBlock
from torch import Tensor, nn

from adamae.common.errors import InputError
from adamae.kernels.patchify import IMAGENET_MEAN, IMAGENET_STD
from adamae.model.channels import Clip
from adamae.model.config import Grid
from adamae.model.encoder import Features
from adamae.model.encoders.encoder import Encoder, count_patches
from adamae.model.encoders.normalization import Normalization
from adamae.model.state_dict import StateDict, load_weights
from adamae.model.weights.tensor_files import read_state_dict

# Of a token: frames, height and width.
PATCH = (2, 16, 16)
# The clips of the last stage of the pre-training.
TRAINED_FRAMES = 64
TRAINED_SIZE = (384, 384)
# Positions of rows and columns are scaled to the grid of 256 pixels, with which it was begun.
BASE_PATCHES = 16
HEAD_WIDTH = 64
PREFIX = "backbone."
# The norm of the last of four levels is the output's.
OUTPUT_NORM = "norms_block.3."
# For single images, for other levels, and a table that the encoder does not use.
UNUSED = ("patch_embed_img.", "img_mod_embed", "norms_block.", "pos_embed")


class VisionTransformer(nn.Module):
    """The encoder, with rotary positions along time, height and width."""

    rope: Tensor

    def __init__(self, width: int, depth: int, num_heads: int, mlp_width: int, grid: Grid) -> None:
        super().__init__()
        self.patch_embed = nn.Conv3d(3, width, PATCH, PATCH)
        self.video_mod_embed = nn.Parameter(torch.zeros(1, 1, width))
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            block = EvaBlock(
                width,
                num_heads,
                mlp_ratio=mlp_width / width,
                num_prefix_tokens=0,
                attn_type="rope",
                norm_layer=norm,
            )
            self.blocks.append(block)
        self.norm = norm(width)
        rope = rotary_positions(grid, width // num_heads)
        self.register_buffer("rope", rope, persistent=False)

    def forward(self, clip: Float[Tensor, "B 3 T H W"]) -> Float[Tensor, "B N D"]:
        """Encode normalized clips."""
        x = self.patch_embed(clip).flatten(2).mT + self.video_mod_embed
        for block in self.blocks:
            x = block(x, rope=self.rope)
        return self.norm(x)


def rotary_positions(grid: Grid, head_width: int) -> Float[Tensor, "N 2d"]:
    """Compute the sines, and behind them the cosines, of the tokens' rotations, as timm takes them.

    The axes get an equal, even number of channels, in the order t, h, w: 20 each of 64. The rest
    (4 of 64) is not rotated. A pair of channels, 2 j and 2 j + 1, is rotated by position · 10000 **
    (−2 j / channels). Token frames are counted; rows and columns are scaled to 0 to 15.
    """
    t, h, w = grid
    if min(h, w) < 2:
        raise InputError("a V-JEPA 2.1 takes frames of at least 32×32 pixels")
    last = BASE_PATCHES - 1
    axes = (torch.arange(t).float(), torch.linspace(0, last, h), torch.linspace(0, last, w))
    num_channels = 2 * (head_width // 3 // 2)
    frequencies = 10000 ** (-torch.arange(0, num_channels, 2) / num_channels)
    angles = [
        (positions.flatten()[:, None] * frequencies).repeat_interleave(2, dim=1)
        for positions in torch.meshgrid(*axes, indexing="ij")
    ]
    unrotated = torch.zeros(t * h * w, head_width - 3 * num_channels)
    all_angles = torch.cat((*angles, unrotated), dim=1)
    return torch.cat((all_angles.sin(), all_angles.cos()), dim=1)


class VJepa21Encoder(Encoder):
    """Takes frames of any size from 32×32 pixels on, and any number, that its patches divide.

    A clip's vector is the mean over its tokens.
    """

    def __init__(
        self, path: Path, num_frames: int | None, image_size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.num_frames = num_frames or TRAINED_FRAMES
        self.image_size = image_size or TRAINED_SIZE
        self.grid = count_patches(self.num_frames, self.image_size, PATCH)
        state = convert(read_state_dict(path)[0], path)
        mlp_width, self.dim = state["blocks.0.mlp.fc1.weight"].shape
        depth = sum(name.endswith(".norm1.weight") for name in state)
        num_heads = self.dim // HEAD_WIDTH
        self.model = VisionTransformer(self.dim, depth, num_heads, mlp_width, self.grid)
        load_weights(self.model, state)
        self.normalize = Normalization(IMAGENET_MEAN, IMAGENET_STD)

    def encode(self, clip: Clip) -> Features:
        tokens = self.model(self.normalize(clip).transpose(1, 2))
        return Features(tokens.mean(dim=1), tokens)


def convert(state: StateDict, file: Path) -> StateDict:
    """Return the weights of a `VisionTransformer`; raise InputError if they are of V-JEPA 2.0."""
    converted = {}
    for prefixed, value in state.items():
        name = prefixed.removeprefix(PREFIX)
        if name.startswith(OUTPUT_NORM):
            converted[name.replace(OUTPUT_NORM, "norm.")] = value
        elif not name.startswith(UNUSED):
            converted[name.replace("patch_embed.proj.", "patch_embed.")] = value
    if "video_mod_embed" not in converted:
        raise InputError(
            f"{file} is a V-JEPA 2.0, which is read in transformers' layout: take"
            " hf://facebook/vjepa2-vitl-fpc64-256, or another of its sizes there"
        )
    return converted
