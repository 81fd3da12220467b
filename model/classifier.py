"""The encoder as a video classifier: all tokens, mean pooling, LayerNorm, Linear."""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from model.blocks import LayerNorm, initialize
from model.casting import Linear
from model.config import ModelConfig
from model.encoder import Encoder, encode
from model.state_dict import load_parts
from model.tokenizer import Tokenizer


class VideoClassifier(nn.Module):
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

    def forward(
        self, clip: UInt8[Tensor, "B T H W C"], ids: Int[Tensor, "B K"] | None = None
    ) -> Float[Tensor, "B classes"]:
        """Classify clips, by all tokens or by those at `ids`."""
        return self.head(self.features(clip, ids))

    def features(self, clip: UInt8[Tensor, "B T H W C"], ids: Int[Tensor, "B K"] | None = None) -> Float[Tensor, "B D"]:
        """Compute the input of the last linear layer."""
        return self.norm(encode(self, clip, ids).pooled)

    def no_weight_decay(self) -> set[str]:
        return set()  # its positions are no parameters

    def load_encoder(self, state_dict: dict[str, Tensor]) -> None:
        """Take tokenizer and encoder blocks of a pre-trained AdaMAE."""
        load_parts(self, state_dict, ("tokenizer.", "encoder.blocks."))
