"""Converts weights from and to other layouts: the authors' AdaMAE, VideoMAE, and Hugging Face's VideoMAE.

Each `from_x` takes a state dict in that layout, of a pre-training model or of a fine-tuned classifier, and gives ours
(of `model.adamae.AdaMAE` or `model.classifier.VideoClassifier`); `to_x` is its inverse. Layouts differ in names, in
the tokenizer (a Conv3d kernel `[D, C, t, h, w]` there, a matrix `[D, t·h·w·C]` here), in leading dimensions of 1 and,
at Hugging Face, in separate matrices for queries, keys and values. Nothing is rounded: round trips are exact.
"""

import math
import re
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import InputError
from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.config import MAX_CHANNELS, SIZES, ModelConfig
from model.weights.loading import check_keys, shapes

StateDict = dict[str, Tensor]


class Layout(NamedTuple):
    """Maps their names to ours: by the start of a name, and inside a block."""

    pretraining: dict[str, str]
    classifier: dict[str, str]
    in_block: dict[str, str]


_VIDEOMAE = Layout(
    pretraining={
        "encoder.patch_embed.proj.": "tokenizer.projection.",
        "encoder.blocks.": "encoder.blocks.",
        "encoder.norm.": "encoder.norm.",
        "encoder_to_decoder.": "decoder.embed.",
        "mask_token": "decoder.mask_token",
        "decoder.blocks.": "decoder.blocks.",
        "decoder.norm.": "decoder.norm.",
        "decoder.head.": "decoder.head.",
    },
    classifier={
        "patch_embed.proj.": "tokenizer.projection.",
        "blocks.": "encoder.blocks.",
        "fc_norm.": "norm.",
        "head.": "head.",
    },
    in_block={},
)
_HUGGINGFACE = Layout(
    pretraining={
        "videomae.embeddings.patch_embeddings.projection.": "tokenizer.projection.",
        "videomae.encoder.layer.": "encoder.blocks.",
        "videomae.layernorm.": "encoder.norm.",
        "encoder_to_decoder.": "decoder.embed.",
        "mask_token": "decoder.mask_token",
        "decoder.decoder_layers.": "decoder.blocks.",
        "decoder.norm.": "decoder.norm.",
        "decoder.head.": "decoder.head.",
    },
    classifier={
        "videomae.embeddings.patch_embeddings.projection.": "tokenizer.projection.",
        "videomae.encoder.layer.": "encoder.blocks.",
        "fc_norm.": "norm.",
        "classifier.": "head.",
    },
    in_block={
        "attention.attention.": "attn.",
        "attention.output.dense.": "attn.proj.",
        "intermediate.dense.": "mlp.fc1.",
        "output.dense.": "mlp.fc2.",
        "layernorm_before.": "norm1.",
        "layernorm_after.": "norm2.",
    },
)
_QKV = ("query", "key", "value")
_TOKENIZER = "tokenizer.projection.weight"


def from_videomae(state_dict: StateDict) -> StateDict:
    """Convert from VideoMAE's original checkpoints; raises InputError on keys or shapes that do not fit."""
    return _check(_translate(state_dict, _VIDEOMAE), has_sampler=False)


def to_videomae(state_dict: StateDict, tubelet_size: int = 2, in_channels: int = 3) -> StateDict:
    """Convert to VideoMAE's layout, without an adaptive token sampler."""
    kept = {name: value for name, value in state_dict.items() if not name.startswith("token_sampler.")}
    return _translate_back(kept, _VIDEOMAE, tubelet_size, in_channels)


def from_adamae(state_dict: StateDict) -> StateDict:
    """Convert from the authors' original checkpoints; raises InputError on keys or shapes that do not fit."""
    found = (re.match(r"encoder\.get_token_probs\.(\d{1,3})\.", name) for name in state_dict)
    stages = [int(match[1]) for match in found if match]  # of others `_checked` says that they are not expected
    state = _translate(state_dict, _with_sampler(max(stages, default=1)))
    return _check(state, has_sampler=_is_pretraining(state))


