"""What the loader and its decode workers send each other: a setup, chunks to make, and results.

Pickling takes time of the training process, and NamedTuples take a third of what dataclasses do.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adamae.pipeline.clip_memory import BlockLayout
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.encoded import Encoded, GpuCodecs
from adamae.pipeline.planning.augmentations import AugmentOp, EraseBox
from adamae.pipeline.planning.plan import ClipPlan
from adamae.pipeline.shards.dataset import ShardDataset


class WorkerSetup(NamedTuple):
    """What a worker is sent first. Dataset and plan are pickled as what they are opened from."""

    dataset: ShardDataset
    plan: ClipPlan
    config: DataConfig
    gpu_codecs: GpuCodecs
    layout: BlockLayout
    # Whether the worker may write decoded planes, of which the device makes clips.
    upload_planes: bool
    # The worker's number, from 0, which decides which shards it downloads.
    number: int = 0
    # Whether the worker is of no use once the thread that has started it has ended.
    ends_with_thread: bool = False


class Chunk(NamedTuple):
    """Neighboring clips of a batch, of one or several videos, that one worker makes."""

    # The batch's number in the plan.
    batch: int
    # The index of the chunk's first clip in its batch.
    first: int
    num_clips: int
    # The block of shared memory to which the batch goes.
    block: int
    # Whether the worker only reads videos that suit the GPU decoder, and leaves them to it.
    is_for_gpu: bool = False
    # Whether a worker has died over this chunk, which then is a single video.
    is_suspect: bool = False
    # Why workers died over the chunk's video and over its replacements, which are not tried again.
    deaths: tuple[str, ...] = ()


class LoadedClip(NamedTuple):
    """What the loader needs to know about a clip, so that it looks nothing up in tables or plan."""

    # In the plan's stream.
    position: int
    key: str
    labels: tuple[int, ...]
    # The values of data.fields.
    fields: list[Any]
    augment_ops: tuple[AugmentOp, ...]
    erase_box: EraseBox | None
    # The byte of the block at which its RGB begins; None: it is in the tables as planes, or
    # encoded.
    image_start: int | None


class Fault(NamedTuple):
    """A video that could not be decoded, and has been replaced."""

    sample: int
    reason: str
    num_clips: int


@dataclass
class ChunkResult:
    """What a worker has made of a chunk, besides what it has written to the block."""

    chunk: Chunk
    clips: list[LoadedClip] = field(default_factory=list)
    # Videos for the GPU decoder, by the index of the first clip of each in the batch.
    encoded: dict[int, Encoded] = field(default_factory=dict)
    # Of the chunk's slots, from the first byte on.
    used_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    # See loader.COUNTERS.
    counts: Counter[str] = field(default_factory=Counter)
