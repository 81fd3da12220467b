"""Batches on their way to the device, which makes clips of decoded planes."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from adamae.kernels.clip_tables import view_tables
from adamae.pipeline.clip_memory import BlockLayout
from adamae.pipeline.decoding.decode_worker import ChunkResult


def upload(
    block: UInt8[np.ndarray, " bytes"],
    layout: BlockLayout,
    results: Sequence[ChunkResult],
    device: torch.device,
) -> UInt8[Tensor, "B T H W C"]:
    """Copy a batch to the device on the current stream, and make clips of it there; the host does not wait.

    results: all chunks of the batch, in order. Clips of encoded videos are for the GPU decoder to fill in. To be called
    once: the tables in `block` are changed to where the planes are on the device.
    """
    clips = [clip for result in results for clip in result.clips]
    memory = torch.empty(
        sum(result.used_bytes for result in results), dtype=torch.uint8, device=device
    )
    num_frames, height, width, _ = layout.clip_shape
    tables = layout.view_tables(block, len(clips))
    images, end = {}, 0  # where on the device those lie that need nothing more, by clip
    for result in results:
        first, start, end = result.chunk.first, end, end + result.used_bytes
        begin = first * layout.slot_bytes
        memory[start:end].copy_(
            torch.from_numpy(block[begin : begin + result.used_bytes]), non_blocking=True
        )
        moved = start - begin
        for index, clip in enumerate(result.clips, first):
            if clip.image is None:
                tables[0][index] += moved
            else:
                images[index] = clip.image + moved
    encoded: set[int] = set()
    for result in results:
        for index, video in result.encoded.items():
            encoded.update(range(index, index + len(video.rows)))
    if len(images) == len(clips):  # one behind the other
        return memory.view(len(clips), *layout.clip_shape)
    if len(images) + len(encoded) == len(clips):
        made = torch.empty(len(clips), *layout.clip_shape, dtype=torch.uint8, device=device)
    else:
        from adamae.kernels.crop_resize import (  # takes 2 s, and not all need it
            DecodedClips,
            crop_resize,
        )

        for index in {*images, *encoded}:  # show the first pixel of the memory instead
            for table, value in zip(tables, (0, 1, (0, 0, 1, 1), False, 0, 0), strict=True):
                table[index] = value
        copied = torch.from_numpy(block[layout.slice_tables(len(clips))]).to(
            device, non_blocking=True
        )
        planes = DecodedClips(memory, *view_tables(copied, len(clips), num_frames, torch))
        made = crop_resize(planes, height, width)
    for index, start in images.items():
        made[index].copy_(memory[start : start + layout.clip_bytes].view(layout.clip_shape))
    return made
