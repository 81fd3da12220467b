"""Measure the token path's ops, forward, backward and both, beside the published code's way.

    python benchmarks/kernel_speed.py [--batch-size N ...] [--op NAME ...] [--output FOLDER]

On a GPU or a CPU. The values and gradients of every op are first compared with the published way's
(benchmarks/peers/token_path.py); if they differ, nothing is reported of this op. GB/s counts the
bytes that an op must move once, relative to the bandwidth of a large copy on the same machine,
counted in the same way.
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
    "`published`: eager PyTorch with boolean masks (benchmarks/peers/token_path.py). Its sampler is"
    " timed up to the mask; its patch loss starts from an existing float clip.",
    "`kernel`: kernels/ of this repository; on a CPU that is the reference in plain PyTorch.",
    "crop_resize takes the middle of 8-bit frames of 448 x 256; its `published` is torch's"
    " interpolate of every plane.",
    "`ms`: of a call as in an eager step, the host's time included where it is longer. `kernel_ms`:"
    " of a replay of the CUDA graph of a call, without the host; GB/s is of this where there is"
    " one. `is_large`: it moves 100 MB or more, and so fills a GPU.",
    "`backward` runs on a retained graph; patchify and crop_resize have none. `speed_up`: of the"
    " kernel over this row.",
]
# A call that moves less is bound by its launch, not by memory: the sampler's kernels move 2 MB.
LARGE_BYTES = 100e6

# Batch size, mask ratio and the name of an op.
Case = tuple[int, float, str]


class Way:
    """A function and its arguments; those that require gradients get them."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments
        self.inputs = []
        for value in arguments:
            if isinstance(value, Tensor) and value.requires_grad:
                self.inputs.append(value)

    def __call__(self) -> Tensor:
        """Return the last output: of several, it is the one that has gradients."""
        result = self.function(*self.arguments)
        return result if isinstance(result, Tensor) else result[-1]

    def phases(self) -> dict[str, Callable[[], object]]:
        """Return what is timed, by the name of the phase."""
        if not self.inputs:
            return {"forward": self}
        # One retained graph serves all backward passes, so that no forward pass is timed with them.
        # What a step pays is "both".
        out = self()
        gradient = torch.ones_like(out)
        return {
            "forward": self,
            "backward": lambda: torch.autograd.grad(out, self.inputs, gradient, retain_graph=True),
            "both": lambda: torch.autograd.grad(self(), self.inputs, gradient),
        }


class Op(NamedTuple):
    """An op in both ways, and the bytes that it must move."""

    kernel: Way
    published: Way
    forward_bytes: int
    backward_bytes: int
    tolerance: float
    # Turns the kernel's value into the published way's quantity.
    as_published: Callable[[Tensor], Tensor] = lambda value: value


