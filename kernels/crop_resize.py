"""Clips from decoded planes: each clip's crop of planar YUV 4:2:0, scaled to RGB in one pass.

      Y of a stored frame           U, and V alike               the clip
    +----------------------+       +-----------+
    |       left   right   |       |           |                  width
    |   top  +-------+     |       |   +---+   |                +-------+
    |        |  box  |     |       |   |   |   |       =>       |  RGB  |  height
    | bottom +-------+     |       |   +---+   |                +-------+
    +----------------------+       +-----------+

Scaling is bilinear with antialiasing, as by PIL and by torch's interpolate(antialias=True). For
each pixel of the clip, and for rows and columns alike:

1. Its center is mapped into the box. A box of 448 rows from row 100 that becomes 224 rows has a
   scale of 2, and row 0 of the clip lies at (0 + 0.5) * 2 + 100 - 0.5 = 100.5, between two rows.
2. Samples closer than max(1, scale) = 2 count, by a triangle, 1 - distance / 2: rows 99 to 102.
   Row 99 is outside the box; 100, 101 and 102 have 0.75, 0.75 and 0.25, divided by their sum.
3. Each plane of chroma is resampled by itself, at half the scale and from where its samples lie.
   Here they lie 0.5 rows below the first row of luma: (100.5 - 0.5) / 2 = 50 is row 50, alone.
4. The clip's matrix makes RGB of Y, U and V, and then comes the only rounding.

Nothing outside the box counts: of luma, its pixels; of chroma, the samples that color one of its
pixels (at an odd edge, a sample shared with a pixel outside). A crop thus depends on what it shows,
and not on whether the frame ends there; FFmpeg does the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adamae.common.arithmetic import ceil_div
from adamae.kernels.clip_tables import frame_bytes, lay_out_tables
from adamae.kernels.launch import check, runs_triton, triton_op, wrap_triton

# A program's tile: a warp writes 32 neighbors, and a thread's four rows share horizontal weights.
ROWS = 16
COLUMNS = 32


class DecodedClips(NamedTuple):
    """What the loader hands over: B clips of T frames, on one device, each tensor contiguous.

    Frames are upright and planar 4:2:0. Samples have 8 bits, or 9 to 16 in the low bits of two
    bytes, low byte first. A frame, or a part of one that begins with a whole chroma sample, is its
    planes Y, U and V without padding, the latter two of (height + 1) // 2 rows of (width + 1) // 2
    samples: `frame_bytes` in all. A frame that several clips show, or one shows twice, is there
    once.

    `kernels.clip_tables.lay_out_tables` has an example with numbers.
    """

    # uint8 [bytes]: all distinct frames of the batch, in any order.
    planes: Tensor
    # int64 [B, T]: the byte in `planes` at which each frame begins, at no multiple of anything.
    offsets: Tensor
    # int32 [B, 3]: height and width of the stored frames in pixels, bytes a sample (1 or 2).
    sizes: Tensor
    # int32 [B, 4]: x, y, width, height of the crop in pixels of luma, which may be odd.
    boxes: Tensor
    # bool [B]: whether the crop is mirrored left to right.
    flips: Tensor
    # fp32 [B, 3, 4]: what `color_matrix` returns, from (Y, U, V, 1) as stored to RGB from 0 to 255.
    matrices: Tensor
    # fp32 [B, 2]: pixels right of and below the first luma sample at which the first of chroma
    # lies: left (MPEG-2, H.264's default) 0, 0.5; center (MPEG-1, JPEG) 0.5, 0.5; top left
    # (BT.2020) 0, 0; bottom left 0, 1.
    siting: Tensor


def check_clips(clips: DecodedClips) -> None:
    """Raise InputError unless types, shapes and devices fit, and on a CPU the tables' numbers."""
    table_shape = tuple(clips.offsets.shape)
    check(len(table_shape) == 2, f"offsets have shape {table_shape}: give [B, T]")
    layout = [("uint8", (clips.planes.numel(),)), *lay_out_tables(*table_shape)]
    for name, tensor, (type_name, shape) in zip(clips._fields, clips, layout, strict=True):
        dtype = getattr(torch, type_name)
        fits = tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()
        shown = f"{tensor.dtype} {tuple(tensor.shape)}"
        check(fits, f"{name} are {shown}: give {dtype} {shape}, contiguous")
        is_beside = tensor.device == clips.planes.device
        check(is_beside, f"{name} are on {tensor.device}, planes on {clips.planes.device}")
    # Reading the tables from a GPU would wait for all work that is queued there.
    if clips.planes.device.type == "cpu":
        _check_bounds(clips)