def to_adamae(state_dict: StateDict, tubelet_size: int = 2, in_channels: int = 3) -> StateDict:
    """Convert to the authors' layout; raises InputError where it has no place for the token sampler."""
    if any(name.startswith("token_sampler.projection.") for name in state_dict):
        raise InputError("the authors' layout has no place for a token sampler with a width of its own")
    stages = {name.split(".")[2] for name in state_dict if name.startswith("token_sampler.body.")}
    if _is_pretraining(state_dict) and not stages:
        raise InputError("these weights have no token sampler, which the authors' layout asks for: use VideoMAE's")
    return _translate_back(state_dict, _with_sampler(len(stages)), tubelet_size, in_channels)


def from_huggingface(state_dict: StateDict) -> StateDict:
    """Convert from Hugging Face's VideoMAE, saved or in memory; raises InputError on keys or shapes that do not fit."""
    state = {}
    for name, value in state_dict.items():
        # In memory, since transformers 5, q_bias and v_bias are called like the biases of the Linear layers they are.
        name = name.replace("attention.query.bias", "attention.q_bias")
        state[name.replace("attention.value.bias", "attention.v_bias")] = value
    for name in [name for name in state if name.endswith("attention.attention.query.weight")]:
        parts = [name.replace("query", part) for part in _QKV]
        if all(part in state and state[part].shape == state[name].shape for part in parts):
            state[name.replace("query", "qkv")] = torch.cat([state.pop(part) for part in parts])
    return _check(_translate(state, _HUGGINGFACE), has_sampler=False)


def to_huggingface(state_dict: StateDict, tubelet_size: int = 2, in_channels: int = 3) -> StateDict:
    """Convert to the layout of Hugging Face's saved VideoMAE models, without an adaptive token sampler."""
    kept = {name: value for name, value in state_dict.items() if not name.startswith("token_sampler.")}
    state = _translate_back(kept, _HUGGINGFACE, tubelet_size, in_channels)
    for name in [name for name in state if name.endswith("attention.qkv.weight")]:
        for part, weight in zip(_QKV, state.pop(name).chunk(3), strict=True):
            state[name.replace("qkv", part)] = weight.clone()
    return state


