"""Converts weights from and to the layouts of the authors' AdaMAE, VideoMAE and Hugging Face.

MMAction2's and what Lightning writes are read, too.

Layouts differ in names, in the tokenizer (a Conv3d kernel [D, C, t, h, w] there, a matrix [D,
t·h·w·C] here), in leading dimensions of 1 and, at Hugging Face, in separate matrices for queries,
keys and values. Nothing is rounded: round trips are exact. One weight in the four layouts:

    here                           encoder.blocks.3.attn.qkv.weight          [3 D, D]
    VideoMAE, pre-trained          encoder.blocks.3.attn.qkv.weight          [3 D, D]
    the authors' AdaMAE            encoder.blocks.3.attn.qkv.weight          [3 D, D]
    VideoMAE, fine-tuned           blocks.3.attn.qkv.weight                  [3 D, D]
    Hugging Face         videomae.encoder.layer.3.attention.attention.query.weight
                         (and .key.weight, .value.weight)                    [D, D]
"""

import math
import re
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from adamae.common.errors import InputError
from adamae.common.logging import log_note
from adamae.model.config import ModelConfig
from adamae.model.state_dict import ENCODER_PARTS, LEARNED_POSITIONS, TOKENIZER, StateDict, select
from adamae.model.tokenizer import position_table

# From names in an external layout, or parts of them, to those here.
Names = dict[str, str]
# How many leading dimensions of 1 a weight has in the external layouts.
NUM_LEADING_ONES = {LEARNED_POSITIONS: 1, "decoder.mask_token": 2}
# Hugging Face's VideoMAEModel, which has no head, names its tokenizer without a prefix.
TOKENIZER_OF_MODEL = "embeddings.patch_embeddings.projection.weight"
# MMAction2's VisionTransformer
TOKENIZER_OF_MMACTION = "patch_embed.projection.weight"
# The names of a tokenizer's weights in all layouts; none is the end of one before it.
TOKENIZERS = (
    TOKENIZER,
    f"videomae.{TOKENIZER_OF_MODEL}",
    TOKENIZER_OF_MODEL,
    "encoder.patch_embed.proj.weight",
    "patch_embed.proj.weight",
    TOKENIZER_OF_MMACTION,
)
# Starts of the names of a classifier that are beside those of its backbone in MMAction2.
MMACTION_HEAD = "cls_head.fc_cls."


class Layout(NamedTuple):
    """Where names differ: how those of a whole model start, and parts of names in a block."""

    pretraining: Names
    classifier: Names
    in_block: Names

    def starts(self, state_dict: StateDict) -> Names:
        """Return the starts of names for the kind of model that the weights are of."""
        return self.pretraining if is_pretraining(state_dict) else self.classifier


_DECODER = {"encoder_to_decoder.": "decoder.embed.", "mask_token": "decoder.mask_token"}
_HF_ENCODER = {
    "videomae.embeddings.patch_embeddings.projection.": "tokenizer.projection.",
    "videomae.encoder.layer.": "encoder.blocks.",
    "videomae.layernorm.": "encoder.norm.",
}
VIDEOMAE = Layout(
    {"encoder.patch_embed.proj.": "tokenizer.projection.", **_DECODER},
    {
        "patch_embed.proj.": "tokenizer.projection.",
        "blocks.": "encoder.blocks.",
        "norm.": "encoder.norm.",
        "fc_norm.": "norm.",
    },
    {},
)
MMACTION = Layout(
    {},
    {
        "patch_embed.projection.": "tokenizer.projection.",
        "blocks.": "encoder.blocks.",
        "norm.": "encoder.norm.",
        "fc_norm.": "norm.",
        MMACTION_HEAD: "head.",
    },
    {"mlp.layers.0.0.": "mlp.fc1.", "mlp.layers.1.": "mlp.fc2."},
)
HUGGINGFACE = Layout(
    {**_HF_ENCODER, "decoder.decoder_layers.": "decoder.blocks.", **_DECODER},
    {**_HF_ENCODER, "fc_norm.": "norm.", "classifier.": "head."},
    {
        # In this order: the fourth is a part of the first.
        "attention.output.dense.": "attn.proj.",
        "attention.attention.": "attn.",
        "intermediate.dense.": "mlp.fc1.",
        "output.dense.": "mlp.fc2.",
        "layernorm_before.": "norm1.",
        "layernorm_after.": "norm2.",
    },
)


LAYOUTS = {"videomae": VIDEOMAE, "huggingface": HUGGINGFACE}


def adamae_layout(logit_stage: int) -> Layout:
    """Make the authors' layout: VideoMAE's with a token sampler, which is a list of stages.

    logit_stage: the number of the last stage, the linear layer that gives the logits.
    """
    sampler = {
        "encoder.pos_embed_probs": LEARNED_POSITIONS,
        "encoder.get_token_probs.": "token_sampler.body.",
        f"encoder.get_token_probs.{logit_stage}.": "token_sampler.logit.",
    }
    return VIDEOMAE._replace(pretraining=VIDEOMAE.pretraining | sampler)


