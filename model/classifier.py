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
from adamae.model.encoder import Encoder, encode
from adamae.model.state_dict import load_weights
from adamae.model.tokenizer import Tokenizer

Kind = Literal["linear", "attentive"]


class VideoClassifier(nn.Module):
    """All tokens, mean pooling, LayerNorm, Linear."""

    def __init__(self, config: ModelConfig, num_classes: int, drop_path: float = 0.0) -> None:
        super().__init__()
        width = config.dimensions.encoder_width
        self.config = config
        self.tokenizer = Tokenizer(config)
        self.encoder = Encoder(config, drop_path)
        self.encoder.norm = nn.Identity()  # the features are normalized after pooling instead
        self.norm = LayerNorm(width, eps=1e-6)
        self.head = Linear(width, num_classes)
        self.apply(initialize)
        with torch.no_grad():
            self.head.weight.mul_(0.001)

    def forward(self, clip: Clip) -> Float[Tensor, "B classes"]:
        return self.head(self.features(clip))

    def features(self, clip: Clip) -> Float[Tensor, "B D"]:
        """Compute the input of the last linear layer."""
        return self.norm(encode(self, clip).pooled)

    def load_encoder(self, state_dict: dict[str, Tensor]) -> None:
        """Take tokenizer and encoder blocks of a pre-trained AdaMAE."""
        load_weights(self, state_dict, ("tokenizer.", "encoder.blocks."))


class Probe(nn.Module):
    """A linear layer on the mean of a frozen encoder's tokens, or attentive pooling.

    Only `pool` and `head` are trained; the encoder keeps the LayerNorm that it was pre-trained with.
    """

    def __init__(self, config: ModelConfig, num_classes: int, kind: Kind) -> None:
        super().__init__()
        width, num_heads = config.dimensions.encoder_width, config.dimensions.encoder_heads
        self.config = config
        self.tokenizer = Tokenizer(config).requires_grad_(False)
        self.encoder = Encoder(config).requires_grad_(False)
        self.pool: nn.Module | None = None
        if kind == "attentive":
            from timm.layers import AttentionPoolLatent  # takes seconds

            self.pool = AttentionPoolLatent(width, num_heads=num_heads)
        # The features of a masked autoencoder differ much in scale. The layer stays linear: He et al. 2022, A.1.
        self.norm = nn.BatchNorm1d(width, affine=False, eps=1e-6)
        self.head = Linear(width, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def train(self, mode: bool = True) -> "Probe":
        """Leave the encoder in evaluation mode."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, clip: Clip) -> Float[Tensor, "B classes"]:
        with torch.no_grad():
            features = encode(self, clip)
        return self.head(
            self.norm(features.pooled if self.pool is None else self.pool(features.tokens))
        )

    def load_encoder(self, state_dict: dict[str, Tensor]) -> None:
        """Take tokenizer and encoder of a pre-trained AdaMAE; raises InputError if they do not fit."""
        if "encoder.norm.weight" not in state_dict:
            raise InputError(
                "a probe needs a pre-trained encoder, and these weights are a classifier's"
            )
        load_weights(self, state_dict, ("tokenizer.", "encoder."))


def make_classifier(state_dict: dict[str, Tensor], config: ModelConfig) -> VideoClassifier | Probe:
    """Make the fine-tuned classifier or the probe that weights in this layout are for, without loading them."""
    num_classes = len(state_dict["head.weight"])
    if "norm.running_mean" in state_dict:
        return Probe(config, num_classes, "attentive" if "pool.latent" in state_dict else "linear")
    return VideoClassifier(config, num_classes)


def load_classifier(state_dict: dict[str, Tensor], config: ModelConfig) -> VideoClassifier | Probe:
    """Load the fine-tuned classifier or the probe of these weights; raise InputError where they are of neither."""
    if "head.weight" not in state_dict:
        raise InputError(
            "these weights have no classification head: fine-tune them, or train a probe, first"
        )
    model = make_classifier(state_dict, config)
    load_weights(model, state_dict)
    return model
