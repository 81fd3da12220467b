"""Measure the token path's ops, forward, backward and both, beside the published code's way.

    python benchmarks/kernel_speed.py [--batch-size N ...] [--op NAME ...] [--output FOLDER]

On a GPU or a CPU. The values and gradients of every op are first compared with the published way's
(benchmarks/peers/token_path.py); if they differ, nothing is reported of this op. GB/s counts the bytes that an op must
move once, relative to the bandwidth of a large copy on the same machine, counted in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import adamae.benchmarks.peers.token_path as published
from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import Report, Row, copy_gb_per_second, measure_cases, require
from adamae.common.arguments import between
from adamae.common.devices import choose_device
from adamae.common.errors import run_command
from adamae.kernels.clip_tables import color_matrix, frame_bytes
from adamae.kernels.crop_resize import DecodedClips, crop_resize
from adamae.kernels.gather_tokens import gather_tokens
from adamae.kernels.gumbel_topk import gumbel_topk
from adamae.kernels.masked_patch_loss import masked_patch_loss
from adamae.kernels.patchify import patchify
from adamae.kernels.scatter_tokens import scatter_tokens
from adamae.model.config import ModelConfig
from adamae.training.timing import noise_clip, time_calls

NOTES = [
    "`published`: eager PyTorch with boolean masks (benchmarks/peers/token_path.py). Its sampler is timed up to the"
    " mask; its patch loss starts from an existing float clip.",
    "`kernel`: kernels/ of this repository; on a CPU that is the reference in plain PyTorch.",
    "crop_resize takes the middle of 8-bit frames of 448 x 256; its `published` is torch's interpolate of every plane.",
    "`ms`: of a call as in an eager step, the host's time included where it is longer. `kernel_ms`: of a replay of the"
    " CUDA graph of a call, without the host; GB/s is of this where there is one. `is_large`: it moves 100 MB or more,"
    " and so fills a GPU.",
    "`backward` runs on a retained graph; patchify and crop_resize have none. `speed_up`: of the kernel over this row.",
]
LARGE_BYTES = 100e6


class Way:
    """A function and its arguments; those that require gradients get them."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments
        self.inputs = [
            value for value in arguments if isinstance(value, Tensor) and value.requires_grad
        ]

    def __call__(self) -> Tensor:
        """Return the last output."""
        result = self.function(*self.arguments)
        return result if isinstance(result, Tensor) else result[-1]

    def phases(self) -> dict[str, Callable[[], object]]:
        if not self.inputs:
            return {"forward": self}
        out = self()
        gradient = torch.ones_like(out)
        return {
            "forward": self,
            "backward": lambda: torch.autograd.grad(out, self.inputs, gradient, retain_graph=True),
            "both": lambda: torch.autograd.grad(self(), self.inputs, gradient),
        }


class Op(NamedTuple):
    kernel: Way
    published: Way
    forward_bytes: int  # that it must move
    backward_bytes: int
    tolerance: float
    as_published: Callable[[Tensor], Tensor] = lambda value: (
        value
    )  # the kernel's value as the published way's quantity