def is_pretraining(state_dict: StateDict) -> bool:
    """Return whether the weights include a decoder, in any layout."""
    return any("decoder." in name or name.endswith("mask_token") for name in state_dict)


def from_external(state_dict: StateDict) -> StateDict:
    """Convert a pre-training model or a classifier from an external layout to that of this project.

    Names that no layout has stay as they are, to be reported.
    """
    if TOKENIZER_OF_MODEL in state_dict:
        state_dict = {f"videomae.{name}": value for name, value in state_dict.items()}
    layout = _detect_layout(state_dict)
    starts = layout.starts(state_dict)
    state = {}
    for external, value in state_dict.items():
        name = _rename(external, starts, layout.in_block)
        if name == "pos_embed" and _is_position_table(value):
            continue
        # Some versions of transformers have it; softmax cancels what all keys share.
        if name.endswith("attn.key.bias"):
            continue
        # In memory, since transformers 5, q_bias and v_bias are called like the biases of the
        # Linear layers they are.
        name = name.replace("attn.query.bias", "attn.q_bias")
        name = name.replace("attn.value.bias", "attn.v_bias")
        state[name] = _to_own_shape(name, value)
    _join_attention(state)
    return state


def _detect_layout(state_dict: StateDict) -> Layout:
    """Tell layouts by the names of their tokenizers; the authors' includes VideoMAE's."""
    if any(name.startswith("videomae.") for name in state_dict):
        return HUGGINGFACE
    if TOKENIZER_OF_MMACTION in state_dict:
        return MMACTION
    stages = re.findall(r"\bencoder\.get_token_probs\.(\d{1,3})\.", " ".join(state_dict))
    return adamae_layout(max(map(int, stages), default=1))


def _is_position_table(value: Tensor) -> bool:
    """Return whether values [1, N, D] are the fixed positions, which MMAction2 writes along."""
    if value.dim() != 3 or len(value) != 1:
        return False
    table = position_table("flat-1d", (value.shape[1], 1, 1), value.shape[2])
    # On the meta device, only shapes are read. Other files may be in half precision.
    return value.is_meta or torch.allclose(value[0].float(), table, atol=1e-2)


def _to_own_shape(name: str, value: Tensor) -> Tensor:
    """Make a matrix of the tokenizer's kernel, and remove leading dimensions of 1."""
    if name == TOKENIZER and value.dim() == 5:
        value = rearrange(value, "d c t h w -> d (t h w c)")
    for _ in range(NUM_LEADING_ONES.get(name, 0)):
        value = value.squeeze(0)
    return value.contiguous()


def _join_attention(state: StateDict) -> None:
    """Replace the matrices of queries, keys and values by one, in place, where they fit."""
    query_names = [name for name in state if name.endswith("attn.query.weight")]
    for query in query_names:
        parts = [query, query.replace("query", "key"), query.replace("query", "value")]
        # Otherwise they stay as they are, to be reported.
        if all(part in state and state[part].shape == state[query].shape for part in parts):
            matrices = [state.pop(part) for part in parts]
            state[query.replace("query", "qkv")] = torch.cat(matrices)


def to_own_layout(state_dict: StateDict, file: Path) -> StateDict:
    """Convert the weights in `file` to the layout of this project, unless they are in it already.

    A decoder whose encoder has no last norm is left out, with a note: it cannot follow an encoder
    here. Raise InputError if the file holds several models.
    """
    state_dict = remove_prefix(state_dict, file)
    if not any(name.startswith("tokenizer.") for name in state_dict):
        state_dict = from_external(state_dict)
    if is_pretraining(state_dict) and "encoder.norm.weight" not in state_dict:
        log_note(
            f"{file} has an encoder without a last norm (use_mean_pooling): its decoder is left out"
        )
        return select(state_dict, ENCODER_PARTS)
    return state_dict


def remove_prefix(state_dict: StateDict, file: Path) -> StateDict:
    """Remove what stands before all names of a model that is a part of another module.

    `model.encoder.norm.weight`, as Lightning writes it, becomes `encoder.norm.weight`, and so does
    MMAction2's `backbone.`. Other parts of that module are left out, with a note. Raise InputError
    if several of them are models.
    """
    prefixes = {_find_prefix(name) for name in state_dict} - {None}
    # A teacher may be a part of the model itself.
    if not prefixes or "" in prefixes:
        return state_dict
    if len(prefixes) > 1:
        names = ", ".join(sorted(map(str, prefixes)))
        raise InputError(f"{file} holds several models, {names}: save one of them by itself")
    (prefix,) = prefixes
    state = {}
    left_out = set()
    for name, value in state_dict.items():
        if name.startswith(str(prefix)):
            state[name.removeprefix(str(prefix))] = value
        elif name.startswith(MMACTION_HEAD):
            state[name] = value
        else:
            left_out.add(name.partition(".")[0])
    if left_out:
        parts = ", ".join(sorted(left_out))
        log_note(f"of {file}, only what is called {prefix}… is read: {parts} is left out")
    return state