class Inputs:
    """The tensors that the ops take in a model of a given size, made when first needed."""

    def __init__(
        self, config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.batch = batch
        self.device = device
        self.dtype = dtype
        self.patch = (config.tubelet_size, config.patch_size)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return random numbers that require gradients."""
        dtype = dtype or self.dtype
        return torch.randn(*shape, device=self.device, dtype=dtype, requires_grad=True)

    @cached_property
    def logits(self) -> Tensor:
        return self.random(self.batch, self.config.num_tokens, dtype=torch.float32)

    @cached_property
    def ids(self) -> list[Tensor]:
        """Visible and masked ids."""
        return list(gumbel_topk(self.logits.detach(), self.config.num_visible, 1, 2)[:2])

    @cached_property
    def mask(self) -> Tensor:
        """Bool mask [B, N] with True = masked."""
        return torch.ones_like(self.logits, dtype=torch.bool).scatter_(1, self.ids[0], False)

    @cached_property
    def clip(self) -> Tensor:
        return noise_clip(self.config, self.batch, self.device)


def crop_resize_op(inputs: Inputs) -> Op:
    batch = inputs.batch
    device = inputs.device
    height, width = inputs.config.frame_size
    # The height and width of the stored frames, and a box as left, top, width, height.
    stored = (256, 448)
    box = (96, 0, 256, 256)
    num_frames = inputs.config.num_frames
    shape = (batch, num_frames, frame_bytes(*stored, 1))
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    matrix = torch.from_numpy(color_matrix("smpte170m", False, 8)).to(device)
    offsets = torch.arange(0, frames.numel(), shape[2], device=device)
    clips = DecodedClips(
        frames.flatten(),
        offsets.view(batch, num_frames),
        torch.tensor([[*stored, 1]] * batch, dtype=torch.int32, device=device),
        torch.tensor([box] * batch, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.bool, device=device),
        matrix.repeat(batch, 1, 1),
        torch.full((batch, 2), 0.5, device=device),
    )
    # Chroma is half as high and wide as luma: a pixel of the box has 1.5 bytes.
    read_bytes = box[2] * box[3] * 3 // 2
    written_bytes = 3 * height * width
    return Op(
        # As the loader calls it for a batch of 8 bits.
        Way(crop_resize, clips, height, width, False),
        Way(published.crop_resize, frames, stored, box, matrix, height, width),
        forward_bytes=batch * num_frames * (read_bytes + written_bytes),
        backward_bytes=0,
        # One gray level, since both ways round to whole ones.
        tolerance=1,
    )


def gumbel_topk_op(inputs: Inputs) -> Op:
    logits = inputs.logits
    num_visible = inputs.config.num_visible
    seed = torch.tensor(1, device=inputs.device)
    offset = torch.tensor(2, device=inputs.device)
    return Op(
        Way(gumbel_topk, logits, num_visible, seed, offset),
        Way(published.sample_mask, logits, num_visible),
        # A logit, a log-probability and an id of 64 bits; backward, a log-probability and the
        # gradients of both.
        forward_bytes=logits.numel() * 16,
        backward_bytes=logits.numel() * 12,
        tolerance=1e-5,
        as_published=torch.exp,
    )


def gather_tokens_op(inputs: Inputs) -> Op:
    """Make the encoder's input. The table stays in the cache, so its bytes do not count."""
    num_tokens = inputs.config.num_tokens
    width = inputs.config.dimensions.encoder_width
    x = inputs.random(inputs.batch, num_tokens, width)
    table = torch.randn(num_tokens, width, device=inputs.device)
    gathered = inputs.ids[0].numel() * width * x.itemsize
    return Op(
        Way(gather_tokens, x, inputs.ids[0], table),
        Way(published.gather, x, inputs.mask, table),
        forward_bytes=2 * gathered,
        # Masked tokens get zeros, which are written too.
        backward_bytes=x.nbytes + gathered,
        # The published way rounds the table to bf16, by up to 0.4 %, and then the sum once more.
        # The kernel adds in fp32 and rounds once.
        tolerance=3e-2,
    )


def scatter_tokens_op(inputs: Inputs) -> Op:
    """Make the decoder's input. The table stays in the cache, so its bytes do not count."""
    num_tokens = inputs.config.num_tokens
    width = inputs.config.dimensions.decoder_width
    features = inputs.random(*inputs.ids[0].shape, width)
    mask_token = inputs.random(width, dtype=torch.float32)
    table = torch.randn(num_tokens, width, device=inputs.device)
    total = inputs.mask.numel() * width * features.itemsize
    return Op(
        Way(scatter_tokens, features, mask_token, table, *inputs.ids),
        Way(published.scatter, features, mask_token, table, inputs.mask),
        forward_bytes=total + features.nbytes,
        # The gradient of the features is a view of the output's. The mask token's is the sum of the
        # rest, which is read.
        backward_bytes=total - features.nbytes,
        # For the reason in gather_tokens_op.
        tolerance=3e-2,
    )


def patchify_op(inputs: Inputs) -> Op:
    clip = inputs.clip
    dtype = inputs.dtype
    return Op(
        Way(patchify, clip, None, *inputs.patch, dtype),
        Way(published.patches, clip, *inputs.patch, dtype),
        # A byte is read and a normalized value is written for every pixel and channel.
        forward_bytes=clip.numel() * (1 + dtype.itemsize),
        backward_bytes=0,
        tolerance=2e-2,
    )


def masked_patch_loss_op(inputs: Inputs) -> Op:
    masked_ids = inputs.ids[1]
    clip = inputs.clip
    pixels = published.normalized_clip(clip)
    pred = inputs.random(*masked_ids.shape, inputs.config.patch_values)
    # Predictions, and a byte of the clip for each.
    read_bytes = pred.nbytes + pred.numel()
    return Op(
        Way(masked_patch_loss, pred, clip, masked_ids, *inputs.patch, "mse", True),
        Way(published.patch_loss, pred, pixels, inputs.mask, *inputs.patch),
        forward_bytes=read_bytes,
        backward_bytes=read_bytes + pred.nbytes,
        tolerance=1e-2,
    )


OPS: dict[str, Callable[[Inputs], Op]] = {
    "crop_resize": crop_resize_op,
    "gumbel_topk": gumbel_topk_op,
    "gather_tokens": gather_tokens_op,
    "scatter_tokens": scatter_tokens_op,
    "patchify": patchify_op,
    "masked_patch_loss": masked_patch_loss_op,
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

    # The activations of training are bf16 on a GPU. A CPU is not asked for bf16: PyTorch's products
    # of it are 7 to 250 times as slow where it has no units for them.
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def measure_case(case: Case) -> list[Row]:
        batch, ratio, name = case
        inputs = Inputs(ModelConfig(mask_ratio=ratio), batch, device, dtype)
        about = {"op": name, "batch": batch, "mask_ratio": ratio}
        rows = measure(OPS[name](inputs), name, device, options.repetitions, copy)
        return [about | row for row in rows]

    def make_rows(results: dict[Case, list[list[Row]]]) -> list[Row]:
        rows = []
        for (rows_of_case,) in results.values():
            rows += rows_of_case
        return rows

    # The large batch tells more, because its ops fill a GPU. It comes first: rows are written one
    # by one, so a run that is cut off has them.
    batches = options.batch_size or ([256, 64] if on_gpu else [8, 2])
    # 0.95 is the paper's ratio. At 0.8, four times as many tokens are gathered.
    ratios = [0.8, 0.95] if on_gpu else [0.95]
    cases = list(product(batches, ratios, options.op))
    # Backward passes run on the streams of their forward passes, and a graph is captured on any
    # stream but the default one.
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_gpu else nullcontext():
        measure_cases(report, cases, measure_case, make_rows)


def measure(
    op: Op, name: str, device: torch.device, repetitions: int, copy: float
) -> Iterator[Row]:
    """Check an op, and yield its rows, the kernel's first. copy: GB/s of a large copy."""
    check(op, name)
    phase_bytes = {
        "forward": op.forward_bytes,
        "backward": op.backward_bytes,
        "both": op.forward_bytes + op.backward_bytes,
    }
    kernel_medians: dict[str, float] = {}
    for implementation, way in (("kernel", op.kernel), ("published", op.published)):
        for phase, run in way.phases().items():
            milliseconds = time_calls(run, device, warmup=3, repetitions=repetitions)
            # Quartiles, since a few calls that wait for another program would stretch a mean and a
            # standard deviation.
            lower, middle, upper = np.quantile(milliseconds, (0.25, 0.5, 0.75)).tolist()
            # Only of the kernel: a boolean mask makes the host wait for a size, which no graph can.
            kernel_ms = None
            if device.type == "cuda" and implementation == "kernel":
                kernel_ms = replay_ms(run, device, repetitions)
            rate = phase_bytes[phase] / (kernel_ms or middle) / 1e6
            # The kernel's come first, and stay: the published way is compared with them.
            kernel_medians.setdefault(phase, middle)
            yield {
                "phase": phase,
                "implementation": implementation,
                "ms": middle,
                "ms_lower": lower,
                "ms_upper": upper,
                "kernel_ms": kernel_ms,
                "is_large": phase_bytes[phase] >= LARGE_BYTES,
                "gb_per_second": rate,
                "fraction_of_copy": rate / copy,
                "speed_up": middle / kernel_medians[phase],
            }


def replay_ms(run: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Return the median milliseconds of replays of the CUDA graph of a call.

    The call must have been made before. A graph is launched as a whole, so the host's time for
    Python, autograd and each launch is left out: 0.07 instead of 0.13 ms of gather_tokens on an
    H200.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        run()
    return median(time_calls(graph.replay, device, warmup=3, repetitions=repetitions))


def check(op: Op, name: str) -> None:
    """Require the published way's values and, where there are gradients, those too."""
    value = op.as_published(op.kernel())
    expected = op.published()
    require_close(f"{name} gives what the published way gives", value, expected, op.tolerance)
    inputs = op.kernel.inputs
    if not inputs:
        return
    # Random numbers: with ones, errors of opposite signs would cancel in sums, such as the mask
    # token's gradient.
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(value, inputs, upstream.to(value.dtype))
    expected_gradients = torch.autograd.grad(expected, inputs, upstream)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        # Relative to the largest: small gradients are sums of bf16 values that nearly cancel.
        scale = expected_gradient.abs().max()
        claim = f"{name} has the published way's gradients"
        require_close(claim, gradient / scale, expected_gradient / scale, 1e-2)


def require_close(claim: str, value: Tensor, expected: Tensor, tolerance: float) -> None:
    """Require equal values within an absolute tolerance, which for floats is relative too."""
    require(claim, value.shape == expected.shape, f"{value.shape} instead of {expected.shape}")
    difference = (value.float() - expected.float()).abs()
    allowed = torch.full_like(difference, tolerance)
    if value.is_floating_point():
        allowed *= 1 + expected.float().abs()
    is_close = bool((difference <= allowed).all())
    require(claim, is_close, f"differs by up to {difference.max().item():.3g}")


if __name__ == "__main__":
    run_command(main)