def infer_config(state_dict: StateDict, num_frames: int = 16, like: ModelConfig | None = None) -> ModelConfig:
    """Infer the configuration from weights in our layout; the clip shape is not in them and must be known.

    They are those of `like` if that makes as many tokens of them, else `num_frames` square frames. Nor are the numbers
    of heads in it: they are those of the size with these widths, else one for 64 channels.
    """
    config = ModelConfig(**_architecture(state_dict), num_frames=num_frames)
    learned = state_dict.get("token_sampler.positions")
    if like is not None and _have_custom_width(config, like):
        config = replace(config, encoder_heads=like.dimensions.encoder_heads)
    same_patches = like is not None and like.patch_values == config.patch_values
    if like is not None and same_patches and (learned is None or len(learned) == like.num_tokens):
        patches = ("tubelet_size", "patch_size", "in_channels")
        names = ("num_frames", "image_size", *patches, "positions", "masking", "mask_ratio")
        return replace(config, **{name: getattr(like, name) for name in names})
    if learned is None:
        return config
    num_tokens = len(learned)
    side = math.isqrt(num_tokens // config.grid[0])
    if config.grid[0] * side**2 != num_tokens:
        raise InputError(
            f"these weights are for {num_tokens} tokens, which are not {config.grid[0]} square token frames:"
            f" give the number of frames they were trained with (now {num_frames}); `python export.py import` writes it"
            " into a file of ours"
        )
    return replace(config, image_size=side * config.patch_size)


def _have_custom_width(config: ModelConfig, like: ModelConfig) -> bool:
    """Return whether both have the same width, which no size has: `like` then gives the number of heads."""
    width = config.dimensions.encoder_width
    return width == like.dimensions.encoder_width and all(width != size.encoder_width for size in SIZES.values())


def check_size(state_dict: StateDict, config: ModelConfig, where: Path) -> None:
    """Raise InputError where `config` does not describe the tensors' model."""
    read, size = _architecture(state_dict), config.dimensions
    wanted: dict[str, Any] = {"encoder_width": size.encoder_width, "encoder_depth": size.encoder_depth}
    if _is_pretraining(state_dict):
        wanted |= {"decoder_width": size.decoder_width, "decoder_depth": size.decoder_depth}
        if config.masking == "adaptive":
            wanted |= {"sampler_depth": config.sampler_depth, "sampler_width": config.sampler_dimension}
    for name, said in wanted.items():
        if said != read[name]:
            raise InputError(f"{where} does not fit its own description: {name} is {read[name]}, and {said} is said")
    values = state_dict[_TOKENIZER].shape[-1] if _TOKENIZER in state_dict else config.patch_values
    if config.patch_values != values:
        raise InputError(
            f"{where} does not fit its own description: it is for patches of {values} values,"
            f" and {config.patch_values} are said"
        )


def _architecture(state_dict: StateDict) -> dict[str, Any]:
    """Read ModelConfig's values off names and shapes; defaults where a tensor is missing."""

    def rows(name: str, default: int) -> int:
        return state_dict[name].shape[0] if name in state_dict else default

    def count(prefix: str) -> int:
        return len({name[len(prefix) :].split(".")[0] for name in state_dict if name.startswith(prefix)})

    width = rows("encoder.blocks.0.norm1.weight", 768)
    decoder_width = rows("decoder.blocks.0.norm1.weight", 384)
    encoder_heads = {size.encoder_width: size.encoder_heads for size in SIZES.values()}
    decoder_heads = {size.decoder_width: size.decoder_heads for size in SIZES.values()}
    adaptive = any(name.startswith("token_sampler.") for name in state_dict)
    num_values = state_dict[_TOKENIZER].shape[-1] if _TOKENIZER in state_dict else 1536
    tubelet_size, patch_size, in_channels = _patch(num_values)
    return {
        "encoder_width": width,
        "encoder_depth": max(1, count("encoder.blocks.")),
        "encoder_heads": encoder_heads.get(width, max(1, width // 64)),
        "decoder_width": decoder_width,
        "decoder_depth": max(1, count("decoder.blocks.")),
        "decoder_heads": decoder_heads.get(decoder_width, max(1, decoder_width // 64)),
        "tubelet_size": tubelet_size,
        "patch_size": patch_size,
        "in_channels": in_channels,
        "image_size": 14 * patch_size,
        "masking": "adaptive" if adaptive else "tube",
        "mask_ratio": 0.95 if adaptive else 0.9,
        "sampler": "mlp" if "token_sampler.body.0.weight" in state_dict else "mha",
        "sampler_depth": max(1, count("token_sampler.body.")),
        "sampler_width": rows("token_sampler.projection.weight", width),
    }


TUBELETS = (2, 4, 1, 3, 8)


def _patch(num_values: int) -> tuple[int, int, int]:
    """Find tubelet size, patch size and channels of `num_values`; RGB, grayscale and the usual tubelets first."""
    others = (2, *range(4, MAX_CHANNELS + 1))
    for channels, tubelet_size in chain(product((3, 1), TUBELETS), product(others, TUBELETS)):
        side = math.isqrt(num_values // (channels * tubelet_size))
        if side and channels * tubelet_size * side**2 == num_values:
            return tubelet_size, side, channels
    raise InputError(
        f"these weights are for patches of {num_values} values: those are not square patches of up to"
        f" {MAX_CHANNELS} channels"
    )


def _with_sampler(logit_stage: int) -> Layout:
    """Make the authors' layout, whose sampler is a list of stages of which the last gives the logits."""
    sampler = {f"encoder.get_token_probs.{i}.": f"token_sampler.body.{i}." for i in range(logit_stage)}
    sampler[f"encoder.get_token_probs.{logit_stage}."] = "token_sampler.logit."
    sampler["encoder.pos_embed_probs"] = "token_sampler.positions"
    return _VIDEOMAE._replace(pretraining=_VIDEOMAE.pretraining | sampler)


def _translate(state_dict: StateDict, layout: Layout) -> StateDict:
    """Convert their names and shapes to ours; a name that is not theirs stays, for `_check` to report."""
    names = layout.pretraining if _is_pretraining(state_dict) else layout.classifier
    state = {}
    for theirs, value in state_dict.items():
        ours = _rename(theirs, names, layout.in_block)
        if ours == _TOKENIZER and value.dim() == 5:
            value = value.permute(0, 2, 3, 4, 1).flatten(1)
        elif ours in ("token_sampler.positions", "decoder.mask_token"):
            value = _squeeze_leading(value, 1 if ours.endswith("positions") else 2)
        state[ours] = value.contiguous()
    return state


def _squeeze_leading(value: Tensor, count: int) -> Tensor:
    """Remove `count` leading dimensions of 1; a tensor that has others stays, for `_check` to report."""
    return value.reshape(value.shape[count:]) if value.shape[:count] == (1,) * count else value


def _translate_back(state_dict: StateDict, layout: Layout, tubelet_size: int, in_channels: int) -> StateDict:
    names = layout.pretraining if _is_pretraining(state_dict) else layout.classifier
    names = {ours: theirs for theirs, ours in names.items()}
    in_block = {ours: theirs for theirs, ours in layout.in_block.items()}
    state = {}
    for ours, value in state_dict.items():
        if ours == _TOKENIZER:
            side = math.isqrt(value.shape[1] // (in_channels * tubelet_size))
            if value.shape[1] != in_channels * tubelet_size * side**2:
                raise InputError(f"patches of {value.shape[1]} values are not {tubelet_size} square frames deep")
            value = value.unflatten(1, (tubelet_size, side, side, in_channels)).permute(0, 4, 1, 2, 3)
        elif ours == "token_sampler.positions":
            value = value[None]
        elif ours == "decoder.mask_token":
            value = value[None, None]
        state[_rename(ours, names, in_block)] = value.contiguous()
    return state


def _rename(name: str, names: dict[str, str], in_block: dict[str, str]) -> str:
    """Replace the start of `name`, and after `blocks.<i>.` the start of what follows; the longest match counts."""
    start = max((start for start in names if name.startswith(start)), key=len, default="")
    renamed = names.get(start, "") + name[len(start) :]
    match = re.fullmatch(r"(.*?(?:blocks|layer|layers)\.\d+\.)(.+)", renamed)
    if not match:
        return renamed
    block, inside = match.groups()
    start = max((start for start in in_block if inside.startswith(start)), key=len, default="")
    return block + in_block.get(start, "") + inside[len(start) :]


def _is_pretraining(state_dict: StateDict) -> bool:
    return any("decoder." in name or name.endswith("mask_token") for name in state_dict)


def _check(state_dict: StateDict, has_sampler: bool) -> StateDict:
    """Return `state_dict` if it is a complete model of ours; else raise InputError with all that is wrong with it."""
    config = ModelConfig(**_architecture(state_dict))
    model: nn.Module
    with torch.device("meta"):
        if _is_pretraining(state_dict):
            model = AdaMAE(replace(config, masking="adaptive" if has_sampler else "random"))
        else:
            head = state_dict.get("head.weight")
            model = VideoClassifier(config, num_classes=1 if head is None else head.shape[0])
    wanted = shapes(model.state_dict())
    if "token_sampler.positions" in wanted and "token_sampler.positions" in state_dict:
        # How many tokens there are is for the clip to say.
        wanted["token_sampler.positions"] = (len(state_dict["token_sampler.positions"]), config.dimensions[0])
    check_keys(wanted, shapes(state_dict))
    return state_dict