def _find_prefix(name: str) -> str | None:
    """Return what stands before the name of a tokenizer's weights; None for other weights."""
    for tokenizer in TOKENIZERS:
        prefix = name.removesuffix(tokenizer)
        if prefix != name and (not prefix or prefix.endswith(".")):
            return prefix
    return None


def list_own_features(config: ModelConfig) -> list[str]:
    """Return what a model has and no other project's layout has a place for."""
    features = []
    if config.differences:
        features.append("differences of frames (model.differences)")
    if config.positions != "flat-1d":
        features.append(f"{config.positions} positions")
    return features


def to_external(
    state_dict: StateDict,
    layout_name: Literal["adamae", "videomae", "huggingface"],
    tubelet_size: int = 2,
    in_channels: int = 3,
) -> StateDict:
    """Convert weights to another project's layout.

    The authors' layout alone has a token sampler: it is left out of others. Raise InputError for
    the authors' layout if there is none, or one with a width of its own.
    """
    if layout_name == "adamae":
        layout = adamae_layout(_count_sampler_stages(state_dict))
    else:
        layout = LAYOUTS[layout_name]
        state_dict = {
            name: value
            for name, value in state_dict.items()
            if not name.startswith("token_sampler.")
        }
    starts = _invert(layout.starts(state_dict))
    in_block = _invert(layout.in_block)
    state = {}
    for name, value in state_dict.items():
        external = _rename(name, starts, in_block)
        value = _to_external_shape(name, value, tubelet_size, in_channels)
        if layout is HUGGINGFACE and name.endswith("attn.qkv.weight"):
            for part, weight in zip(("query", "key", "value"), value.chunk(3), strict=True):
                # A copy: safetensors refuses tensors that share memory.
                state[external.replace("qkv", part)] = weight.clone()
        else:
            state[external] = value
    return state


def _count_sampler_stages(state_dict: StateDict) -> int:
    """Count a token sampler's stages before its logits; raise InputError if it does not fit."""
    if select(state_dict, "token_sampler.projection."):
        raise InputError(
            "the authors' layout has no place for a token sampler with a width of its own"
        )
    stages = {name.split(".")[2] for name in select(state_dict, "token_sampler.body.")}
    if is_pretraining(state_dict) and not stages:
        raise InputError(
            "these weights have no token sampler, which the authors' layout asks for: use"
            " VideoMAE's"
        )
    return len(stages)


def _invert(names: Names) -> Names:
    return {name: external for external, name in names.items()}


def _to_external_shape(name: str, value: Tensor, tubelet_size: int, in_channels: int) -> Tensor:
    """Make a kernel of the tokenizer's matrix, and add leading dimensions of 1."""
    if name == TOKENIZER:
        side = math.isqrt(value.shape[1] // (in_channels * tubelet_size))
        sides = {"t": tubelet_size, "h": side, "w": side, "c": in_channels}
        value = rearrange(value, "d (t h w c) -> d c t h w", **sides).contiguous()
    for _ in range(NUM_LEADING_ONES.get(name, 0)):
        value = value[None]
    return value


def to_timm(state_dict: StateDict, positions: Float[Tensor, "N D"], tubelet_size: int) -> StateDict:
    """Convert tokenizer and encoder, of RGB, to timm's VisionTransformer for still images.

    All frames of a tubelet are the same image, so the kernel is summed over time.
    positions: of the tokens of one tubelet.
    """
    kernel = to_external({TOKENIZER: state_dict[TOKENIZER]}, "videomae", tubelet_size)
    state = {
        "pos_embed": positions[None],
        "patch_embed.proj.weight": kernel["patch_embed.proj.weight"].sum(2),
        "patch_embed.proj.bias": state_dict["tokenizer.projection.bias"],
    }
    for name, value in select(state_dict, "encoder.").items():
        timm_name = name.removeprefix("encoder.")
        if name.endswith("q_bias"):
            # timm's bias of all three: zeros for the keys.
            v_bias = state_dict[name.replace("q_bias", "v_bias")]
            bias = torch.cat((value, torch.zeros_like(value), v_bias))
            state[timm_name.replace("q_bias", "qkv.bias")] = bias
        elif not name.endswith("v_bias"):
            state[timm_name] = value
    return state


def _rename(name: str, starts: Names, in_block: Names) -> str:
    """Replace the longest of `starts` that a name begins with, and then its parts."""
    matches = [start for start in starts if name.startswith(start)]
    if matches:
        start = max(matches, key=len)
        name = starts[start] + name.removeprefix(start)
    for part, replacement in in_block.items():
        name = name.replace(part, replacement)
    return name
