"""Measure the token path's ops, forward, backward and both, beside the published code's way and the compiled reference.

    python benchmarks/kernel_speed.py [--batch-size N ...] [--mask-ratio R ...] [--op NAME ...] [--output FOLDER]

On a GPU or a CPU. The values and gradients of every op are first compared with the published way's
(benchmarks/peers/token_path.py); if they differ, nothing is reported. GB/s counts the bytes that an op must move once,
relative to the bandwidth of a large copy on the same machine, counted in the same way.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import benchmarks.peers.token_path as published
from benchmarks.harness import Row, describe_machine, print_table, require, results_folder, time_calls, write_results
from benchmarks.step import noise_clip
from common.devices import choose_device
from common.errors import InputError, run_command
from kernels import gather_tokens, gumbel_topk, masked_patch_loss, patchify, sampling_loss, scatter_tokens
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

NOTES = [
    "`published`: eager PyTorch with boolean masks (benchmarks/peers/token_path.py). Its sampler is timed up to the"
    " mask, its sampling loss with one Categorical per clip; its patch loss starts from an existing float clip.",
    "`compiled`: torch.compile of the op's reference, on GPUs at the largest batch and ratio .95. `ours` on a CPU is"
    " the reference.",
    "`backward` runs on a retained graph; patchify has none. `extra_mib`: memory that forward and backward allocate.",
]


class Implementation(NamedTuple):
    call: Callable[[], Tensor]
    inputs: list[Tensor]  # that get gradients


class Case(NamedTuple):
    ours: Implementation
    published: Implementation
    reference: Callable[[], Tensor | tuple[Tensor, ...]]  # all outputs, so that a compiler drops none; `ours` last
    num_bytes: tuple[int, int]  # that forward and backward must move
    tolerance: float
    same_gradients: bool = True
    as_published: Callable[[Tensor], Tensor] = lambda value: value  # ours as the published way's quantity


@dataclass
class Inputs:
    """The size of a model and batch, with the clip and mask that several ops share."""

    config: ModelConfig
    batch: int
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def mask(self) -> tuple[Tensor, Tensor, Tensor]:
        """visible_ids, masked_ids, bool mask [B, N] with True = masked."""
        tokens = self.config.num_tokens
        logits = torch.randn(self.batch, tokens, device=self.device)
        visible, masked, _ = gumbel_topk(logits, self.config.num_visible, 1, 2)
        mask = torch.ones(self.batch, tokens, dtype=torch.bool, device=self.device).scatter_(1, visible, False)
        return visible, masked, mask

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype, requires_grad=True)


def sample_case(inputs: Inputs) -> Case:
    tokens, k = inputs.config.num_tokens, inputs.config.num_visible
    logits = torch.randn(inputs.batch, tokens, device=inputs.device, requires_grad=True)
    seed, offset = (torch.tensor(value, device=inputs.device) for value in (1, 2))
    visible, masked, _ = gumbel_topk(logits, k, seed, offset)
    together = torch.cat([visible, masked], dim=1).sort(dim=1).values
    complete = bool((together == torch.arange(tokens, device=inputs.device)).all())
    ascending = all(bool((ids.diff(dim=1) > 0).all()) for ids in (visible, masked))
    require("visible and masked ids ascend and are all tokens", complete and ascending, f"{visible[0]}, {masked[0]}")
    return Case(
        Implementation(lambda: gumbel_topk(logits, k, seed, offset)[2], [logits]),
        Implementation(lambda: published.sample_mask(logits, k)[1], [logits]),
        partial(gumbel_topk_ref, logits, k, seed, offset),
        (gumbel_bytes(inputs.batch, tokens, 4), inputs.batch * tokens * 12),
        1e-5,
        same_gradients=False,  # ours are those of log-probabilities
        as_published=torch.exp,
    )


def gather_case(inputs: Inputs) -> Case:
    tokens, width = inputs.config.num_tokens, inputs.config.dimensions.encoder_width
    visible, _, mask = inputs.mask
    x, table = inputs.random(inputs.batch, tokens, width), torch.randn(tokens, width, device=inputs.device)
    return Case(
        Implementation(partial(gather_tokens, x, visible, table), [x]),
        Implementation(partial(published.gather, x, mask, table), [x]),
        partial(gather_tokens_ref, x, visible, table),
        gather_bytes(inputs.batch, tokens, visible.shape[1], width, inputs.dtype.itemsize),
        3e-2,
    )


def scatter_case(inputs: Inputs) -> Case:
    tokens, width = inputs.config.num_tokens, inputs.config.dimensions.decoder_width
    visible, masked, mask = inputs.mask
    features = inputs.random(inputs.batch, visible.shape[1], width)
    table = torch.randn(tokens, width, device=inputs.device)
    mask_token = torch.randn(width, device=inputs.device, requires_grad=True)
    ours = partial(scatter_tokens, features, mask_token, table, visible, masked)
    return Case(
        Implementation(ours, [features, mask_token]),
        Implementation(partial(published.scatter, features, mask_token, table, mask), [features, mask_token]),
        partial(scatter_tokens_ref, features, mask_token, table, visible, masked),
        scatter_bytes(inputs.batch, tokens, visible.shape[1], width, inputs.dtype.itemsize),
        3e-2,
    )


def patchify_case(inputs: Inputs) -> Case:
    config, dtype = inputs.config, inputs.dtype
    clip, patch = noise_clip(config, inputs.batch, inputs.device), (config.tubelet_size, config.patch_size)
    return Case(
        Implementation(partial(patchify, clip, None, *patch, dtype), []),
        Implementation(partial(published.patches, clip, *patch, dtype), []),
        partial(patchify_ref, clip, None, *patch, dtype),
        (patchify_bytes(inputs.batch, config.num_tokens, config.patch_values, dtype.itemsize), 0),
        2e-2,
        same_gradients=False,  # there are none
    )


def patch_loss_case(inputs: Inputs) -> Case:
    config, (_, masked, mask) = inputs.config, inputs.mask
    clip, patch = noise_clip(config, inputs.batch, inputs.device), (config.tubelet_size, config.patch_size)
    pred, pixels = inputs.random(*masked.shape, config.patch_values), published.normalized_clip(clip)
    return Case(
        Implementation(partial(masked_patch_loss, pred, clip, masked, *patch), [pred]),
        Implementation(partial(published.patch_loss, pred, pixels, mask, *patch), [pred]),
        partial(masked_patch_loss_ref, pred, clip, masked, *patch, "mse", True),
        patch_loss_bytes(inputs.batch, masked.shape[1], config.patch_values, inputs.dtype.itemsize),
        1e-2,
    )


def sampling_loss_case(inputs: Inputs) -> Case:
    tokens, (_, masked, mask) = inputs.config.num_tokens, inputs.mask
    log_probs = torch.randn(inputs.batch, tokens, device=inputs.device).log_softmax(dim=1)
    losses = torch.rand(masked.shape, device=inputs.device)
    probabilities = log_probs.exp().requires_grad_()
    log_probs.requires_grad_()
    return Case(
        Implementation(partial(sampling_loss, log_probs, masked, losses), [log_probs]),
        Implementation(partial(published.sampling_loss, probabilities, mask, losses), [probabilities]),
        partial(sampling_loss_ref, log_probs, masked, losses),
        sampling_bytes(inputs.batch, tokens, masked.shape[1]),
        1e-4,
        same_gradients=False,  # ours are those of log-probabilities
    )


CASES: dict[str, Callable[[Inputs], Case]] = {
    "gumbel_topk": sample_case,
    "gather_tokens": gather_case,
    "scatter_tokens": scatter_case,
    "patchify": patchify_case,
    "masked_patch_loss": patch_loss_case,
    "sampling_loss": sampling_loss_case,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, nargs="+", help="default: 32 to 256 on a GPU, 2 and 8 on a CPU")
    parser.add_argument("--mask-ratio", type=float, nargs="+", help="default: .80 to .98 on a GPU, .95 on a CPU")
    parser.add_argument("--op", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<gpu> or .../cpu")
    options = parser.parse_args(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    batches = options.batch_size or ([32, 64, 128, 256] if on_gpu else [2, 8])
    ratios = options.mask_ratio or ([0.8, 0.9, 0.95, 0.98] if on_gpu else [0.95])
    if min(batches) < 1 or options.repetitions < 1:
        raise InputError("--batch-size and --repetitions must be whole numbers of at least 1")
    copy = copy_gb_per_second(device)
    about = describe_machine(device) | {"copy_gb_per_second": copy, "model": "base, N = 1568"}
    rows: list[Row] = []
    for batch in batches:
        for ratio in ratios:
            inputs = Inputs(ModelConfig(mask_ratio=ratio), batch, device, torch.bfloat16 if on_gpu else torch.float32)
            compiled = on_gpu and batch == max(batches) and ratio == 0.95
            for name in options.op:
                rows += measure(CASES[name](inputs), name, inputs, compiled, options.repetitions, copy)
    write_results(options.output or results_folder(device), "kernel_speed", rows, about, NOTES)
    print_table(rows)


def measure(case: Case, name: str, inputs: Inputs, compiled: bool, repetitions: int, copy: float) -> list[Row]:
    check(case, name)
    implementations = {"ours": case.ours, "published": case.published}
    if compiled:
        implementations["compiled"] = Implementation(compile_reference(case), case.ours.inputs)
    rows: list[Row] = []
    for implementation, (call, wrt) in implementations.items():
        moved = dict(zip(("forward", "backward", "both"), (*case.num_bytes, sum(case.num_bytes)), strict=True))
        for phase, run in phases(call, wrt).items():
            timing = time_calls(run, inputs.device, warmup=3, repetitions=repetitions)
            rate = moved[phase] / timing.median_ms / 1e6
            row = {"op": name, "batch": inputs.batch, "mask_ratio": inputs.config.mask_ratio, "phase": phase}
            row |= {"implementation": implementation, "ms": timing.median_ms}
            row |= {"ms_lower": timing.lower_ms, "ms_upper": timing.upper_ms, "gb_per_second": rate}
            row |= {"fraction_of_copy": rate / copy, "extra_mib": extra_mib(run, inputs.device)}
            rows.append(row)
    for row in rows:
        ours = next(r for r in rows if r["implementation"] == "ours" and r["phase"] == row["phase"])
        row["speed_up_of_ours"] = row["ms"] / ours["ms"]
    return rows


def check(case: Case, name: str) -> None:
    """Require the published way's values, and its gradients if both have the same ones."""
    got, expected = case.as_published(case.ours.call()), case.published.call()
    require(f"{name} has the published shape", got.shape == expected.shape, f"{got.shape}, {expected.shape}")
    off = (got.float() - expected.float()).abs().max().item()
    agrees = torch.allclose(got.float(), expected.float(), rtol=case.tolerance, atol=case.tolerance)
    require(f"{name} gives what the published way gives", agrees, f"differs by up to {off:.3g}")
    if not case.same_gradients:
        return
    gradient = torch.randn_like(expected)
    ours = torch.autograd.grad(got, case.ours.inputs, gradient.to(got.dtype))
    theirs = torch.autograd.grad(expected, case.published.inputs, gradient)
    for mine, other in zip(ours, theirs, strict=True):
        scale = other.float().abs().max().item()
        off = (mine.float() - other.float()).abs().max().item()
        require(f"{name} has the published way's gradients", off <= 2e-2 * scale, f"off by {off} of {scale}")


def compile_reference(case: Case) -> Callable[[], Tensor]:
    reference = torch.compile(case.reference, fullgraph=True, dynamic=False)

    def call() -> Tensor:
        result = reference()
        return result if isinstance(result, Tensor) else result[-1]

    return call


def phases(call: Callable[[], Tensor], inputs: list[Tensor]) -> dict[str, Callable[[], object]]:
    if not inputs:
        return {"forward": call}
    out = call()
    gradient = torch.ones_like(out)
    return {
        "forward": call,
        "backward": lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True),
        "both": lambda: torch.autograd.grad(call(), inputs, gradient),
    }


def extra_mib(call: Callable[[], object], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def copy_gb_per_second(device: torch.device) -> float:
    """Measure a copy on the device; reading and writing both count."""
    source = torch.zeros(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_calls(lambda: target.copy_(source), device, warmup=3, repetitions=20)
    return 2 * source.nbytes / timing.median_ms / 1e6


if __name__ == "__main__":
    run_command(main)
