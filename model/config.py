"""The model's configuration. Letters of shapes everywhere in this project:

B clips · T H W C pixels · N tokens · K visible tokens · M masked tokens · D encoder width · E
decoder width P values of a patch (tubelet_size · patch_size² · in_channels)
"""

from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Literal, NamedTuple

from adamae.common.config_fields import check_ranges, option
from adamae.common.errors import InputError
from adamae.model.registry import DECODERS, MASKS, TARGETS, VIEWS_LOSSES

# Numbers of tokens along time, height and width.
Grid = tuple[int, int, int]


class Size(NamedTuple):
    """Widths, numbers of blocks and numbers of attention heads."""

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

# Of encoder or decoder: far above any that was ever trained (ViT-22B: 6,144 wide, 48 deep), far
# below what fills a machine.
MAX_WIDTH = 16_384
MAX_DEPTH = 256
MAX_CHANNELS = 12
# Of a clip: 128 frames of 256 × 256 pixels. It equals kernels.gumbel_topk.MAX_TOKENS, which is not
# imported because that module needs torch.
MAX_TOKENS = 2**14

# At every size, as in the authors' code.
SAMPLER_HEADS = 8

# How a decoder is trained.
DECODER_OPTIONS = ("decoder_attention", "decoder_share")


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
    """channels per frame: 3 for RGB, 1 for its grayscale, up to 12 as arrays (.npy) have"""
    differences: bool = False
    """feed frame differences instead of frames: for few videos whose classes differ by motion"""
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
    """what the decoder predicts: pixels, how much patches move, a frozen teacher's features; none:
    nothing, there is no decoder (with model.views)"""
    teacher: str = option("", free=True)
    """with target=teacher: a run or weights, a folder of transformers or timm, or hf://user/name"""
    teacher_image_size: int | None = option(None, at_least=1)
    """side in pixels that the teacher's frames are scaled to; null: as it was trained"""
    loss: Literal["mse", "l1", "smooth-l1", "cosine"] = "mse"
    """mean squared or absolute error, Table 1 (d); of features also smooth L1 or 1 - cosine"""
    normalize_target: bool = True
    """normalize target pixels per patch (norm_pix_loss), features per token"""
    sampling_loss_weight: float = option(1e-4, at_least=0)
    """weight of the sampling loss; the reconstruction loss has 1"""

    views: int = option(1, at_least=1)
    """views of a video whose features are drawn together, as many as data.repeats; 1: off"""
    views_loss: Literal[*VIEWS_LOSSES] = "infonce"  # type: ignore[valid-type]
    """what keeps the features of different videos apart"""
    views_weight: float = option(0.25, above=0)
    """weight of the loss of views; the reconstruction loss has 1"""

    decoder_attention: Literal[*DECODERS] = "self"  # type: ignore[valid-type]
    """cross (CrossMAE): masked tokens attend to visible ones only, faster; self: to all (paper)"""
    decoder_share: float = option(1.0, above=0, at_most=1)
    """fraction of masked tokens reconstructed in training, to save memory and time; 1: the paper"""

    # Sampler and decoder see all tokens: to recompute them saves a third of the memory for 22 %
    # more FLOPs (ViT-Base, batch 16).
    activation_checkpointing: bool = option(False, free=True)
    """recompute sampler and decoder in the backward pass to save memory; pretrain only"""

    def __post_init__(self) -> None:
        """Raise InputError with what does not fit; make `image_size` a number if it is square."""
        check_ranges(self, "model")
        # In this order: each check relies on those before it.
        self._check_image_size()
        self._check_widths()
        self._check_target()
        self._check_views()
        self._check_clip()
        self._check_masking()

    def _check_image_size(self) -> None:
        size = self.image_size
        sides = [size] if isinstance(size, int) else list(size)
        if len(sides) not in (1, 2) or min(sides) < 1:
            raise InputError(
                f"model.image_size is {size}: must be a whole number of at least 1, or two:"
                " [height, width]"
            )
        # There is one way to say that it is square, so that configurations can be compared.
        is_square = len(set(sides)) == 1
        self.image_size = sides[0] if is_square else sides

    def _check_widths(self) -> None:
        size = self.dimensions
        sampler_heads = SAMPLER_HEADS if self.sampler == "mha" else 1
        for part, width, heads in (
            ("encoder", size.encoder_width, size.encoder_heads),
            ("decoder", size.decoder_width, size.decoder_heads),
            ("sampler", self.sampler_dimension, sampler_heads),
        ):
            # Even, because positions are pairs of sine and cosine.
            if width % heads or width % 2:
                raise InputError(
                    f"the {part}'s width ({width}) is not an even multiple of its {heads} heads:"
                    f" change model.{part}_width"
                )
        if self.sampler == "mlp" and self.sampler_depth != 1:
            raise InputError(
                f"model.sampler_depth is {self.sampler_depth}, but an mlp sampler has only depth 1"
            )

    def _check_target(self) -> None:
        is_teacher = self.target == "teacher"
        if is_teacher and not self.teacher:
            raise InputError(
                "model.target=teacher needs model.teacher: set it to a run or weights, a folder of"
                " transformers or timm, or hf://user/name"
            )
        if self.teacher and not is_teacher:
            raise InputError(
                f"model.teacher does nothing with model.target={self.target}: set"
                " model.target=teacher"
            )
        if not is_teacher and self.loss not in ("mse", "l1"):
            raise InputError(
                f"model.loss={self.loss} is for features: choose mse or l1 with"
                f" model.target={self.target}"
            )

    def _check_views(self) -> None:
        if self.target != "none":
            return
        if self.views == 1:
            raise InputError(
                "model.target=none leaves nothing to learn from: set model.views to 2 or more, or"
                " another target"
            )
        if self.masking == "adaptive":
            raise InputError(
                "model.masking=adaptive learns from the errors of predictions, and"
                " model.target=none makes none: set model.masking=motion-share or random"
            )
        for name in DECODER_OPTIONS:
            default = getattr(ModelConfig, name)
            if getattr(self, name) != default:
                raise InputError(
                    f"model.{name} does nothing with model.target=none, which has no decoder: set"
                    f" it to {default}, its default"
                )

    def _check_clip(self) -> None:
        if self.num_tokens > MAX_TOKENS:
            raise InputError(
                f"model.num_frames and model.image_size make {self.num_tokens} tokens per clip: at"
                f" most {MAX_TOKENS}"
            )
        if self.num_frames % self.tubelet_size:
            raise InputError(
                f"model.num_frames ({self.num_frames}) is not a multiple of model.tubelet_size"
                f" ({self.tubelet_size})"
            )
        compares_frames = self.differences or self.target == "motion-energy"
        if compares_frames and self.num_frames < 2:
            key = "model.differences" if self.differences else "model.target=motion-energy"
            raise InputError(f"{key} needs two frames, and model.num_frames is 1: raise it")
        if any(side % self.patch_size for side in self.frame_size):
            raise InputError(
                f"model.image_size ({self.image_size}) is not a multiple of model.patch_size"
                f" ({self.patch_size})"
            )

    def _check_masking(self) -> None:
        if not 0 < self.num_visible < self.num_tokens:
            raise InputError(
                f"model.mask_ratio {self.mask_ratio} leaves {self.num_visible} of {self.num_tokens}"
                f" tokens visible under {self.masking} masking: at least one must stay visible and"
                " one masked"
            )
        if self.num_reconstructed == 0:
            num_masked = self.num_tokens - self.num_visible
            raise InputError(
                f"model.decoder_share {self.decoder_share} leaves none of {num_masked} masked"
                " tokens to predict: raise it"
            )

    @property
    def dimensions(self) -> Size:
        """The size's dimensions, with those that are set here in their place."""
        overrides = {}
        for name in Size._fields:
            value = getattr(self, name)
            if value is not None:
                overrides[name] = value
        return SIZES[self.size]._replace(**overrides)

    @property
    def sampler_dimension(self) -> int:
        """The token sampler's width."""
        if self.sampler_width is None:
            return self.dimensions.encoder_width
        return self.sampler_width

    @property
    def frame_size(self) -> tuple[int, int]:
        """Height and width of a clip in pixels."""
        if isinstance(self.image_size, int):
            return self.image_size, self.image_size
        height, width = self.image_size
        return height, width

    @property
    def grid(self) -> Grid:
        """Numbers of tokens along time, height and width: 8, 14 and 14 for the paper's ViT-Base."""
        height, width = self.frame_size
        return (
            self.num_frames // self.tubelet_size,
            height // self.patch_size,
            width // self.patch_size,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of a clip, N: 1,568 for the paper's ViT-Base."""
        return prod(self.grid)

    @property
    def patch_values(self) -> int:
        """Values of a patch, P: 1,536 for the paper's ViT-Base."""
        return self.tubelet_size * self.patch_size**2 * self.in_channels

    @property
    def num_reconstructed(self) -> int:
        """Masked tokens of a clip that are reconstructed in training."""
        num_masked = self.num_tokens - self.num_visible
        # Exact, as in num_visible.
        return int(num_masked * Fraction(str(self.decoder_share)))

    @property
    def unit_tokens(self) -> int:
        """Tokens that the strategy masks as a whole: those of a tube or a token frame, or one."""
        time, height, width = self.grid
        if self.masking == "tube":
            return time
        if self.masking == "frame":
            return height * width
        return 1

    @property
    def num_visible(self) -> int:
        """Visible tokens of a clip, K: N·(1-ρ), rounded down to whole tubes or token frames.

        78 of 1,568 tokens at ρ = 0.95. It is computed in fractions: in floats, 60·(1-0.9) is
        5.999999999999998, which would leave 5 tokens visible instead of 6.
        """
        num_units = self.num_tokens // self.unit_tokens
        visible_ratio = 1 - Fraction(str(self.mask_ratio))
        return self.unit_tokens * int(num_units * visible_ratio)
