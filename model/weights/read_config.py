"""Learns a model's configuration from its run, its file's metadata, or the shapes of weights."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from adamae.common.errors import InputError
from adamae.common.yaml_io import read_yaml
from adamae.model.config import SIZES, ModelConfig
from adamae.model.state_dict import LEARNED_POSITIONS, TOKENIZER, StateDict
from adamae.model.weights.external_layouts import to_own_layout
from adamae.model.weights.find_weights import find_file, run_of
from adamae.model.weights.tensor_files import read_json, read_metadata, read_shapes

# The tubelet sizes that a patch's number of values is tried with, the usual ones first.
TUBELETS = (2, 4, 1, 3, 8)
# What the shapes of weights do not tell about a model with a decoder, and about its clips.
ASSUMED = ("masking", "mask_ratio", "num_frames", "image_size", "positions")
# What a model is for, as far as weights of the same shapes may differ in it.
CLIP_OPTIONS = (
    "num_frames",
    "image_size",
    "tubelet_size",
    "patch_size",
    "in_channels",
    "differences",
    "positions",
    "masking",
    "mask_ratio",
)
# From ModelConfig's names to those in the config.json of a VideoMAE.
HUGGINGFACE_KEYS = {
    "encoder_width": "hidden_size",
    "encoder_depth": "num_hidden_layers",
    "encoder_heads": "num_attention_heads",
    "decoder_width": "decoder_hidden_size",
    "decoder_depth": "decoder_num_hidden_layers",
    "decoder_heads": "decoder_num_attention_heads",
    "normalize_target": "norm_pix_loss",
    "in_channels": "num_channels",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "num_frames": "num_frames",
    "tubelet_size": "tubelet_size",
}


class Description(NamedTuple):
    """A model's configuration, and how much of it is an assumption."""

    config: ModelConfig
    # The fields of config that nothing describes.
    assumed: tuple[str, ...] = ()


def read_config(
    path: str | Path, num_frames: int = 16, like: ModelConfig | None = None
) -> ModelConfig:
    """Read the configuration that pretrained.load would return, without reading weights.

    Where nothing describes the model, names and shapes of its tensors are read, not their numbers.
    Raise InputError if there is no such model.
    """
    file = find_file(path)
    metadata = read_metadata(file) if file.suffix == ".safetensors" else {}
    description = read_description(file, metadata)
    if description is not None:
        return description.config
    return infer_config(to_own_layout(read_shapes(file), file), num_frames, like)


def read_description(file: Path, metadata: Mapping[str, str]) -> Description | None:
    """Read what describes the model of a file of weights, or return None if nothing does.

    This is its metadata, its run's config.yaml, or the config.json of a VideoMAE beside it.
    """
    if "model_config" in metadata:
        values = read_json(metadata["model_config"], file, dict[str, Any])
        return Description(_parse_config(values, file))
    run = run_of(file)
    if run is not None:
        return Description(config_of_run(run))
    config = _read_huggingface(file.parent / "config.json")
    if config is not None:
        return Description(config, ("masking", "mask_ratio"))
    return None


def run_config(run: Path) -> dict[str, Any]:
    """Read a run directory's config.yaml. Raise InputError if it cannot be read."""
    file = run / "config.yaml"
    if not file.is_file():
        raise InputError(f"{run} is not a run directory: it has no config.yaml")
    values = read_yaml(file)
    is_config = isinstance(values, dict) and isinstance(values.get("model"), dict)
    if not is_config or not isinstance(values.get("data", {}), dict):
        raise InputError(f"{file} is damaged (it is not the configuration of a run): put it back")
    return values


def config_of_run(run: Path) -> ModelConfig:
    """Read the configuration of a run's model. Raise InputError if it cannot be read."""
    return _parse_config(run_config(run)["model"], run / "config.yaml")


def trained_rate(path: Path) -> dict[str, Any]:
    """Read data.frame_stride or data.fps, by name, of a run or an export of one.

    Weights of other projects have a frame_stride of 4. Raise InputError if it cannot be read.
    """
    file = find_file(path)
    run = run_of(file)
    if run is not None:
        return rate_of_run(run)
    metadata = read_metadata(file) if file.suffix == ".safetensors" else {}
    rate = read_json(metadata.get("rate", '{"frame_stride": 4}'), file, dict[str, int | float])
    return _choose_rate(rate, file)


def rate_of_run(run: Path) -> dict[str, Any]:
    """Read data.frame_stride or data.fps, by name, of a run's config.yaml."""
    return _choose_rate(run_config(run).get("data", {}), run / "config.yaml")


def _choose_rate(data: dict[str, Any], source: Path) -> dict[str, Any]:
    for name in ("frame_stride", "fps"):
        if isinstance(data.get(name), int | float) and data[name] > 0:
            return {name: data[name]}
    raise InputError(f"{source} is damaged (no data.frame_stride above 0): put it back")


def _read_huggingface(file: Path) -> ModelConfig | None:
    """Read a config.json of transformers; return None if there is none, or it is no VideoMAE's.

    Raise InputError if a key is missing.
    """
    if not file.is_file():
        return None
    described = {"num_channels": 3} | read_json(file, file, dict[str, Any])
    if described.get("model_type") != "videomae":
        return None
    missing = [name for name in HUGGINGFACE_KEYS.values() if name not in described]
    if missing:
        raise InputError(f"{file} does not say {', '.join(missing)}")
    values = {name: described[key] for name, key in HUGGINGFACE_KEYS.items()}
    return _parse_config({**values, "masking": "tube", "mask_ratio": 0.9}, file)


