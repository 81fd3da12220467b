"""What benchmarks/kernel_speed.py measures: every op of the token path at one size, in each way there is to do it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

import benchmarks.peers.token_path as published
import kernels
from kernels.gather_tokens import gather_tokens_ref
from kernels.gather_tokens import num_bytes as gather_bytes
from kernels.gumbel_topk import gumbel_topk_ref
from kernels.gumbel_topk import num_bytes as gumbel_bytes
from kernels.masked_patch_loss import masked_patch_loss_ref
from kernels.masked_patch_loss import num_bytes as patch_loss_bytes
from kernels.patchify import num_bytes as patchify_bytes
from kernels.patchify import patchify_ref
from kernels.sampling_loss import num_bytes as sampling_bytes
from kernels.sampling_loss import sampling_loss_ref
from kernels.scatter_tokens import num_bytes as scatter_bytes
from kernels.scatter_tokens import scatter_tokens_ref
from model.config import ModelConfig


class Contender(NamedTuple):
    """One way to do it, and what its result has gradients for."""

    call: Callable[[], Tensor]
    learnt: list[Tensor]


class Case(NamedTuple):
    ours: Contender
    published: Contender
    reference: Callable[[], Tensor | tuple[Tensor, ...]]  # all of it, so that a compiler drops nothing; `ours` last
    num_bytes: tuple[int, int]  # that forward and backward have to move
    agrees: Callable[[Tensor, Tensor], bool]  # ours with the published way's result
    same_gradients: bool = True


@dataclass
class Sizes:
    """A model, a batch, and the draw and the clips that several ops share."""

    config: ModelConfig
    batch: int
    device: torch.device
    dtype: torch.dtype

    @property
    def patch(self) -> tuple[int, int]:
        return self.config.tubelet_size, self.config.patch_size

    @cached_property
    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """visible_ids, masked_ids, bool mask [B, N] with True = masked."""
        tokens = self.config.num_tokens
        logits = torch.randn(self.batch, tokens, device=self.device)
        visible, masked, _ = kernels.gumbel_topk(logits, self.config.num_visible, 1, 2)
        mask = torch.ones(self.batch, tokens, dtype=torch.bool, device=self.device).scatter_(1, visible, False)
        return visible, masked, mask

    @cached_property
    def clip(self) -> Tensor:
        shape = self.batch, self.config.num_frames, *self.config.frame_size, 3
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device)

    def learnt(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype, requires_grad=True)


def close(tolerance: float) -> Callable[[Tensor, Tensor], bool]:
    def agrees(got: Tensor, expected: Tensor) -> bool:
        if got.shape != expected.shape:
            return False
        return torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance)

    return agrees


def gumbel_topk(sizes: Sizes) -> Case:
    tokens, k = sizes.config.num_tokens, sizes.config.num_visible
    logits = torch.randn(sizes.batch, tokens, device=sizes.device, requires_grad=True)
    seed, offset = (torch.tensor(value, device=sizes.device) for value in (1, 2))
    visible, masked, _ = kernels.gumbel_topk(logits, k, seed, offset)

    def agrees(log_probs: Tensor, probabilities: Tensor) -> bool:
        together = torch.cat([visible, masked], dim=1).sort(dim=1).values
        complete = bool((together == torch.arange(tokens, device=sizes.device)).all())
        ascending = all(bool((ids.diff(dim=1) > 0).all()) for ids in (visible, masked))
        return complete and ascending and close(1e-5)(log_probs.exp(), probabilities)

    return Case(
        Contender(lambda: kernels.gumbel_topk(logits, k, seed, offset)[2], [logits]),
        Contender(lambda: published.sample_mask(logits, k)[1], [logits]),
        partial(gumbel_topk_ref, logits, k, seed, offset),
        (gumbel_bytes(sizes.batch, tokens, 4), sizes.batch * tokens * 12),
        agrees,
        same_gradients=False,  # ours are those of log-probabilities, the published way's of probabilities
    )


def gather_tokens(sizes: Sizes) -> Case:
    tokens, width = sizes.config.num_tokens, sizes.config.dimensions.encoder_width
    visible, _, mask = sizes.draw
    x, table = sizes.learnt(sizes.batch, tokens, width), torch.randn(tokens, width, device=sizes.device)
    return Case(
        Contender(partial(kernels.gather_tokens, x, visible, table), [x]),
        Contender(partial(published.gather, x, mask, table), [x]),
        partial(gather_tokens_ref, x, visible, table),
        gather_bytes(sizes.batch, tokens, visible.shape[1], width, sizes.dtype.itemsize),
        close(3e-2),
    )


def scatter_tokens(sizes: Sizes) -> Case:
    tokens, width = sizes.config.num_tokens, sizes.config.dimensions.decoder_width
    visible, masked, mask = sizes.draw
    features = sizes.learnt(sizes.batch, visible.shape[1], width)
    table = torch.randn(tokens, width, device=sizes.device)
    mask_token = torch.randn(width, device=sizes.device, requires_grad=True)
    return Case(
        Contender(
            partial(kernels.scatter_tokens, features, mask_token, table, visible, masked), [features, mask_token]
        ),
        Contender(partial(published.scatter, features, mask_token, table, mask), [features, mask_token]),
        partial(scatter_tokens_ref, features, mask_token, table, visible, masked),
        scatter_bytes(sizes.batch, tokens, visible.shape[1], width, sizes.dtype.itemsize),
        close(3e-2),
    )


def patchify(sizes: Sizes) -> Case:
    clip, dtype = sizes.clip, sizes.dtype
    return Case(
        Contender(partial(kernels.patchify, clip, None, *sizes.patch, dtype), []),
        Contender(partial(published.patches, clip, *sizes.patch, dtype), []),
        partial(patchify_ref, clip, None, *sizes.patch, dtype),
        (patchify_bytes(sizes.batch, sizes.config.num_tokens, sizes.config.patch_values, dtype.itemsize), 0),
        close(2e-2),
        same_gradients=False,  # there are none
    )


def masked_patch_loss(sizes: Sizes) -> Case:
    _, masked, mask = sizes.draw
    values = sizes.config.patch_values
    pred, float_clip = sizes.learnt(sizes.batch, masked.shape[1], values), published.normalized_clip(sizes.clip)
    return Case(
        Contender(partial(kernels.masked_patch_loss, pred, sizes.clip, masked, *sizes.patch), [pred]),
        Contender(partial(published.patch_loss, pred, float_clip, mask, *sizes.patch), [pred]),
        partial(masked_patch_loss_ref, pred, sizes.clip, masked, *sizes.patch, "mse", True),
        patch_loss_bytes(sizes.batch, masked.shape[1], values, sizes.dtype.itemsize),
        close(1e-2),
    )


def sampling_loss(sizes: Sizes) -> Case:
    tokens = sizes.config.num_tokens
    _, masked, mask = sizes.draw
    log_probs = torch.randn(sizes.batch, tokens, device=sizes.device).log_softmax(dim=1)
    losses = torch.rand(sizes.batch, masked.shape[1], device=sizes.device)
    probabilities = log_probs.exp().requires_grad_()
    log_probs.requires_grad_()
    return Case(
        Contender(partial(kernels.sampling_loss, log_probs, masked, losses), [log_probs]),
        Contender(partial(published.sampling_loss, probabilities, mask, losses), [probabilities]),
        partial(sampling_loss_ref, log_probs, masked, losses),
        sampling_bytes(sizes.batch, tokens, masked.shape[1]),
        close(1e-4),
        same_gradients=False,
    )


def draw_to_loss(sizes: Sizes) -> Case:
    """gumbel_topk and sampling_loss together: what a sampler's logits go through."""
    tokens, k = sizes.config.num_tokens, sizes.config.num_visible
    logits = torch.randn(sizes.batch, tokens, device=sizes.device, requires_grad=True)
    losses = torch.rand(sizes.batch, tokens - k, device=sizes.device)
    seed, offset = (torch.tensor(value, device=sizes.device) for value in (1, 2))

    def path(draw: Callable[..., tuple[Tensor, Tensor, Tensor]], loss: Callable[..., Tensor]) -> Tensor:
        _, masked, log_probs = draw(logits, k, seed, offset)
        return loss(log_probs, masked, losses)

    def published_path() -> Tensor:
        mask, probabilities = published.sample_mask(logits, k)
        return published.sampling_loss(probabilities, mask, losses)

    forward, backward = sampling_bytes(sizes.batch, tokens, tokens - k)
    return Case(
        Contender(partial(path, kernels.gumbel_topk, kernels.sampling_loss), [logits]),
        Contender(published_path, [logits]),
        partial(path, gumbel_topk_ref, sampling_loss_ref),
        (gumbel_bytes(sizes.batch, tokens, 4) + forward, sizes.batch * tokens * 12 + backward),
        close(0.2),  # two draws from one distribution: about 1 % apart
        same_gradients=False,
    )


CASES: dict[str, Callable[[Sizes], Case]] = {
    "gumbel_topk": gumbel_topk,
    "gather_tokens": gather_tokens,
    "scatter_tokens": scatter_tokens,
    "patchify": patchify,
    "masked_patch_loss": masked_patch_loss,
    "sampling_loss": sampling_loss,
    "gumbel_topk + sampling_loss": draw_to_loss,
}
