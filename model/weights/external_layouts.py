"""Converts weights from and to the layouts of other projects: the authors' AdaMAE, VideoMAE, Hugging Face's VideoMAE.

Layouts differ in names, in the tokenizer (a Conv3d kernel `[D, C, t, h, w]` there, a matrix `[D, t·h·w·C]` here), in
leading dimensions of 1 and, at Hugging Face, in separate matrices for queries, keys and values. Nothing is rounded:
round trips are exact.
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
from adamae.model.state_dict import ENCODER_PARTS, LEARNED_POSITIONS, TOKENIZER, StateDict, select

Names = dict[str, str]  # external -> internal
LEADING_ONES = {
    LEARNED_POSITIONS: 1,
    "decoder.mask_token": 2,
}  # how many leading dimensions of 1 they have there
TOKENIZER_OF_MODEL = "embeddings.patch_embeddings.projection.weight"  # in Hugging Face's VideoMAEModel, without a head


class Layout(NamedTuple):
    """Starts of names where they differ, and parts of names in a block."""

    pretraining: Names
    classifier: Names
    in_block: Names

    def starts(self, state_dict: StateDict) -> Names:
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
        "fc_norm.": "norm.",
    },
    {},
)
HUGGINGFACE = Layout(
    {**_HF_ENCODER, "decoder.decoder_layers.": "decoder.blocks.", **_DECODER},
    {**_HF_ENCODER, "fc_norm.": "norm.", "classifier.": "head."},
    {  # replaced in this order
        "attention.output.dense.": "attn.proj.",
        "attention.attention.": "attn.",
        "intermediate.dense.": "mlp.fc1.",
        "output.dense.": "mlp.fc2.",
        "layernorm_before.": "norm1.",
        "layernorm_after.": "norm2.",
    },
)


def adamae_layout(logit_stage: int) -> Layout:
    """Make the authors' layout: VideoMAE's with a sampler, a list of stages of which the last gives the logits."""
    sampler = {
        "encoder.pos_embed_probs": LEARNED_POSITIONS,
        "encoder.get_token_probs.": "token_sampler.body.",
        f"encoder.get_token_probs.{logit_stage}.": "token_sampler.logit.",
    }
    return VIDEOMAE._replace(pretraining=VIDEOMAE.pretraining | sampler)


def is_pretraining(state_dict: StateDict) -> bool:
    """Return whether it has a decoder, in any layout."""
    return any("decoder." in name or name.endswith("mask_token") for name in state_dict)


def from_external(state_dict: StateDict) -> StateDict:
    """Convert a pre-training model or classifier to the layout of this project; other names stay, to be reported."""
    if TOKENIZER_OF_MODEL in state_dict:
        state_dict = {f"videomae.{name}": value for name, value in state_dict.items()}
    if any(name.startswith("videomae.") for name in state_dict):
        layout = HUGGINGFACE
    else:
        stages = re.findall(r"\bencoder\.get_token_probs\.(\d{1,3})\.", " ".join(state_dict))
        layout = adamae_layout(max(map(int, stages), default=1))
    state = {}
    for external, value in state_dict.items():
        name = _rename(external, layout.starts(state_dict), layout.in_block)
        if name.endswith(
            "attn.key.bias"
        ):  # in some versions of transformers; what all keys share, softmax cancels
            continue
        # In memory, since transformers 5, q_bias and v_bias are called like the biases of the Linear layers they are.
        name = name.replace("attn.query.bias", "attn.q_bias").replace(
            "attn.value.bias", "attn.v_bias"
        )
        if name == TOKENIZER and value.dim() == 5:
            value = rearrange(value, "d c t h w -> d (t h w c)")
        for _ in range(LEADING_ONES.get(name, 0)):
            value = value.squeeze(0)
        state[name] = value.contiguous()
    for name in [name for name in state if name.endswith("attn.query.weight")]:
        parts = [name, name.replace("query", "key"), name.replace("query", "value")]
        if all(part in state and state[part].shape == state[name].shape for part in parts):
            state[name.replace("query", "qkv")] = torch.cat([state.pop(part) for part in parts])
    return state


def to_own_layout(state_dict: StateDict, file: Path) -> StateDict:
    """Convert the weights in `file` to the layout of this project, unless they are in it already, without a decoder
    that cannot follow their encoder."""
    if not any(name.startswith("tokenizer.") for name in state_dict):
        state_dict = from_external(state_dict)
    if is_pretraining(state_dict) and "encoder.norm.weight" not in state_dict:
        log_note(
            f"{file} has an encoder without a last norm (use_mean_pooling): its decoder is left out"
        )
        return select(state_dict, ENCODER_PARTS)
    return state_dict


def to_external(
    state_dict: StateDict,
    layout_name: Literal["adamae", "videomae", "huggingface"],
    tubelet_size: int = 2,
    in_channels: int = 3,
) -> StateDict:
    """Convert to another project's layout: the authors' alone has a token sampler, and none with a projection."""
    if layout_name == "adamae":
        if any(name.startswith("token_sampler.projection.") for name in state_dict):
            raise InputError(
                "the authors' layout has no place for a token sampler with a width of its own"
            )
        stages = {
            name.split(".")[2] for name in state_dict if name.startswith("token_sampler.body.")
        }
        if is_pretraining(state_dict) and not stages:
            raise InputError(
                "these weights have no token sampler, which the authors' layout asks for: use VideoMAE's"
            )
        layout = adamae_layout(len(stages))
    else:
        layout = {"videomae": VIDEOMAE, "huggingface": HUGGINGFACE}[layout_name]
        state_dict = {
            name: value
            for name, value in state_dict.items()
            if not name.startswith("token_sampler.")
        }
    both = layout.starts(state_dict), layout.in_block
    starts, in_block = ({name: external for external, name in names.items()} for names in both)
    state = {}
    for name, value in state_dict.items():
        external = _rename(name, starts, in_block)
        if name == TOKENIZER:
            side = math.isqrt(value.shape[1] // (in_channels * tubelet_size))
            sides = {"t": tubelet_size, "h": side, "w": side, "c": in_channels}
            value = rearrange(value, "d (t h w c) -> d c t h w", **sides).contiguous()
        value = value[(None,) * LEADING_ONES.get(name, 0)]
        if layout is HUGGINGFACE and name.endswith("attn.qkv.weight"):
            for part, weight in zip(("query", "key", "value"), value.chunk(3), strict=True):
                state[external.replace("qkv", part)] = weight.clone()
        else:
            state[external] = value
    return state


def to_timm(state_dict: StateDict, positions: Float[Tensor, "N D"], tubelet_size: int) -> StateDict:
    """Convert tokenizer and encoder, of RGB, to timm's VisionTransformer for still images: all frames of a tubelet are
    the same image. positions: of the tokens of one tubelet."""
    kernel = to_external({TOKENIZER: state_dict[TOKENIZER]}, "videomae", tubelet_size)
    state = {
        "pos_embed": positions[None],
        "patch_embed.proj.weight": kernel["patch_embed.proj.weight"].sum(2),
        "patch_embed.proj.bias": state_dict["tokenizer.projection.bias"],
    }
    for name, value in state_dict.items():
        if name.endswith("q_bias"):
            biases = value, torch.zeros_like(value), state_dict[name.replace("q_bias", "v_bias")]
            name, value = name.replace("q_bias", "qkv.bias"), torch.cat(biases)
        if name.startswith("encoder.") and not name.endswith("v_bias"):
            state[name.removeprefix("encoder.")] = value
    return state


def _rename(name: str, starts: Names, in_block: Names) -> str:
    """Replace the start of `name`, of which the longest match counts, and then its parts."""
    start = max((start for start in starts if name.startswith(start)), key=len, default="")
    name = starts.get(start, "") + name[len(start) :]
    for old, new in in_block.items():
        name = name.replace(old, new)
    return name
