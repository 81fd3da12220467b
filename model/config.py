"""The model's configuration. Letters of shapes everywhere in this project:

B clips · T H W C pixels · N tokens · K visible tokens · M masked tokens · D encoder width · E decoder width
P values of a patch (tubelet_size · patch_size² · in_channels)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Literal, NamedTuple

from adamae.common.config_fields import check_ranges, option
from adamae.common.errors import InputError
from adamae.model.registry import DECODERS, MASKS, TARGETS

Grid = tuple[int, int, int]  # tokens along time, height and width


class Size(NamedTuple):
    encoder_width: int
    encoder_depth: int
    encoder_heads: int
    decoder_width: int
    decoder_depth: int
    decoder_heads: int


# arXiv 2211.09120, supplementary; `tiny` is for tests and the demo.
SIZES = {
    "tiny": Size(96, 3, 4, 96, 2, 4),
    "small": Size(384, 12, 6, 192, 4, 3),
    "base": Size(768, 12, 12, 384, 4, 6),
    "large": Size(1024, 24, 16, 512, 4, 8),
    "huge": Size(1280, 32, 16, 512, 4, 8),
}

# Of one part, far above any that was ever trained (ViT-22B: 6,144 wide, 48 deep), far below what fills a machine.
MAX_WIDTH, MAX_DEPTH = 16_384, 256
MAX_CHANNELS = 12
MAX_TOKENS = 2**14  # of a clip, as kernels.gumbel_topk samples: 128 frames of 256 × 256 pixels

SAMPLER_HEADS = 8  # at every size, as in the authors' code


@dataclass
class ModelConfig:
    """Architecture and objective; the defaults are the paper's ViT-Base."""

    size: Literal[*SIZES] = "base"  # type: ignore[valid-type]
    """ViT size of encoder and decoder; tiny is for tests and the demo"""
    num_frames: int = option(16, at_least=1)
    """frames per clip"""
    image_size: int | list[int] = 224
    """clip size in pixels: side of a square, or [height, width]"""
    tubelet_size: int = option(2, at_least=1)
    """frames per token"""
    patch_size: int = option(16, at_least=1)
    """height and width of a token in pixels"""
    in_channels: int = option(3, at_least=1, at_most=MAX_CHANNELS)
    """channels per frame: 3: RGB; 1: grayscale, made from RGB; for arrays (.npy), as many as they have, up to 12"""
    differences: bool = False
    """see how frames differ from the next ones instead of the frames: for few videos, whose classes differ by motion"""
    positions: Literal["flat-1d", "separable-3d"] = "flat-1d"
    """flat-1d: 1-D sin-cos over the flattened index; separable-3d: over time, row and column"""
    encoder_width: int | None = option(None, at_least=1, at_most=MAX_WIDTH)
    """embedding dimension; null: from model.size, here and below"""
    encoder_depth: int | None = option(None, at_least=1, at_most=MAX_DEPTH)
    """encoder blocks"""
    encoder_heads: int | None = option(None, at_least=1, at_most=MAX_WIDTH)
    """encoder attention heads"""
    decoder_width: int | None = option(None, at_least=1, at_most=MAX_WIDTH)
    """decoder embedding dimension"""
    decoder_depth: int | None = option(None, at_least=1, at_most=MAX_DEPTH)
    """decoder blocks; Table 1 (c)"""
    decoder_heads: int | None = option(None, at_least=1, at_most=MAX_WIDTH)
    """decoder attention heads"""

    masking: Literal[*MASKS] = "adaptive"  # type: ignore[valid-type]
    """masking strategy; Table 1 (a)"""
    mask_ratio: float = option(0.95, above=0, below=1)
    """fraction of the tokens that are masked; Table 1 (b)"""
    sampler: Literal["mha", "mlp"] = "mha"
    """network that computes the sampling probabilities: attention or an MLP; Table 1 (f)"""
    sampler_depth: int = option(1, at_least=1, at_most=MAX_DEPTH)
    """attention blocks of the sampler"""
    sampler_width: int | None = option(None, at_least=1, at_most=MAX_WIDTH)
    """sampler embedding dimension; null: the encoder's"""
    detach_sampler_input: bool = True
    """false: as in the authors' code, the sampling loss also trains the tokenizer"""

    target: Literal[*TARGETS] = "pixels"  # type: ignore[valid-type]
    """what the decoder predicts: pixels, how much patches move, or features that a frozen teacher makes of the clip"""
    teacher: str = option("", free=True)
    """with target=teacher: a run or weights, or a folder with an image encoder of timm"""
    teacher_image_size: int | None = option(None, at_least=1)
    """side in pixels to which frames are scaled for an image encoder; null: what it was trained with"""
    loss: Literal["mse", "l1", "smooth-l1", "cosine"] = "mse"
    """error of a prediction: mean squared or absolute, Table 1 (d); of features also smooth L1 or 1 - cosine"""
    normalize_target: bool = True
    """normalize target pixels per patch (norm_pix_loss), features per token"""
    sampling_loss_weight: float = option(1e-4, at_least=0)
    """weight of the sampling loss; the reconstruction loss has 1"""

    decoder_attention: Literal[*DECODERS] = "self"  # type: ignore[valid-type]
    """cross: masked tokens attend to visible ones only, which is faster (CrossMAE); self: to all (the paper)"""
    decoder_share: float = option(1.0, above=0, at_most=1)
    """fraction of the masked tokens that is reconstructed in training, to save memory and time; 1: all (the paper)"""

    # Sampler and decoder see all tokens: to recompute them saves a third of the memory for 22 % more FLOPs (ViT-Base,
    # batch 16).
    activation_checkpointing: bool = option(False, free=True)
    """recompute sampler and decoder in the backward pass to save memory; pretrain only"""

    def __post_init__(self) -> None:
        check_ranges(self, "model")
        for fault in self._list_faults():
            raise InputError(fault)

    def _list_faults(self) -> Iterator[str]:
        """Yield what cannot be, a sentence each; what comes later relies on what came before."""
        size = self.image_size
        sides = [size] if isinstance(size, int) else list(size)
        if len(sides) not in (1, 2) or min(sides) < 1:
            yield f"model.image_size is {size}: must be a whole number of at least 1, or two: [height, width]"
        self.image_size = (
            sides[0] if len(set(sides)) == 1 else sides
        )  # one way to say that it is square
        parts = self.dimensions
        for part, width, heads in (
            ("encoder", parts.encoder_width, parts.encoder_heads),
            ("decoder", parts.decoder_width, parts.decoder_heads),
            ("sampler", self.sampler_dimension, SAMPLER_HEADS if self.sampler == "mha" else 1),
        ):
            if width % heads or width % 2:  # even: positions are pairs of sine and cosine
                said = f"the {part}'s width ({width}) is not an even multiple of its {heads} heads"
                yield f"{said}: change model.{part}_width"
        if self.sampler == "mlp" and self.sampler_depth != 1:
            yield f"model.sampler_depth is {self.sampler_depth}, but an mlp sampler has only depth 1"
        if self.target == "teacher" and not self.teacher:
            yield "model.target=teacher needs model.teacher: set it to a run or weights, or an image encoder's folder"
        if self.target != "teacher" and self.teacher:
            yield f"model.teacher does nothing with model.target={self.target}: set model.target=teacher"
        if self.target != "teacher" and self.loss not in ("mse", "l1"):
            yield f"model.loss={self.loss} is for features: choose mse or l1 with model.target={self.target}"
        if self.num_tokens > MAX_TOKENS:
            yield f"model.num_frames and model.image_size make {self.num_tokens} tokens per clip: at most {MAX_TOKENS}"
        if self.num_frames % self.tubelet_size:
            yield f"model.num_frames ({self.num_frames}) is not a multiple of model.tubelet_size ({self.tubelet_size})"
        if (self.differences or self.target == "motion-energy") and self.num_frames < 2:
            key = "model.differences" if self.differences else "model.target=motion-energy"
            yield f"{key} needs two frames, and model.num_frames is 1: raise it"
        if any(side % self.patch_size for side in self.frame_size):
            yield f"model.image_size ({self.image_size}) is not a multiple of model.patch_size ({self.patch_size})"
        if not 0 < self.num_visible < self.num_tokens:
            left = f"{self.num_visible} of {self.num_tokens} tokens visible under {self.masking} masking"
            yield f"model.mask_ratio {self.mask_ratio} leaves {left}: at least one must stay visible and one masked"
        if not self.num_reconstructed:
            masked = self.num_tokens - self.num_visible
            yield f"model.decoder_share {self.decoder_share} leaves none of {masked} masked tokens to predict: raise it"

    @property
    def dimensions(self) -> Size:
        own = {name: getattr(self, name) for name in Size._fields}
        return SIZES[self.size]._replace(
            **{name: value for name, value in own.items() if value is not None}
        )

    @property
    def sampler_dimension(self) -> int:
        return self.dimensions.encoder_width if self.sampler_width is None else self.sampler_width

    @property
    def frame_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        height, width = (
            [self.image_size] * 2 if isinstance(self.image_size, int) else self.image_size
        )
        return height, width

    @property
    def grid(self) -> Grid:
        """Tokens along time, height and width."""
        height, width = (side // self.patch_size for side in self.frame_size)
        return self.num_frames // self.tubelet_size, height, width

    @property
    def num_tokens(self) -> int:
        return prod(self.grid)

    @property
    def patch_values(self) -> int:
        return self.tubelet_size * self.patch_size**2 * self.in_channels

    @property
    def num_reconstructed(self) -> int:
        """Masked tokens per clip that are reconstructed in training."""
        return int((self.num_tokens - self.num_visible) * Fraction(str(self.decoder_share)))

    @property
    def unit_tokens(self) -> int:
        """Tokens that the masking strategy masks as a whole: those of a tube or a token frame, or one."""
        time, height, width = self.grid
        return {"tube": time, "frame": height * width}.get(self.masking, 1)

    @property
    def num_visible(self) -> int:
        """Visible tokens per clip: int(N·(1-ρ)) in exact arithmetic, of whole tubes or token frames."""
        num_units = self.num_tokens // self.unit_tokens
        return self.unit_tokens * int(num_units * (1 - Fraction(str(self.mask_ratio))))