class Inputs:
    """What ops of a model's size take, made when it is asked for, and shared."""

    def __init__(
        self, config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.batch, self.device, self.dtype = config, batch, device, dtype
        self.patch = config.tubelet_size, config.patch_size

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(
            *shape, device=self.device, dtype=dtype or self.dtype, requires_grad=True
        )

    @cached_property
    def logits(self) -> Tensor:
        return self.random(self.batch, self.config.num_tokens, dtype=torch.float32)

    @cached_property
    def ids(self) -> list[Tensor]:
        """visible_ids, masked_ids."""
        return list(gumbel_topk(self.logits.detach(), self.config.num_visible, 1, 2)[:2])

    @cached_property
    def mask(self) -> Tensor:
        """Bool mask [B, N] with True = masked."""
        return torch.ones_like(self.logits, dtype=torch.bool).scatter_(1, self.ids[0], False)

    @cached_property
    def clip(self) -> Tensor:
        return noise_clip(self.config, self.batch, self.device)


def crop_resize_op(inputs: Inputs) -> Op:
    batch, size, device = inputs.batch, inputs.config.frame_size, inputs.device
    stored, box = (256, 448), (96, 0, 256, 256)
    shape = batch, inputs.config.num_frames, frame_bytes(*stored, 1)
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    matrix = torch.from_numpy(color_matrix("smpte170m", False, 8)).to(device)
    clips = DecodedClips(
        frames.flatten(),
        torch.arange(0, frames.numel(), shape[2], device=device).view(shape[:2]),
        torch.tensor([[*stored, 1]] * batch, dtype=torch.int32, device=device),
        torch.tensor([box] * batch, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.bool, device=device),
        matrix.repeat(batch, 1, 1),
        torch.full((batch, 2), 0.5, device=device),
    )
    moved = batch * shape[1] * (box[2] * box[3] * 3 // 2 + 3 * size[0] * size[1])
    # A gray level of tolerance: both are rounded.
    return Op(
        Way(crop_resize, clips, *size),
        Way(published.crop_resize, frames, stored, box, matrix, *size),
        moved,
        0,
        1,
    )


def gumbel_topk_op(inputs: Inputs) -> Op:
    logits, k = inputs.logits, inputs.config.num_visible
    seed, offset = (torch.tensor(value, device=inputs.device) for value in (1, 2))
    kernel, way = Way(gumbel_topk, logits, k, seed, offset), Way(published.sample_mask, logits, k)
    return Op(kernel, way, logits.numel() * 16, logits.numel() * 12, 1e-5, torch.exp)


def gather_tokens_op(inputs: Inputs) -> Op:
    """Without the table's bytes, which stay in the cache."""
    tokens, width = inputs.config.num_tokens, inputs.config.dimensions.encoder_width
    x, table = (
        inputs.random(inputs.batch, tokens, width),
        torch.randn(tokens, width, device=inputs.device),
    )
    kernel, way = (
        Way(gather_tokens, x, inputs.ids[0], table),
        Way(published.gather, x, inputs.mask, table),
    )
    gathered = inputs.ids[0].numel() * width * x.itemsize
    return Op(kernel, way, 2 * gathered, x.nbytes + gathered, 3e-2)


def scatter_tokens_op(inputs: Inputs) -> Op:
    """Likewise."""
    tokens, width = inputs.config.num_tokens, inputs.config.dimensions.decoder_width
    features, mask_token = (
        inputs.random(*inputs.ids[0].shape, width),
        inputs.random(width, dtype=torch.float32),
    )
    arguments = features, mask_token, torch.randn(tokens, width, device=inputs.device)
    kernel, way = (
        Way(scatter_tokens, *arguments, *inputs.ids),
        Way(published.scatter, *arguments, inputs.mask),
    )
    total = inputs.mask.numel() * width * features.itemsize
    return Op(kernel, way, total + features.nbytes, total - features.nbytes, 3e-2)


def patchify_op(inputs: Inputs) -> Op:
    clip, patch, dtype = inputs.clip, inputs.patch, inputs.dtype
    kernel, way = (
        Way(patchify, clip, None, *patch, dtype),
        Way(published.patches, clip, *patch, dtype),
    )
    return Op(kernel, way, clip.numel() * (1 + dtype.itemsize), 0, 2e-2)


def masked_patch_loss_op(inputs: Inputs) -> Op:
    masked, clip, patch = inputs.ids[1], inputs.clip, inputs.patch
    pred, pixels = (
        inputs.random(*masked.shape, inputs.config.patch_values),
        published.normalized_clip(clip),
    )
    kernel = Way(masked_patch_loss, pred, clip, masked, *patch, "mse", True)
    way = Way(published.patch_loss, pred, pixels, inputs.mask, *patch)
    return Op(kernel, way, pred.nbytes + pred.numel(), 2 * pred.nbytes + pred.numel(), 1e-2)


MAKERS = (
    *(crop_resize_op, gumbel_topk_op, gather_tokens_op, scatter_tokens_op),
    *(patchify_op, masked_patch_loss_op),
)
OPS: dict[str, Callable[[Inputs], Op]] = {
    make.__name__.removesuffix("_op"): make for make in MAKERS
}


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "--batch-size",
        type=between(1),
        nargs="+",
        help="default: 64 and 256 on a GPU, else 2 and 8",
    )
    parser.add_argument("--op", choices=list(OPS), nargs="+", default=list(OPS))
    parser.add_argument("--repetitions", type=between(1), default=20)
    options = parser.parse_args(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    copy = copy_gb_per_second(device)
    report = Report(
        "kernel_speed",
        options.output,
        device,
        NOTES,
        copy_gb_per_second=copy,
        model="base, N = 1568",
    )

    def measure_case(case: tuple[int, float, str]) -> list[Row]:
        batch, ratio, name = case
        inputs = Inputs(
            ModelConfig(mask_ratio=ratio),
            batch,
            device,
            torch.bfloat16 if on_gpu else torch.float32,
        )
        about = {"op": name, "batch": batch, "mask_ratio": ratio}
        return [
            about | row
            for row in measure(OPS[name](inputs), name, device, options.repetitions, copy)
        ]

    def make_rows(found: dict[tuple[int, float, str], list[list[Row]]]) -> list[Row]:
        return [row for [rows] in found.values() for row in rows]

    batches = options.batch_size or ([256, 64] if on_gpu else [8, 2])
    cases = list(product(batches, [0.8, 0.95] if on_gpu else [0.95], options.op))
    # Backward passes run on the streams of their forward passes, and graphs are captured on any but the default one.
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_gpu else nullcontext():
        measure_cases(report, cases, measure_case, make_rows)


def measure(
    op: Op, name: str, device: torch.device, repetitions: int, copy: float
) -> Iterator[Row]:
    """Yield the rows of an op, the kernel's first."""
    check(op, name)
    moved = {
        "forward": op.forward_bytes,
        "backward": op.backward_bytes,
        "both": op.forward_bytes + op.backward_bytes,
    }
    kernel_medians: dict[str, float] = {}
    for implementation, way in (("kernel", op.kernel), ("published", op.published)):
        for phase, run in way.phases().items():
            lower, middle, upper = np.quantile(
                time_calls(run, device, 3, repetitions), (0.25, 0.5, 0.75)
            ).tolist()
            kernel_ms = None
            if (
                device.type == "cuda" and implementation == "kernel"
            ):  # boolean masks would wait for the GPU
                kernel_ms = replay_ms(run, device, repetitions)
            rate = moved[phase] / (kernel_ms or middle) / 1e6
            row: Row = {"phase": phase, "implementation": implementation}
            row |= {"ms": middle, "ms_lower": lower, "ms_upper": upper, "kernel_ms": kernel_ms}
            row |= {
                "is_large": moved[phase] >= LARGE_BYTES,
                "gb_per_second": rate,
                "fraction_of_copy": rate / copy,
            }
            yield {**row, "speed_up": middle / kernel_medians.setdefault(phase, middle)}


def replay_ms(run: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Time replays of the CUDA graph of a call, which has been made before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        run()
    return median(time_calls(graph.replay, device, 3, repetitions))


def check(op: Op, name: str) -> None:
    """Require the published way's values and, if the inputs are the same, its gradients."""
    value, expected = op.as_published(op.kernel()), op.published()
    require_close(f"{name} gives what the published way gives", value, expected, op.tolerance)
    inputs = op.kernel.inputs
    if inputs and inputs[0] is op.published.inputs[0]:
        gradient = torch.randn_like(expected)
        found, wanted = (
            torch.autograd.grad(out, inputs, gradient.to(out.dtype)) for out in (value, expected)
        )
        for one, other in zip(found, wanted, strict=True):
            scale = other.abs().max()
            require_close(
                f"{name} has the published way's gradients", one / scale, other / scale, 1e-2
            )


def require_close(claim: str, value: Tensor, expected: Tensor, tolerance: float) -> None:
    """tolerance: absolute, and for floats relative too."""
    require(claim, value.shape == expected.shape, f"{value.shape} instead of {expected.shape}")
    off = (value.float() - expected.float()).abs()
    allowed = tolerance * (1 + expected.float().abs() * value.is_floating_point())
    require(claim, bool((off <= allowed).all()), f"differs by up to {off.max().item():.3g}")


if __name__ == "__main__":
    run_command(main)