def _check_bounds(clips: DecodedClips) -> None:
    """Raise InputError unless every box lies in its frame, and every frame in the planes."""
    num_bytes = len(clips.planes)
    all_offsets = clips.offsets.tolist()
    sizes = clips.sizes.tolist()
    boxes = clips.boxes.tolist()
    for b, offsets in enumerate(all_offsets):
        height, width, sample_bytes = sizes[b]
        check(sample_bytes in (1, 2), f"samples of clip {b} have {sample_bytes} bytes: give 1 or 2")
        x, y, box_width, box_height = boxes[b]
        has_pixels = box_width > 0 and box_height > 0
        is_inside = 0 <= x <= width - box_width and 0 <= y <= height - box_height
        box = f"the box of clip {b}, {box_width}x{box_height} at {x}, {y}"
        check(
            has_pixels and is_inside,
            f"{box}, does not lie in its frames of {width}x{height}",
        )
        last_offset = num_bytes - frame_bytes(height, width, sample_bytes)
        fits = all(0 <= offset <= last_offset for offset in offsets)
        frames = f"frames of clip {b} do not lie at its offsets {offsets}"
        check(fits, f"{frames} in {num_bytes} bytes of planes")


def crop_resize(clips: DecodedClips, height: int, width: int, any_wide: bool = True) -> Tensor:
    """Crop, mirror and scale decoded frames, and convert them to RGB.

    On a GPU nothing waits for it, and what the tables contain is not checked: an offset that does
    not lie in `planes` reads other memory.

    Args:
        clips: B clips of T frames; see DecodedClips.
        height: of the result, in pixels.
        width: of the result, in pixels.
        any_wide: whether samples of any clip may have two bytes. False saves half of the kernel's
            loads; the result is the same.

    Returns:
        RGB, uint8 [B, T, height, width, 3].

    Raises:
        InputError: if tensors do not fit, or on a CPU if a box or a frame lies outside.
    """
    check_clips(clips)
    check(height > 0 and width > 0, f"clips of {height} x {width} pixels have none")
    if runs_triton(clips.planes):
        return crop_resize_op(*clips, height, width, any_wide)
    return crop_resize_ref(*clips, height, width)


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
    """Compute what `crop_resize` returns, clip by clip: the weights of an axis are a matrix."""
    clips = []
    tables = (table.tolist() for table in (offsets, sizes, boxes, flips, siting))
    for starts, size, box, is_flipped, site, matrix in zip(*tables, matrices, strict=True):
        length = frame_bytes(*size)
        frames = torch.stack([planes[start : start + length] for start in starts])
        yuv = resize_planes_ref(split_planes(frames, *size), box, site, height, width)
        rgb = yuv @ matrix[:, :3].T + matrix[:, 3]
        clips.append(rgb.flip(2) if is_flipped else rgb)
    # Truncation after adding a half rounds halves up, as the kernel does.
    return (torch.stack(clips).clamp(0, 255) + 0.5).to(torch.uint8)


