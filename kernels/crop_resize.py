"""Clips from decoded planes: each clip's crop of planar YUV 4:2:0, scaled to RGB in one pass on the device.

Scaling is bilinear with antialiasing, as PIL's and torch's interpolate(antialias=True): a triangle filter of
max(1, scale) samples to each side, half-pixel centers, weights that sum to 1. Each plane is resampled by itself, at its
own scale and from where its samples lie; then come the matrix and the only rounding. Nothing outside the box counts:
of luma, its pixels; of chroma, the samples that color one of its pixels (at an odd edge, a sample shared with a pixel
outside). A crop thus depends on what it shows, and not on whether the frame ends there; FFmpeg does the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adamae.kernels.clip_tables import frame_bytes, lay_out_tables
from adamae.kernels.launch import check, runs_triton, triton_op, wrap_triton

ROWS, COLUMNS = (
    16,
    32,
)  # of a program's tile: a warp writes 32 neighbors, a thread's four rows share horizontal weights


class DecodedClips(NamedTuple):
    """What the loader hands over: B clips of T frames; all tensors on one device, contiguous, perhaps of one upload.

    Frames are upright, planar 4:2:0, of 8 bits, or of 9 to 16 in the low bits of two bytes, low byte first. A frame, or
    a part of one that begins with a whole chroma sample, is its planes Y, U, V, one after the other without padding,
    the latter two of (height + 1) // 2 rows of (width + 1) // 2 samples: `frame_bytes` in all. A frame that several
    clips show, or one shows twice, is there once.
    """

    planes: Tensor  # uint8 [bytes]: all distinct frames of the batch, in any order
    offsets: Tensor  # int64 [B, T]: the byte in `planes` at which each frame begins, at no multiple of anything
    sizes: Tensor  # int32 [B, 3]: height and width of the stored frames, bytes a sample (1 or 2)
    boxes: Tensor  # int32 [B, 4]: x, y, width, height of the crop in pixels of luma, inside the frame; odd ones too
    flips: Tensor  # bool [B]: whether the crop is mirrored left to right
    matrices: Tensor  # float32 [B, 3, 4]: color_matrix(…), which takes (Y, U, V, 1) as stored to RGB from 0 to 255
    siting: Tensor  # float32 [B, 2]: pixels right of and below the first luma sample at which the first of chroma lies:
    #   left (MPEG-2, H.264's default) 0, .5; center (MPEG-1, JPEG) .5, .5; top left (BT.2020) 0, 0; bottom left 0, 1


def check_clips(clips: DecodedClips) -> None:
    check(clips.offsets.ndim == 2, f"offsets have shape {tuple(clips.offsets.shape)}: give [B, T]")
    layout = [("uint8", (clips.planes.numel(),)), *lay_out_tables(*clips.offsets.shape)]
    for name, tensor, (type_name, shape) in zip(clips._fields, clips, layout, strict=True):
        dtype = getattr(torch, type_name)
        fits = tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()
        check(
            fits,
            f"{name} are {tensor.dtype} {tuple(tensor.shape)}: give {dtype} {shape}, contiguous",
        )
        check(
            tensor.device == clips.planes.device,
            f"{name} are on {tensor.device}, planes on {clips.planes.device}",
        )
    if clips.planes.device.type != "cpu":
        return
    # Every box must lie in its frame, and every frame in the planes.
    tables = zip(clips.offsets.tolist(), clips.sizes.tolist(), clips.boxes.tolist(), strict=True)
    for b, (offsets, (height, width, sample_bytes), (x, y, w, h)) in enumerate(tables):
        check(sample_bytes in (1, 2), f"samples of clip {b} have {sample_bytes} bytes: give 1 or 2")
        inside = min(x, y) >= 0 and min(w, h) > 0 and x + w <= width and y + h <= height
        check(
            inside,
            f"the box of clip {b}, {w}x{h} at {x}, {y}, does not lie in its frames of {width}x{height}",
        )
        end = len(clips.planes) - frame_bytes(height, width, sample_bytes)
        fit = all(0 <= start <= end for start in offsets)
        check(
            fit,
            f"frames of clip {b} do not lie at its offsets {offsets} in {len(clips.planes)} bytes of planes",
        )


def crop_resize(clips: DecodedClips, height: int, width: int) -> Tensor:
    """Return RGB, uint8 [B, T, height, width, 3]; see DecodedClips. On a GPU, nothing waits for it.

    What the tables contain is checked on a CPU only: on a GPU, frames that do not lie in `planes` read other memory.
    """
    check_clips(clips)
    check(height > 0 and width > 0, f"clips of {height} x {width} pixels have none")
    return (crop_resize_op if runs_triton(clips.planes) else crop_resize_ref)(*clips, height, width)


def crop_resize_ref(
    planes: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    boxes: Tensor,
    flips: Tensor,
    matrices: Tensor,
    siting: Tensor,
    height: int,
    width: int,
) -> Tensor:
    clips = []
    tables = (table.tolist() for table in (offsets, sizes, boxes, flips, siting))
    for starts, size, (x, y, w, h), flip, (right, below), matrix in zip(
        *tables, matrices, strict=True
    ):
        length = frame_bytes(*size)
        frames = torch.stack([planes[start : start + length] for start in starts])
        luma, *chroma = split_planes(frames, *size)
        positions = [
            (torch.arange(n, device=planes.device) + 0.5) * (s / n) + first - 0.5
            for n, s, first in ((height, h, y), (width, w, x))
        ]
        scales = h / height, w / width
        halves = (positions[0] - below) / 2, (positions[1] - right) / 2
        yuv = [resample_ref(luma, positions, scales, (y, x), (y + h, x + w))]
        for plane in chroma:
            half = scales[0] / 2, scales[1] / 2
            yuv.append(
                resample_ref(
                    plane, halves, half, (y // 2, x // 2), ((y + h + 1) // 2, (x + w + 1) // 2)
                )
            )
        rgb = torch.stack(yuv, dim=-1) @ matrix[:, :3].T + matrix[:, 3]
        clips.append(rgb.flip(2) if flip else rgb)
    return (torch.stack(clips).clamp(0, 255) + 0.5).to(torch.uint8)


def split_planes(frames: Tensor, height: int, width: int, sample_bytes: int) -> list[Tensor]:
    """Make fp32 planes Y, U, V [T, rows, columns] of the bytes of frames [T, frame_bytes]."""
    samples = (frames if sample_bytes == 1 else frames.view(torch.uint16)).float()
    shapes = [(height, width), *[((height + 1) // 2, (width + 1) // 2)] * 2]
    parts = samples.split([rows * columns for rows, columns in shapes], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def resample_ref(
    plane: Tensor,
    positions: Sequence[Tensor],
    scales: Sequence[float],
    first: Sequence[int],
    end: Sequence[int],
) -> Tensor:
    """Resample the samples from (row, column) `first` to `end` at rows x columns of positions: sample i lies at i."""
    rows, columns = map(triangle_weights, positions, scales, first, end)
    return rows @ plane[:, first[0] : end[0], first[1] : end[1]] @ columns.T


def triangle_weights(positions: Tensor, scale: float, first: int, end: int) -> Tensor:
    distances = (torch.arange(first, end, device=positions.device) - positions[:, None]).abs()
    weights = (1 - distances / max(1.0, scale)).clamp(min=0)
    return weights / weights.sum(dim=1, keepdim=True)


@triton.jit
def triangle(tap, position, slope, end):
    """Weights of samples number `tap`, one for each position; 0 from number `end` on."""
    return tl.where(tap < end, tl.maximum(1 - tl.abs(tap - position) * slope, 0), 0)


@triton.jit
def axis_taps(position, scale, first, end):
    """The first sample from `first` on that counts at each position, how many may, their weights' slope and sum."""
    support = tl.maximum(scale, 1)
    slope = 1 / support
    tap = tl.maximum(tl.floor(position - support).to(tl.int32) + 1, first)
    count = tl.ceil(2 * support).to(tl.int32)
    total = triangle(tap, position, slope, end)
    for i in range(1, count):
        total += triangle(tap + i, position, slope, end)
    return tap, count, slope, total


