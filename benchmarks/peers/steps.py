"""The training steps to compare with, each as its own code takes it, with the same weights and the same AdamW."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.peers.naive_adamae import NaiveAdaMAE
from benchmarks.peers.token_path import normalized_clip
from common.devices import autocast_to
from common.errors import InputError
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.weights.layouts import to_external

Step = Callable[[], object]
MaskedLoss = Callable[[Tensor, Tensor], Tensor]


def naive(model: AdaMAE) -> MaskedLoss:
    """The loss of the published step on uint8 clips, with the tokens masked where the mask [B, N] is True."""
    peer = NaiveAdaMAE(model).eval()
    return lambda clip, mask: peer(normalized_clip(clip), mask)


def hugging_face(model: AdaMAE) -> MaskedLoss:
    """Likewise of Hugging Face's VideoMAE."""
    peer = _videomae(model).eval()
    return lambda clip, mask: peer(_frames_first(clip), mask).loss


def naive_step(config: ModelConfig, clip: Tensor) -> Step:
    """Floats reach the published step from its loader, so their making is not timed."""
    with clip.device:
        peer = NaiveAdaMAE(AdaMAE(config))
    pixels = normalized_clip(clip).contiguous()
    # The published loop looks at every step whether its loss is finite.
    step = _training_step(peer, lambda: peer(pixels), clip.device)
    return lambda: step().item()


def hugging_face_step(config: ModelConfig, clip: Tensor) -> Step:
    """Sample masks as VideoMAE's loader does, per clip; not timed, as in no other implementation."""
    with clip.device:
        peer = _videomae(AdaMAE(config))
    pixels = _frames_first(clip)
    order = torch.rand(len(clip), config.num_tokens, device=clip.device).argsort(dim=1)
    mask = torch.ones_like(order, dtype=torch.bool).scatter_(1, order[:, : config.num_visible], False)
    return _training_step(peer, lambda: peer(pixels, mask).loss, clip.device)


def _training_step(peer: nn.Module, find_loss: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05)

    def step() -> Tensor:
        with autocast_to(device, "bf16"):
            loss = find_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _videomae(model: AdaMAE) -> nn.Module:
    try:
        from transformers import VideoMAEConfig, VideoMAEForPreTraining
    except ImportError as error:
        raise InputError("Hugging Face's VideoMAE is not installed: pip install -e '.[dev]'") from error
    config, size = model.config, model.config.dimensions
    peer: nn.Module = VideoMAEForPreTraining(
        VideoMAEConfig(
            image_size=config.image_size,
            patch_size=config.patch_size,
            num_frames=config.num_frames,
            tubelet_size=config.tubelet_size,
            hidden_size=size.encoder_width,
            num_hidden_layers=size.encoder_depth,
            num_attention_heads=size.encoder_heads,
            intermediate_size=4 * size.encoder_width,
            decoder_hidden_size=size.decoder_width,
            decoder_num_hidden_layers=size.decoder_depth,
            decoder_num_attention_heads=size.decoder_heads,
            decoder_intermediate_size=4 * size.decoder_width,
            layer_norm_eps=1e-6,
            use_mean_pooling=False,
        )
    )
    # Some versions have a bias of the keys too, which changes nothing.
    unused = {name: torch.zeros_like(value) for name, value in peer.state_dict().items() if name.endswith("key.bias")}
    state = unused | to_external(model.state_dict(), "huggingface", config.tubelet_size)
    # Saved models call these biases otherwise than transformers 5 does in memory.
    for saved, loaded in (("q_bias", "query.bias"), ("v_bias", "value.bias")):
        state = {name.replace(f"attention.{saved}", f"attention.{loaded}"): value for name, value in state.items()}
    peer.load_state_dict(state)
    return peer.to(next(model.parameters()).device)


def _frames_first(clip: Tensor) -> Tensor:
    return normalized_clip(clip).transpose(1, 2).contiguous()
