"""The encoder as a classifier of videos: fine-tuned, or frozen with a trained head."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adamae.common.errors import InputError
from adamae.model.blocks import LayerNorm, initialize
from adamae.model.casting import Linear
from adamae.model.channels import Clip
from adamae.model.config import ModelConfig
from adamae.model.encoder import Encoder, Features, encode
from adamae.model.state_dict import load_weights
from adamae.model.tokenizer import Tokenizer

Kind = Literal["linear", "attentive"]


class VideoClassifier(nn.Module):
    """A classifier for fine-tuning: all tokens, mean pooling, LayerNorm, Linear."""

    def __init__(self, config: ModelConfig, num_classes: int, drop_path: float = 0.0) -> None:
        super().__init__()
        width = config.dimensions.encoder_width
        self.config = config
        self.tokenizer = Tokenizer(config)
        self.encoder = Encoder(config, drop_path)
        # Features are normalized after pooling instead, as VideoMAE's are.
        self.encoder.norm = nn.Identity()
        self.norm = LayerNorm(width, eps=1e-6)
        self.head = Linear(width, num_classes)
        self.apply(initialize)
        # Nearly equal logits to begin with, as in VideoMAE (init_scale).
        with torch.no_grad():
            self.head.weight.mul_(0.001)

    def forward(self, clip: Clip) -> Float[Tensor, "B classes"]:
        """Compute the logits of all classes."""
        return self.head(self.features(clip))

    def features(self, clip: Clip) -> Float[Tensor, "B D"]:
        """Compute the input of the last linear layer."""
        return self.norm(encode(self, clip).pooled)

    def load_encoder(self, state_dict: dict[str, Tensor]) -> None:
        """Load a pre-trained tokenizer and encoder blocks; raise InputError unless they fit."""
        load_weights(self, state_dict, ("tokenizer.", "encoder.blocks."))


class ProbeHead(nn.Module):
    """What is trained of a probe: a linear layer on a clip's vector, or attentive pooling first."""

    def __init__(self, width: int, num_heads: int, num_classes: int, kind: Kind) -> None:
        """width, num_heads: of the frozen encoder's tokens, and of the attention over them."""
        super().__init__()
        self.pool: nn.Module | None = None
        if kind == "attentive":
            # timm takes seconds to import.
            from timm.layers import AttentionPoolLatent

            self.pool = AttentionPoolLatent(width, num_heads=num_heads)
        # The features of a masked autoencoder differ much in scale. Without learned weights here,
        # the layer stays linear (He et al. 2022, A.1).
        self.norm = nn.BatchNorm1d(width, affine=False, eps=1e-6)
        self.head = Linear(width, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def classify(self, features: Features) -> Float[Tensor, "B classes"]:
        """Compute the logits of all classes from an encoder's features."""
        pooled = features.pooled if self.pool is None else self.pool(features.tokens)
        return self.head(self.norm(pooled))


class Probe(ProbeHead):
    """A linear layer on the mean of a frozen encoder's tokens, or attentive pooling.

    Only `pool` and `head` are trained; the encoder keeps the LayerNorm that it was pre-trained
    with.
    """

    def __init__(self, config: ModelConfig, num_classes: int, kind: Kind) -> None:
        dimensions = config.dimensions
        super().__init__(dimensions.encoder_width, dimensions.encoder_heads, num_classes, kind)
        self.config = config
        self.tokenizer = Tokenizer(config).requires_grad_(False)
        self.encoder = Encoder(config).requires_grad_(False)

    def train(self, mode: bool = True) -> "Probe":
        """Leave the encoder in evaluation mode."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, clip: Clip) -> Float[Tensor, "B classes"]:
        """Compute the logits of all classes; gradients reach `pool` and `head`."""
        with torch.no_grad():
            features = encode(self, clip)
        return self.classify(features)

    def load_encoder(self, state_dict: dict[str, Tensor]) -> None:
        """Load a pre-trained tokenizer and encoder; raise InputError unless they fit."""
        if "encoder.norm.weight" not in state_dict:
            raise InputError(
                "a probe needs a pre-trained encoder, and these weights are a classifier's"
            )
        load_weights(self, state_dict, ("tokenizer.", "encoder."))


def make_classifier(state_dict: dict[str, Tensor], config: ModelConfig) -> VideoClassifier | Probe:
    """Make the fine-tuned classifier or the probe that weights are for, without loading them."""
    num_classes = len(state_dict["head.weight"])
    # A probe alone has a BatchNorm, and with attentive pooling a latent query.
    if "norm.running_mean" not in state_dict:
        return VideoClassifier(config, num_classes)
    if "pool.latent" in state_dict:
        return Probe(config, num_classes, "attentive")
    return Probe(config, num_classes, "linear")


def load_classifier(state_dict: dict[str, Tensor], config: ModelConfig) -> VideoClassifier | Probe:
    """Load a fine-tuned classifier or a probe; raise InputError if the weights are of neither."""
    if "head.weight" not in state_dict:
        raise InputError(
            "these weights have no classification head: fine-tune them, or train a probe, first"
        )
    model = make_classifier(state_dict, config)
    load_weights(model, state_dict)
    return model
