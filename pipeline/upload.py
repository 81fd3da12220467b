"""Batches on their way to the device, which makes clips of decoded planes."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from adamae.kernels.clip_tables import view_tables
from adamae.pipeline.clip_memory import BlockLayout
from adamae.pipeline.decoding.chunks import ChunkResult

Block = UInt8[np.ndarray, " bytes"]


def upload(
    block: Block, layout: BlockLayout, results: Sequence[ChunkResult], device: torch.device
) -> UInt8[Tensor, "B T H W C"]:
    """Copy a batch to the device on the current stream, and make clips of it there.

    `results` are all chunks of the batch, in order. Clips of encoded videos are left for the GPU
    decoder to fill in. The host does not wait. To be called once per batch: the tables in `block`
    are changed to where the planes are on the device.
    """
    num_clips = sum(len(result.clips) for result in results)
    tables = layout.view_tables(block, num_clips)
    memory, image_starts = _copy_chunks(block, layout, results, tables[0], device)
    encoded: set[int] = set()
    for result in results:
        for index, video in result.encoded.items():
            encoded.update(range(index, index + len(video.rows)))
    shape = (num_clips, *layout.clip_shape)
    if len(image_starts) == num_clips:
        # All are RGB already, one behind the other: what was copied is the batch.
        return memory.view(shape)
    if len(image_starts) + len(encoded) == num_clips:
        clips = torch.empty(shape, dtype=torch.uint8, device=device)
    else:
        clips = _scale_planes(block, layout, memory, tables, {*image_starts, *encoded})
    for index, start in image_starts.items():
        image = memory[start : start + layout.clip_bytes]
        clips[index].copy_(image.view(layout.clip_shape))
    return clips


def _copy_chunks(
    block: Block,
    layout: BlockLayout,
    results: Sequence[ChunkResult],
    offsets: Int64[np.ndarray, "B T"],
    device: torch.device,
) -> tuple[UInt8[Tensor, " used_bytes"], dict[int, int]]:
    """Copy what each chunk has used of its slots to the device, without gaps.

    Return the device's memory, and where in it the clips lie that are RGB already, by their
    indices. The `offsets` of planes are changed from bytes of the block to bytes of that memory.
    Two chunks of which each has four slots of 100 bytes, and has used 300 and 200 bytes of them,
    become bytes 0 to 300 and 300 to 500: what began at byte 400 of the block, the second chunk's
    first one, begins at 300.
    """
    # Encoded videos stay: DALI uploads them by itself. Few chunks have decoded ones beside them.
    sizes = []
    for result in results:
        num_encoded = sum(len(video.rows) for video in result.encoded.values())
        sizes.append(0 if num_encoded == len(result.clips) else result.used_bytes)
    num_bytes = sum(sizes)
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    image_starts: dict[int, int] = {}
    target = 0
    for result, size in zip(results, sizes, strict=True):
        source = result.chunk.first * layout.slot_bytes
        # One copy a chunk, of what was used: slots may be several times as large.
        used = torch.from_numpy(block[source : source + size])
        memory[target : target + size].copy_(used, non_blocking=True)
        shift = target - source
        for index, clip in enumerate(result.clips, result.chunk.first):
            if clip.image_start is None:
                offsets[index] += shift
            else:
                image_starts[index] = clip.image_start + shift
        target += size
    return memory, image_starts


def _scale_planes(
    block: Block,
    layout: BlockLayout,
    memory: UInt8[Tensor, " used_bytes"],
    tables: list[np.ndarray],
    without_planes: Collection[int],
) -> UInt8[Tensor, "B T H W C"]:
    """Make clips of the planes in `memory`.

    The clips at the indices `without_planes` get any content.
    """
    # Imported here, since Triton takes 2 s and workers of a CPU's loader scale clips themselves.
    from adamae.kernels.crop_resize import DecodedClips, crop_resize

    # The kernel makes all clips of a batch. Where there are no planes, it is shown one pixel, the
    # first byte of the memory: rows that nobody has written could lead it to any address.
    offsets, sizes, boxes, flips, matrices, siting = tables
    for index in without_planes:
        offsets[index] = 0
        sizes[index] = 1
        boxes[index] = (0, 0, 1, 1)
        flips[index] = False
        matrices[index] = 0
        siting[index] = 0
    num_clips = len(offsets)
    num_frames, height, width, _ = layout.clip_shape
    table_bytes = torch.from_numpy(block[layout.slice_tables(num_clips)])
    table_bytes = table_bytes.to(memory.device, non_blocking=True)
    planes = DecodedClips(memory, *view_tables(table_bytes, num_clips, num_frames, torch))
    # Read on the host, from the block: almost all batches have 8 bits alone.
    any_wide = bool(sizes[:, 2].max() > 1)
    return crop_resize(planes, height, width, any_wide)