def _parse_config(values: dict[str, Any], where: Path) -> ModelConfig:
    """Make a configuration of values by name, checked key by key as from the command line.

    Raise InputError if one does not fit.
    """
    try:
        unknown = values.keys() - {field.name for field in fields(ModelConfig)}
        if unknown:
            raise TypeError(f"there is no {', '.join(sorted(map(str, unknown)))}")
        return msgspec.convert(values, ModelConfig)
    except (msgspec.ValidationError, TypeError) as error:
        raise InputError(f"{where} does not describe a model of this version ({error})") from error


def infer_config(
    state_dict: StateDict, num_frames: int = 16, like: ModelConfig | None = None
) -> ModelConfig:
    """Infer a configuration from names and shapes, with defaults where a tensor is missing.

    Numbers of heads are not in the weights: they are those of the size with these widths, else of
    `like` with these widths, else one for 64 channels. Nor is the clip shape: it is that of `like`
    if that makes as many tokens of it, else `num_frames` square frames. Raise InputError if patches
    or token frames are not square.
    """
    encoder = _infer_blocks(state_dict, "encoder", 768, like)
    decoder = _infer_blocks(state_dict, "decoder", 384, like)
    is_adaptive = any(name.startswith("token_sampler.") for name in state_dict)
    # 1,536 values are a tubelet of 2 frames, 16 × 16 pixels and 3 channels.
    num_values = state_dict[TOKENIZER].shape[-1] if TOKENIZER in state_dict else 1536
    tubelet_size, patch_size, in_channels = _factor_patch(num_values)
    sampler_width = _count_rows(
        state_dict, "token_sampler.projection.weight", encoder["encoder_width"]
    )
    num_tokens = _count_rows(state_dict, LEARNED_POSITIONS, 0)
    config = ModelConfig(
        **encoder,
        **decoder,
        tubelet_size=tubelet_size,
        patch_size=patch_size,
        in_channels=in_channels,
        num_frames=num_frames,
        image_size=14 * patch_size,
        # Adaptive masking and its ratio are the authors', the others VideoMAE's.
        masking="adaptive" if is_adaptive else "tube",
        mask_ratio=0.95 if is_adaptive else 0.9,
        sampler="mlp" if "token_sampler.body.0.weight" in state_dict else "mha",
        sampler_depth=_count_children(state_dict, "token_sampler.body."),
        sampler_width=sampler_width,
    )
    # Without a sampler's positions (0), nothing tells how many tokens a clip has.
    if like is not None and like.patch_values == num_values and num_tokens in (0, like.num_tokens):
        return replace(config, **{name: getattr(like, name) for name in CLIP_OPTIONS})
    if num_tokens == 0:
        return config
    return replace(config, image_size=_infer_image_size(config, num_tokens))


def _infer_image_size(config: ModelConfig, num_tokens: int) -> int:
    """Return the side of square frames of which `num_frames` have so many tokens: 224 for 1,568.

    Raise InputError if there is none.
    """
    token_frames = config.grid[0]
    side = math.isqrt(num_tokens // token_frames)
    if token_frames * side**2 != num_tokens:
        raise InputError(
            f"these weights are for {num_tokens} tokens, which are not {token_frames} square token"
            " frames: give the number of frames they were trained with (now"
            f" {config.num_frames}); `python export.py import` writes it into its output"
        )
    return side * config.patch_size


def _infer_blocks(
    state_dict: StateDict, part: str, default_width: int, like: ModelConfig | None
) -> dict[str, Any]:
    """Infer width, depth and heads of the encoder or the decoder, as keys of ModelConfig."""
    width = _count_rows(state_dict, f"{part}.blocks.0.norm1.weight", default_width)
    heads = max(1, width // 64)
    # A later match overrides an earlier one: the preset sizes go before `like`.
    if like is not None and getattr(like.dimensions, f"{part}_width") == width:
        heads = getattr(like.dimensions, f"{part}_heads")
    for size in SIZES.values():
        if getattr(size, f"{part}_width") == width:
            heads = getattr(size, f"{part}_heads")
    depth = _count_children(state_dict, f"{part}.blocks.")
    return {f"{part}_width": width, f"{part}_depth": depth, f"{part}_heads": heads}


def _count_rows(state_dict: StateDict, name: str, default: int) -> int:
    """Return the first dimension of a tensor, or `default` if there is none of this name."""
    return state_dict[name].shape[0] if name in state_dict else default


def _count_children(state_dict: StateDict, prefix: str) -> int:
    """Count the modules of a list, such as `encoder.blocks.`; return 1 if there is none."""
    numbers = {
        name.removeprefix(prefix).split(".")[0] for name in state_dict if name.startswith(prefix)
    }
    return max(1, len(numbers))


def _factor_patch(num_values: int) -> tuple[int, int, int]:
    """Find tubelet size, patch size and channels of a patch of `num_values`.

    RGB and the usual tubelets are tried first, then grayscale: 1,536 values are a tubelet of 2
    frames, 16 × 16 pixels and 3 channels. Raise InputError if they are no square patch.
    """
    for channels, tubelet_size in product((3, 1), TUBELETS):
        side = math.isqrt(num_values // (channels * tubelet_size))
        if side > 0 and channels * tubelet_size * side**2 == num_values:
            return tubelet_size, side, channels
    raise InputError(
        f"these weights are for patches of {num_values} values: those are no square patches, RGB or"
        " gray"
    )
