"""Probes of encoders that have their own architecture, and keep their weights in their own files.

Probes of weights of this project hold the encoder too (model.classifier).
"""

import math
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from adamae.common.devices import Precision
from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.model.channels import Clip
from adamae.model.classifier import Kind, ProbeHead
from adamae.model.config import ModelConfig
from adamae.model.encoder import Features
from adamae.model.encoders.encoder import Encoder
from adamae.model.encoders.open_encoder import choose_kind, find_encoder, open_encoder
from adamae.model.encoders.own import OwnEncoder
from adamae.model.encoders.teacher import Teacher, hash_encoder
from adamae.model.state_dict import load_weights
from adamae.model.weights.pretrained import ENCODER, Weights
from adamae.model.weights.read_config import read_config
from adamae.model.weights.tensor_files import read_json, read_metadata, read_state_dict

# Channels of an attention head, as in most transformers.
HEAD_WIDTH = 64


class EncoderProbe(ProbeHead):
    """A trained head on a frozen encoder that is none of its modules, so neither of its weights."""

    def __init__(
        self, encoder: Encoder, width: int, num_classes: int, kind: Kind, precision: Precision
    ) -> None:
        """width: that of a clip's vector, or for attentive pooling that of a token."""
        num_heads = width // HEAD_WIDTH if width % HEAD_WIDTH == 0 else 1
        super().__init__(width, num_heads, num_classes, kind)
        self.teacher = Teacher(encoder, precision=precision)

    def forward(self, clip: Clip) -> Float[Tensor, "B classes"]:
        """Compute the logits of all classes; gradients reach `pool` and `head`."""
        pooled, tokens = self.teacher.encode(clip)
        # The encoder may compute in bf16 where the head does not.
        return self.classify(Features(pooled.float(), tokens.float()))


def is_other_encoder(source: str) -> bool:
    """Return whether init_from names an encoder of another architecture than this project's."""
    if not source or (is_remote(source) and not source.startswith("hf://")):
        # A run in object storage is of this project.
        return False
    return choose_kind(find_encoder(source)) is not OwnEncoder


def open_probed(source: str, config: ModelConfig) -> Encoder:
    """Open the encoder of a probe, for the clips of `config`."""
    return open_encoder(source, num_frames=config.num_frames, image_size=config.frame_size)


def make_probe(
    source: str, config: ModelConfig, num_classes: int, kind: Kind, precision: Precision
) -> EncoderProbe:
    """Make a probe with a new head."""
    encoder = open_probed(source, config)
    width = encoder.dim
    if kind == "linear":
        # Few image models have vectors of another width than tokens, and no library says it.
        black = torch.zeros(1, config.num_frames, *config.frame_size, 3, dtype=torch.uint8)
        width = encoder.pooled(black).shape[1]
    return EncoderProbe(encoder, width, num_classes, kind, precision)


def describe_encoder(source: str) -> dict[str, str]:
    """Return what the metadata of a probe say about its encoder: where it was, and a hash."""
    return {"source": source, "sha256": hash_encoder(source)}


def describe_clips(config: ModelConfig, encoder: Encoder) -> ModelConfig:
    """Return a configuration whose clips and patches are those of an encoder.

    Patches, which a probe does not use, are nearly the encoder's: they must divide a frame, and a
    clip of V-JEPA 2.1 has more tokens than a model of this project may have.
    """
    height, width = encoder.image_size
    common = math.gcd(height, width)
    patch_size = height // encoder.grid[1]
    while common % patch_size:
        patch_size -= 1
    return replace(
        config,
        num_frames=encoder.num_frames,
        image_size=list(encoder.image_size),
        tubelet_size=encoder.num_frames,
        patch_size=patch_size,
        in_channels=encoder.channels,
        masking="random",
        mask_ratio=0.5,
    )


def load_head(file: Path) -> Weights | None:
    """Load the head of a probe; return None for weights that have their encoder with them."""
    metadata = read_metadata(file) if file.suffix == ".safetensors" else {}
    if ENCODER not in metadata:
        return None
    classes = read_json(metadata["classes"], file, list[str])
    is_multi_label = metadata.get("multi_label") == "true"
    return Weights(read_state_dict(file)[0], read_config(file), classes, is_multi_label)


def load_probe(
    file: Path, head: Weights, config: ModelConfig, precision: Precision
) -> EncoderProbe:
    """Make a probe of a head and its encoder, for clips of `config`.

    Raise InputError if the encoder is not there any more, or has other weights.
    """
    described = read_json(read_metadata(file)[ENCODER], file, dict[str, str])
    source = described["source"]
    if describe_encoder(source) != described:
        raise InputError(
            f"{source} has other files than when {file} was trained on its features: put those"
            " back, or train the probe again"
        )
    kind: Kind = "attentive" if "pool.latent" in head.state else "linear"
    num_classes, width = head.state["head.weight"].shape
    encoder = open_probed(source, config)
    probe = EncoderProbe(encoder, width, num_classes, kind, precision)
    load_weights(probe, head.state)
    return probe