def split_planes(frames: Tensor, height: int, width: int, sample_bytes: int) -> list[Tensor]:
    """Split frames, uint8 [T, frame_bytes], into fp32 planes Y, U, V [T, rows, columns]."""
    if sample_bytes == 2:
        frames = frames.view(torch.uint16)
    samples = frames.float()
    chroma_shape = ceil_div(height, 2), ceil_div(width, 2)
    shapes = [(height, width), chroma_shape, chroma_shape]
    parts = samples.split([rows * columns for rows, columns in shapes], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def resize_planes_ref(
    planes: Sequence[Tensor],
    box: Sequence[int],
    siting: Sequence[float],
    height: int,
    width: int,
) -> Tensor:
    """Resample planes Y, U, V [T, rows, columns], fp32, in a box to [T, height, width, 3]."""
    luma, *chroma = planes
    left, top, box_width, box_height = box
    right = left + box_width
    bottom = top + box_height
    y_scale = box_height / height
    x_scale = box_width / width
    y = (torch.arange(height, device=luma.device) + 0.5) * y_scale + top - 0.5
    x = (torch.arange(width, device=luma.device) + 0.5) * x_scale + left - 0.5
    rows = triangle_weights(y, y_scale, top, bottom)
    columns = triangle_weights(x, x_scale, left, right)
    yuv = [rows @ luma[:, top:bottom, left:right] @ columns.T]

    # A sample that is shared with a pixel outside counts: near edges are rounded down, far ones up.
    shift_x, shift_y = siting
    top //= 2
    left //= 2
    bottom = ceil_div(bottom, 2)
    right = ceil_div(right, 2)
    rows = triangle_weights((y - shift_y) / 2, y_scale / 2, top, bottom)
    columns = triangle_weights((x - shift_x) / 2, x_scale / 2, left, right)
    yuv += [rows @ plane[:, top:bottom, left:right] @ columns.T for plane in chroma]
    return torch.stack(yuv, dim=-1)


def triangle_weights(positions: Tensor, scale: float, first: int, end: int) -> Tensor:
    """Return the weights of samples `first` to `end` - 1 at all positions: [positions, samples].

    Sample i lies at i. Weights fall linearly to 0 at a distance of max(1, scale), and sum to 1.
    """
    support = max(1.0, scale)
    samples = torch.arange(first, end, device=positions.device)
    distances = (samples - positions[:, None]).abs()
    weights = (1 - distances / support).clamp(min=0)
    return weights / weights.sum(dim=1, keepdim=True)


@triton.jit
def triangle(tap, position, slope, end):
    """Return the weight of sample number `tap` at each position; 0 from sample number `end` on."""
    return tl.where(tap < end, tl.maximum(1 - tl.abs(tap - position) * slope, 0), 0)


@triton.jit
def axis_taps(position, scale, first, end):
    """Find which samples count at each position along one axis: step 2 at the head of this file.

    Returns the first one that counts, from `first` on, how many may (alike at all positions), the
    slope of their weights, and the weights' sum at each position. At position 100.5, with a scale
    of 2 and a box from row 100: 100, 4, 0.5 and 0.75 + 0.75 + 0.25.
    """
    support = tl.maximum(scale, 1)
    slope = 1 / support
    tap = tl.maximum(tl.floor(position - support).to(tl.int32) + 1, first)
    count = tl.ceil(2 * support).to(tl.int32)
    total = triangle(tap, position, slope, end)
    for i in range(1, count):
        total += triangle(tap + i, position, slope, end)
    return tap, count, slope, total


@triton.jit
def resample(
    plane_ptr,
    stride,
    sample_bytes,
    y,
    x,
    y_scale,
    x_scale,
    top,
    left,
    bottom,
    right,
    ANY_WIDE: tl.constexpr,
):
    """Resample the samples in [top, bottom) x [left, right) at rows y and columns x.

    y and x are fp32 [ROWS] and [COLUMNS]; returns fp32 [ROWS, COLUMNS]. Unless ANY_WIDE, samples
    have one byte.
    """
    row, y_count, y_slope, y_total = axis_taps(y, y_scale, top, bottom)
    column, x_count, x_slope, x_total = axis_taps(x, x_scale, left, right)
    ROWS: tl.constexpr = y.shape[0]
    COLUMNS: tl.constexpr = x.shape[0]
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    # A whole tile of equal bools: Triton's interpreter takes no mask of a single one.
    is_wide = tl.zeros((ROWS, COLUMNS), tl.int32) + sample_bytes == 2
    for i in range(y_count):
        line = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in range(x_count):
            y_tap = row + i
            x_tap = column + j
            inside = (y_tap < bottom)[:, None] & (x_tap < right)[None, :]
            sample = y_tap[:, None] * stride + x_tap[None, :]
            sample_ptrs = plane_ptr + sample * sample_bytes
            # Frames begin at any byte, and a load of two bytes would have to begin at an even one.
            value = tl.load(sample_ptrs, mask=inside, other=0).to(tl.int32)
            if ANY_WIDE:
                high = tl.load(sample_ptrs + 1, mask=inside & is_wide, other=0).to(tl.int32)
                value += high * 256
            weight = triangle(x_tap, x, x_slope, right)
            line += weight[None, :] * value.to(tl.float32)
        weight = triangle(row + i, y, y_slope, bottom)
        out += weight[:, None] * line
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
    ANY_WIDE: tl.constexpr,
):
    """Make a tile of ROWS x COLUMNS pixels of a frame of a clip, for all three colors."""
    tiles = tl.cdiv(H, ROWS)
    frame = (tl.program_id(0) // tiles).to(tl.int64)
    b = frame // T
    i = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)

    rows = tl.load(sizes_ptr + b * 3)
    columns = tl.load(sizes_ptr + b * 3 + 1)
    sample_bytes = 1
    if ANY_WIDE:
        sample_bytes = tl.load(sizes_ptr + b * 3 + 2)
    left = tl.load(boxes_ptr + b * 4)
    top = tl.load(boxes_ptr + b * 4 + 1)
    box_width = tl.load(boxes_ptr + b * 4 + 2)
    box_height = tl.load(boxes_ptr + b * 4 + 3)
    right = left + box_width
    bottom = top + box_height
    y_scale = box_height / H
    x_scale = box_width / W

    # Pixels of the tile outside the clip repeat its edge: they are computed, but not stored.
    shown_i = tl.minimum(i, H - 1)
    shown_j = tl.minimum(j, W - 1)
    y = (shown_i + 0.5) * y_scale + top - 0.5
    is_flipped = tl.load(flips_ptr + b)
    shown_j = tl.where(is_flipped, W - 1 - shown_j, shown_j)
    x = (shown_j + 0.5) * x_scale + left - 0.5
    y_ptr = planes_ptr + tl.load(offsets_ptr + frame)
    luma = resample(
        y_ptr, columns, sample_bytes, y, x, y_scale, x_scale, top, left, bottom, right, ANY_WIDE
    )

    # From here on in samples of chroma, of which there are half as many in each direction.
    y = (y - tl.load(siting_ptr + b * 2 + 1)) / 2
    x = (x - tl.load(siting_ptr + b * 2)) / 2
    y_scale = y_scale / 2
    x_scale = x_scale / 2
    top = top // 2
    left = left // 2
    bottom = (bottom + 1) // 2
    right = (right + 1) // 2
    stride = (columns + 1) // 2
    u_ptr = y_ptr + rows * columns * sample_bytes
    v_ptr = u_ptr + (rows + 1) // 2 * stride * sample_bytes
    u = resample(
        u_ptr, stride, sample_bytes, y, x, y_scale, x_scale, top, left, bottom, right, ANY_WIDE
    )
    v = resample(
        v_ptr, stride, sample_bytes, y, x, y_scale, x_scale, top, left, bottom, right, ANY_WIDE
    )

    out_ptrs = out_ptr + ((frame * H + i[:, None]) * W + j[None, :]) * 3
    inside = (i < H)[:, None] & (j < W)[None, :]
    for channel in tl.static_range(3):
        row_ptr = matrices_ptr + b * 12 + channel * 4
        value = tl.load(row_ptr) * luma
        value += tl.load(row_ptr + 1) * u
        value += tl.load(row_ptr + 2) * v
        value += tl.load(row_ptr + 3)
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
    any_wide: bool,
) -> Tensor:
    batch, frames = offsets.shape
    out = planes.new_empty(batch, frames, height, width, 3)
    grid = batch * frames * triton.cdiv(height, ROWS), triton.cdiv(width, COLUMNS)
    wrap_triton(crop_resize_kernel)[grid](
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
        ANY_WIDE=any_wide,
    )
    return out
