"""The training steps to compare with, each as its own code takes it.

They have the same weights and the same AdamW as this repository's step.
A peer's `prepare` turns uint8 clips into what its loader hands to it, so that this is not timed.
Called with that and a mask [B, N], True where a token is masked, the peer returns its loss.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from adamae.benchmarks.peers.naive_adamae import NaiveAdaMAE
from adamae.benchmarks.peers.token_path import normalized_clip
from adamae.common.devices import autocast_to
from adamae.common.errors import InputError
from adamae.export import export_huggingface
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.weights.pretrained import Weights


class HuggingFaceVideoMAE(nn.Module):
    """transformers' VideoMAE."""

    def __init__(self, model: AdaMAE) -> None:
        """Take the weights of `model`, which masks at random, on its device."""
        super().__init__()
        try:
            from transformers import VideoMAEForPreTraining
        except ImportError as error:
            raise InputError(
                "Hugging Face's VideoMAE is not installed: pip install -e '.[dev]'"
            ) from error
        # Hugging Face's class reads weights from a folder only.
        with TemporaryDirectory() as folder:
            export_huggingface(Weights(model.state_dict(), model.config, []), Path(folder))
            peer = VideoMAEForPreTraining.from_pretrained(folder)
        self.peer = peer.train().to(next(model.parameters()).device)

    def prepare(self, clip: Tensor) -> Tensor:
        """Turn uint8 [B, T, H, W, C] into float [B, T, C, H, W], normalized."""
        return normalized_clip(clip).transpose(1, 2).contiguous()

    def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
        loss: Tensor = self.peer(pixels, mask).loss
        return loss


PUBLISHED = "published step, re-implemented"
HUGGING_FACE = "Hugging Face VideoMAE"
PEERS: dict[str, type[NaiveAdaMAE | HuggingFaceVideoMAE]] = {
    PUBLISHED: NaiveAdaMAE,
    HUGGING_FACE: HuggingFaceVideoMAE,
}


def make_step(implementation: str, config: ModelConfig, clip: Tensor) -> Callable[[], object]:
    """Return the training step of a peer on a uint8 clip."""
    with clip.device:
        model = AdaMAE(config)
    peer = PEERS[implementation](model)
    inputs = [peer.prepare(clip)]
    # VideoMAE's loader samples masks; as in no other implementation, that is not timed.
    if implementation == HUGGING_FACE:
        order = torch.rand(len(clip), config.num_tokens, device=clip.device).argsort(dim=1)
        mask = torch.ones_like(order, dtype=torch.bool)
        inputs.append(mask.scatter_(1, order[:, : config.num_visible], False))
    # The recipe's values; the time of an update depends on none of them.
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05)

    def step() -> Tensor:
        with autocast_to(clip.device, "bf16"):
            loss: Tensor = peer(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if implementation != PUBLISHED:
        return step
    # The published loop looks at every step whether its loss is finite.
    return lambda: step().item()
