"""Measure the token path's ops, forward, backward and both, beside the published code's way.

    python benchmarks/kernel_speed.py [--batch-size N ...] [--mask-ratio R ...] [--op NAME ...] [--output FOLDER]

On a GPU or a CPU. The values and gradients of every op are first compared with the published way's
(benchmarks/peers/token_path.py); if they differ, nothing is reported of this op. GB/s counts the bytes that an op must
move once, relative to the bandwidth of a large copy on the same machine, counted in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import benchmarks.peers.token_path as published
from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import Report, Row, copy_gb_per_second, measure_cases, noise_clip, require, time_calls
from common.devices import choose_device
from common.errors import run_command
from kernels.clip_tables import color_matrix, frame_bytes
from kernels.crop_resize import DecodedClips, crop_resize
from kernels.gumbel_topk import gumbel_topk
from model.config import ModelConfig

NOTES = [
    "`published`: eager PyTorch with boolean masks (benchmarks/peers/token_path.py). Its sampler is timed up to the"
    " mask, its sampling loss with one Categorical per clip; its patch loss starts from an existing float clip.",
    "`kernel`: kernels/ of this repository; on a CPU that is the reference in plain PyTorch.",
    "crop_resize takes the middle of 8-bit frames of 448 x 256; its `published` is torch's interpolate of every plane.",
    "`ms`: of a call as in an eager step, the host's time included where it is longer. `kernel_ms`: of a replay of the"
    " CUDA graph of a call, without the host; GB/s is of this where there is one. `is_large`: it moves 100 MB or more,"
    " and so fills a GPU.",
    "`backward` runs on a retained graph; patchify and crop_resize have none. `speed_up`: of the kernel over this row.",
]
LARGE_BYTES = 100e6


class Implementation(NamedTuple):
    call: Callable[[], Tensor]
    inputs: list[Tensor]  # that get gradients


class Case(NamedTuple):
    kernel: Implementation
    published: Implementation
    num_bytes: tuple[int, int]  # that forward and backward must move
    tolerance: float
    same_gradients: bool = True
    as_published: Callable[[Tensor], Tensor] = lambda value: value  # the kernel's value as the published way's quantity


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


def make_case(
    op: str, arguments: tuple[Any, ...], wrt: list[Tensor], published_way: Implementation, num_bytes: tuple[int, int],
    tolerance: float, **options: Any,
) -> Case:  # fmt: skip
    """Make the case of kernels/<op>.py from the arguments of the op, and the bytes forward and backward must move."""
    kernel = Implementation(last_output(partial(getattr(import_module(f"kernels.{op}"), op), *arguments)), wrt)
    return Case(kernel, published_way, num_bytes, tolerance, **options)


def last_output(call: Callable[[], Any]) -> Callable[[], Tensor]:
    def call_once() -> Tensor:
        result = call()
        return result if isinstance(result, Tensor) else result[-1]

    return call_once


def crop_resize_case(inputs: Inputs) -> Case:
    batch, size, device = inputs.batch, inputs.config.frame_size, inputs.device
    stored, box = (256, 448), (96, 0, 256, 256)
    shape = batch, inputs.config.num_frames, frame_bytes(*stored, 1)
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    matrix = torch.from_numpy(color_matrix("smpte170m", False, 8)).to(device)
    clips = DecodedClips(
        frames.flatten(),
        torch.arange(0, frames.numel(), shape[2], device=device).view(shape[:2]),
        torch.tensor([[*stored, 1]], dtype=torch.int32, device=device).repeat(batch, 1),
        torch.tensor([box], dtype=torch.int32, device=device).repeat(batch, 1),
        torch.zeros(batch, dtype=torch.bool, device=device),
        matrix.repeat(batch, 1, 1),
        torch.full((batch, 2), 0.5, device=device),
    )
    kernel = Implementation(partial(crop_resize, clips, *size), [])
    published_way = Implementation(partial(published.crop_resize, frames, stored, box, matrix, *size), [])
    moved = batch * shape[1] * (box[2] * box[3] * 3 // 2 + 3 * size[0] * size[1])  # samples of the box in, RGB out
    return Case(kernel, published_way, (moved, 0), 1, same_gradients=False)  # a gray level: both are rounded


def sample_case(inputs: Inputs) -> Case:
    tokens, k = inputs.config.num_tokens, inputs.config.num_visible
    logits = torch.randn(inputs.batch, tokens, device=inputs.device, requires_grad=True)
    seed, offset = (torch.tensor(value, device=inputs.device) for value in (1, 2))
    published_way = Implementation(lambda: published.sample_mask(logits, k)[1], [logits])
    moved = inputs.batch * tokens * (4 + 8 + 4), inputs.batch * tokens * 12  # logits; ids and log-probabilities
    # The kernel's gradients are those of log-probabilities.
    options = {"same_gradients": False, "as_published": torch.exp}
    return make_case("gumbel_topk", (logits, k, seed, offset), [logits], published_way, moved, 1e-5, **options)


def gather_case(inputs: Inputs) -> Case:
    tokens, width = inputs.config.num_tokens, inputs.config.dimensions.encoder_width
    visible, _, mask = inputs.mask
    x, table = inputs.random(inputs.batch, tokens, width), torch.randn(tokens, width, device=inputs.device)
    published_way = Implementation(partial(published.gather, x, mask, table), [x])
    row = inputs.batch * width * inputs.dtype.itemsize  # the table stays in the cache, here and below
    moved = 2 * row * visible.shape[1], row * (tokens + visible.shape[1])
    return make_case("gather_tokens", (x, visible, table), [x], published_way, moved, 3e-2)


def scatter_case(inputs: Inputs) -> Case:
    tokens, width = inputs.config.num_tokens, inputs.config.dimensions.decoder_width
    visible, masked, mask = inputs.mask
    features = inputs.random(inputs.batch, visible.shape[1], width)
    table = torch.randn(tokens, width, device=inputs.device)
    mask_token = torch.randn(width, device=inputs.device, requires_grad=True)
    wrt = [features, mask_token]
    published_way = Implementation(partial(published.scatter, features, mask_token, table, mask), wrt)
    row = inputs.batch * width * inputs.dtype.itemsize
    moved = row * (visible.shape[1] + tokens), row * masked.shape[1]
    return make_case("scatter_tokens", (*wrt, table, visible, masked), wrt, published_way, moved, 3e-2)


def patchify_case(inputs: Inputs) -> Case:
    config, dtype = inputs.config, inputs.dtype
    clip, patch = noise_clip(config, inputs.batch, inputs.device), (config.tubelet_size, config.patch_size)
    published_way = Implementation(partial(published.patches, clip, *patch, dtype), [])
    moved = clip.numel() * (1 + dtype.itemsize), 0
    return make_case("patchify", (clip, None, *patch, dtype), [], published_way, moved, 2e-2, same_gradients=False)


def patch_loss_case(inputs: Inputs) -> Case:
    config, (_, masked, mask) = inputs.config, inputs.mask
    clip, patch = noise_clip(config, inputs.batch, inputs.device), (config.tubelet_size, config.patch_size)
    pred, pixels = inputs.random(*masked.shape, config.patch_values), published.normalized_clip(clip)
    published_way = Implementation(partial(published.patch_loss, pred, pixels, mask, *patch), [pred])
    moved = pred.nbytes + pred.numel(), 2 * pred.nbytes + pred.numel()  # predictions and pixels in; those and gradients
    return make_case("masked_patch_loss", (pred, clip, masked, *patch, "mse", True), [pred], published_way, moved, 1e-2)


def sampling_loss_case(inputs: Inputs) -> Case:
    tokens, (_, masked, mask) = inputs.config.num_tokens, inputs.mask
    log_probs = torch.randn(inputs.batch, tokens, device=inputs.device).log_softmax(dim=1)
    losses = torch.rand(masked.shape, device=inputs.device)
    probabilities = log_probs.exp().requires_grad_()
    log_probs.requires_grad_()
    published_way = Implementation(partial(published.sampling_loss, probabilities, mask, losses), [probabilities])
    moved = masked.numel() * 16 + inputs.batch * tokens * 4, inputs.batch * tokens * 8
    arguments = (log_probs, masked, losses)  # of whose logarithm the gradients are
    return make_case("sampling_loss", arguments, [log_probs], published_way, moved, 1e-4, same_gradients=False)


CASES: dict[str, Callable[[Inputs], Case]] = {
    "crop_resize": crop_resize_case,
    "gumbel_topk": sample_case,
    "gather_tokens": gather_case,
    "scatter_tokens": scatter_case,
    "patchify": patchify_case,
    "masked_patch_loss": patch_loss_case,
    "sampling_loss": sampling_loss_case,
}


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "--batch-size", type=at_least(1), nargs="+", help="default: 32 to 256 on a GPU, 2 and 8 on a CPU"
    )
    parser.add_argument("--mask-ratio", type=float, nargs="+", help="default: .80 to .98 on a GPU, .95 on a CPU")
    parser.add_argument("--op", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--repetitions", type=at_least(1), default=20)
    options = parser.parse_args(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    batches = options.batch_size or ([32, 64, 128, 256] if on_gpu else [2, 8])
    ratios = options.mask_ratio or ([0.8, 0.9, 0.95, 0.98] if on_gpu else [0.95])
    copy = copy_gb_per_second(device)
    report = Report("kernel_speed", options.output, device, NOTES, copy_gb_per_second=copy, model="base, N = 1568")

    def measure_case(case: tuple[int, float, str]) -> list[Row]:
        batch, ratio, op = case
        inputs = Inputs(ModelConfig(mask_ratio=ratio), batch, device, torch.bfloat16 if on_gpu else torch.float32)
        return list(measure(CASES[op](inputs), op, inputs, options.repetitions, copy))

    # Backward passes run on the streams of their forward passes, and graphs are captured on any but the default one.
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_gpu else nullcontext():
        cases = list(product(sorted(batches, reverse=True), ratios, options.op))
        measure_cases(cases, measure_case, report.write, unit="op")


def measure(case: Case, name: str, inputs: Inputs, repetitions: int, copy: float) -> Iterator[Row]:
    """Yield the rows of an op, the kernel's first."""
    check(case, name)
    moved = dict(zip(("forward", "backward", "both"), (*case.num_bytes, sum(case.num_bytes)), strict=True))
    kernel_medians: dict[str, float] = {}
    for implementation, (call, wrt) in (("kernel", case.kernel), ("published", case.published)):
        for phase, run in phases(call, wrt).items():
            lower, median, upper = time_calls(run, inputs.device, warmup=3, repetitions=repetitions).quartiles
            kernel_ms = None
            if inputs.device.type == "cuda" and implementation == "kernel":  # boolean masks would wait for the GPU
                kernel_ms = replay_ms(run, inputs.device, repetitions)
            rate = moved[phase] / (kernel_ms or median) / 1e6
            row = {"op": name, "batch": inputs.batch, "mask_ratio": inputs.config.mask_ratio, "phase": phase}
            row |= {"implementation": implementation, "ms": median, "ms_lower": lower, "ms_upper": upper}
            row |= {"kernel_ms": kernel_ms, "is_large": moved[phase] >= LARGE_BYTES}
            row |= {"gb_per_second": rate, "fraction_of_copy": rate / copy}
            yield {**row, "speed_up": median / kernel_medians.setdefault(phase, median)}