@triton.jit
def resample(plane_ptr, stride, sample_bytes, y, x, y_scale, x_scale, top, left, bottom, right):
    """Resample the samples in [top, bottom) x [left, right) at rows y and columns x: fp32 [ROWS, COLUMNS]."""
    row, y_count, y_slope, y_total = axis_taps(y, y_scale, top, bottom)
    column, x_count, x_slope, x_total = axis_taps(x, x_scale, left, right)
    out = tl.zeros((y.shape[0], x.shape[0]), tl.float32)
    is_wide = (
        tl.zeros((y.shape[0], x.shape[0]), tl.int32) + sample_bytes == 2
    )  # Triton interprets no mask of one bool
    for i in range(y_count):
        line = tl.zeros((y.shape[0], x.shape[0]), tl.float32)
        for j in range(x_count):
            inside = (row + i < bottom)[:, None] & (column + j < right)[None, :]
            sample_ptrs = (
                plane_ptr + ((row + i)[:, None] * stride + (column + j)[None, :]) * sample_bytes
            )
            low = tl.load(sample_ptrs, mask=inside, other=0).to(tl.int32)
            high = tl.load(sample_ptrs + 1, mask=inside & is_wide, other=0).to(tl.int32)
            line += triangle(column + j, x, x_slope, right)[None, :] * (low + high * 256).to(
                tl.float32
            )
        out += triangle(row + i, y, y_slope, bottom)[:, None] * line
    return out / (y_total[:, None] * x_total[None, :])


