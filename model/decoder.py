"""Decoders; `model.registry.DECODERS` names them.

To add one, subclass Decoder in a new file and add a line to `DECODERS`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adamae.kernels.scatter_tokens import scatter_tokens
from adamae.model.blocks import Block, LayerNorm
from adamae.model.casting import Linear
from adamae.model.config import ModelConfig
from adamae.model.tokenizer import position_table


class Decoder(nn.Module):
    """Predicts the masked tokens from the encoder's features and their positions."""

    positions: Tensor

    def __init__(self, config: ModelConfig, num_values: int) -> None:
        super().__init__()
        size = config.dimensions
        width = size.decoder_width
        table = position_table(config.positions, config.grid, width)
        self.register_buffer("positions", table, persistent=False)
        self.embed = Linear(size.encoder_width, width, bias=False)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(
            Block(width, size.decoder_heads) for _ in range(size.decoder_depth)
        )
        self.activation_checkpointing = config.activation_checkpointing
        self.norm = LayerNorm(width, eps=1e-6)
        self.head = Linear(width, num_values)

    def forward(
        self,
        features: Float[Tensor, "B K D"],
        visible_ids: Int[Tensor, "B K"],
        masked_ids: Int[Tensor, "B M"],
    ) -> Float[Tensor, "B M P"]:
        """Predict the tokens at `masked_ids`."""
        x = scatter_tokens(
            self.embed(features), self.mask_token, self.positions, visible_ids, masked_ids
        )
        return self.head(self.norm(self.decode(x, visible_ids.shape[1])))

    def decode(self, x: Float[Tensor, "B N E"], num_visible: int) -> Float[Tensor, "B M E"]:
        """Run all blocks on visible tokens, which come first, and masked ones; return these."""
        *first_blocks, last_block = self.blocks
        for block in first_blocks:
            x = self.run(block, x)
        # Nobody reads the visible tokens: the last block and the head work for masked ones only. To
        # recompute the last block would save nothing, as its backward pass comes first, when all
        # else is still kept.
        return last_block(x, num_kv_only=num_visible)

    def run(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        """Run a block, whose activations are recomputed with model.activation_checkpointing."""
        if self.activation_checkpointing:
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)


class CrossDecoder(Decoder):
    """A decoder in which masked tokens attend to visible ones, not to each other.

    CrossMAE, arXiv 2401.14391 §3.2. For ViT-Base with ρ = 0.95 and 16 clips, training/accounting.py
    counts 3.18 TFLOP a step instead of 4.18, and 3.24 GiB instead of 3.41. With decoder_share=0.5,
    which changes no prediction here, these are 2.70 TFLOP and 2.84 GiB.
    """

    def decode(self, x: Float[Tensor, "B N E"], num_visible: int) -> Float[Tensor, "B M E"]:
        context, x = x.tensor_split([num_visible], dim=1)
        for block in self.blocks:
            x = self.run(block, x, context)
        return x
