"""What a frozen encoder knows, read off by a small head: `linear` on the mean of its tokens, or `attentive`."""

from typing import Literal

import torch
from jaxtyping import Float, UInt8
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn

from common.errors import InputError
from model.classifier import VideoClassifier
from model.config import ModelConfig
from model.encoder import Encoder, encode
from model.tokenizer import Tokenizer
from model.weights.loading import load_weights

Kind = Literal["linear", "attentive"]


class Probe(nn.Module):
    """Only `pool` and `head` learn; the encoder keeps the LayerNorm that it was pre-trained with."""

    def __init__(self, config: ModelConfig, num_classes: int, kind: Kind) -> None:
        super().__init__()
        size = config.dimensions
        self.config = config
        self.tokenizer = Tokenizer(config).requires_grad_(False)
        self.encoder = Encoder(config).requires_grad_(False)
        attentive = kind == "attentive"
        self.pool = AttentionPoolLatent(size.encoder_width, num_heads=size.encoder_heads) if attentive else None
        # The features of a masked autoencoder differ much in scale. The layer stays linear: He et al. 2022, A.1.
        self.norm = nn.BatchNorm1d(size.encoder_width, affine=False, eps=1e-6)
        self.head = nn.Linear(size.encoder_width, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def train(self, mode: bool = True) -> "Probe":
        """The encoder stays as in evaluation."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B classes"]:
        with torch.no_grad():
            features = encode(self, clip)
        return self.head(self.norm(features.pooled if self.pool is None else self.pool(features.tokens)))

    def load_encoder(self, state_dict: dict[str, Tensor]) -> None:
        """Take tokenizer and encoder of a pre-trained AdaMAE; raises InputError if they do not fit."""
        if "encoder.norm.weight" not in state_dict:
            raise InputError("a probe reads a pre-trained encoder, and these are a classifier's weights")
        parts = ("tokenizer.", "encoder.")
        own = {name: value for name, value in self.state_dict().items() if not name.startswith(parts)}
        load_weights(self, own | {name: value for name, value in state_dict.items() if name.startswith(parts)})

    def no_weight_decay(self) -> set[str]:
        return {"pool.latent"}


def classifier_of(state_dict: dict[str, Tensor], config: ModelConfig) -> VideoClassifier | Probe:
    """The fine-tuned classifier or the probe that these weights, in our layout, are of; else InputError."""
    if "head.weight" not in state_dict:
        raise InputError("these weights have no classification head: fine-tune them, or fit a probe, first")
    num_classes = state_dict["head.weight"].shape[0]
    model: VideoClassifier | Probe
    if "norm.running_mean" in state_dict:
        model = Probe(config, num_classes, "attentive" if "pool.latent" in state_dict else "linear")
    else:
        model = VideoClassifier(config, num_classes)
    load_weights(model, state_dict)
    return model