def replay_ms(run: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Time replays of the CUDA graph of a call, which has been made before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        run()
    return time_calls(graph.replay, device, warmup=3, repetitions=repetitions).median_ms


def check(case: Case, name: str) -> None:
    """Require the published way's values, and its gradients if both have the same ones."""
    got, expected = case.as_published(case.kernel.call()), case.published.call()
    require(f"{name} has the published shape", got.shape == expected.shape, f"{got.shape}, {expected.shape}")
    off = (got.float() - expected.float()).abs().max().item()
    rtol = case.tolerance if got.is_floating_point() else 0
    agrees = torch.allclose(got.float(), expected.float(), rtol=rtol, atol=case.tolerance)
    require(f"{name} gives what the published way gives", agrees, f"differs by up to {off:.3g}")
    if not case.same_gradients:
        return
    gradient = torch.randn_like(expected)
    found = torch.autograd.grad(got, case.kernel.inputs, gradient.to(got.dtype))
    wanted = torch.autograd.grad(expected, case.published.inputs, gradient)
    for gradient, other in zip(found, wanted, strict=True):
        scale = other.float().abs().max().item()
        off = (gradient.float() - other.float()).abs().max().item()
        require(f"{name} has the published way's gradients", off <= 2e-2 * scale, f"off by {off} of {scale}")


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


if __name__ == "__main__":
    run_command(main)