@triton.jit
def crop_resize_kernel(
    planes_ptr,
    offsets_ptr,
    sizes_ptr,
    boxes_ptr,
    flips_ptr,
    matrices_ptr,
    siting_ptr,
    out_ptr,
    T,
    H,
    W,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per tile of ROWS x COLUMNS pixels of a frame."""
    tiles = tl.cdiv(H, ROWS)
    frame = (tl.program_id(0) // tiles).to(tl.int64)
    b = frame // T
    i = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows, columns, size = (
        tl.load(sizes_ptr + b * 3),
        tl.load(sizes_ptr + b * 3 + 1),
        tl.load(sizes_ptr + b * 3 + 2),
    )
    left, top = tl.load(boxes_ptr + b * 4), tl.load(boxes_ptr + b * 4 + 1)
    box_w, box_h = tl.load(boxes_ptr + b * 4 + 2), tl.load(boxes_ptr + b * 4 + 3)
    right, bottom = left + box_w, top + box_h
    y_scale, x_scale = box_h / H, box_w / W
    shown_i, shown_j = tl.minimum(i, H - 1), tl.minimum(j, W - 1)
    y = (shown_i + 0.5) * y_scale + top - 0.5
    x = (tl.where(tl.load(flips_ptr + b), W - 1 - shown_j, shown_j) + 0.5) * x_scale + left - 0.5
    luma_ptr = planes_ptr + tl.load(offsets_ptr + frame)
    luma = resample(luma_ptr, columns, size, y, x, y_scale, x_scale, top, left, bottom, right)
    y, x = (y - tl.load(siting_ptr + b * 2 + 1)) / 2, (x - tl.load(siting_ptr + b * 2)) / 2
    y_scale, x_scale, top, left, bottom, right = (
        y_scale / 2,
        x_scale / 2,
        top // 2,
        left // 2,
        (bottom + 1) // 2,
        (right + 1) // 2,
    )
    stride, u_ptr = (columns + 1) // 2, luma_ptr + rows * columns * size
    v_ptr = u_ptr + (rows + 1) // 2 * stride * size
    u = resample(u_ptr, stride, size, y, x, y_scale, x_scale, top, left, bottom, right)
    v = resample(v_ptr, stride, size, y, x, y_scale, x_scale, top, left, bottom, right)
    out_ptrs = out_ptr + ((frame * H + i[:, None]) * W + j[None, :]) * 3
    inside = (i < H)[:, None] & (j < W)[None, :]
    for channel in tl.static_range(3):
        row_ptr = matrices_ptr + b * 12 + channel * 4
        value = (
            tl.load(row_ptr) * luma
            + tl.load(row_ptr + 1) * u
            + tl.load(row_ptr + 2) * v
            + tl.load(row_ptr + 3)
        )
        value = tl.minimum(tl.maximum(value, 0), 255) + 0.5
        tl.store(out_ptrs + channel, value.to(tl.uint8), mask=inside)


@triton_op("crop_resize")
def crop_resize_op(
    planes: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    boxes: Tensor,
    flips: Tensor,
    matrices: Tensor,
    siting: Tensor,
    height: int,
    width: int,
) -> Tensor:
    batch, frames = offsets.shape
    out = planes.new_empty(batch, frames, height, width, 3)
    wrap_triton(crop_resize_kernel)[
        (batch * frames * triton.cdiv(height, ROWS), triton.cdiv(width, COLUMNS))
    ](
        planes,
        offsets,
        sizes,
        boxes,
        flips,
        matrices,
        siting,
        out,
        frames,
        height,
        width,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return out
