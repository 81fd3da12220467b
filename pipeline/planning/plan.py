"""Decide which clip stands at which place of a run: video, frames, crop, flip, RandAugment and erased box.

Every row of a plan is a pure function of (seed, position). Training clips form one endless stream of positions 0, 1, 2,
…; epochs follow each other without padding or dropping. Step s holds positions s · global_batch + 0, 1, …, which ranks
and their forward passes share (split_step): every world size sees the same steps, and a resume needs nothing but s.
What is not in the plan, such as masks: CONTRIBUTING.md.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from adamae.common.arithmetic import ceil_div
from adamae.common.errors import InputError
from adamae.pipeline.config import DEFAULT_STRIDE, DataConfig
from adamae.pipeline.planning import augmentations, crops, rng
from adamae.pipeline.planning.augmentations import AugmentOp, EraseBox
from adamae.pipeline.planning.crops import Crop, FrameSize
from adamae.pipeline.planning.rng import Purpose
from adamae.pipeline.planning.sample_order import SampleOrder, choose_subset
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import Sample

MAX_SHORT = (
    0.05  # of the videos may be shorter than a clip: a few must not decide the stride of all
)

Number = TypeVar("Number", float, np.ndarray)


class PlanRow(NamedTuple):  # which is pickled three times as fast as a dataclass
    """One clip."""

    position: int  # in the stream
    sample: int  # index into ShardDataset.samples
    frames: tuple[
        int, ...
    ]  # stored frames, ascending; some repeated where the video is too short or too slow
    crop: Crop  # in stored pixels
    flip: bool  # left to right
    augment_ops: tuple[AugmentOp, ...] = ()
    erase_box: EraseBox | None = None


class ClipPlan(Protocol):
    """What the loader needs of a plan. `crops_per_decode` neighboring rows share one decode."""

    num_frames: int
    frame_size: FrameSize
    batch_size: int  # the most rows of a batch
    crops_per_decode: int
    microbatches_per_step: int  # of this rank

    def positions(self, batch: int) -> Sequence[int]:
        """List the positions of this process's clips in a batch, in order; none when the plan has ended."""

    def row(self, position: int) -> PlanRow:
        """Decide on a clip."""

    def batch(self, index: int) -> list[PlanRow]:
        return [self.row(position) for position in self.positions(index)]

    def samples(self, batch: int) -> list[int]:
        """List the samples of a batch, one per decode: a look ahead, cheap where rows are not."""
        return [
            self.row(position).sample
            for position in self.positions(batch)[:: self.crops_per_decode]
        ]

    def replacement(self, row: PlanRow, attempt: int) -> PlanRow | None:
        """Choose a clip for where `row` and `attempt` - 1 replacements cannot be decoded; None: that is an error."""
        return None


class TrainingPlan(ClipPlan):
    """Endless stream of training clips."""

    def __init__(
        self,
        dataset: ShardDataset,
        config: DataConfig,
        *,
        num_frames: int,
        image_size: int | Sequence[int],
        seed: int,
        batch_size: int,
        global_batch: int | None = None,
        batch_multiple: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Prepare the plan of one rank; nothing is laid out in advance.

        batch_size: the most clips of a batch; global_batch: clips of a step, None: a full batch in every rank;
        batch_multiple: the number of clips in a batch is a multiple of it. Raises InputError if batches cannot hold
        whole groups of repeats, a stride does not fit the shards, or colors are to be changed of clips that have none.
        """
        if config.rand_augment and dataset.channels != 3:
            raise InputError(
                f"data.rand_augment changes colors, and these clips have {dataset.channels} channels"
            )
        self.num_frames, self.frame_size, self.crops_per_decode = (
            num_frames,
            FrameSize.of(image_size),
            config.repeats,
        )
        self.global_batch = global_batch or batch_size * world_size
        batch_multiple = math.lcm(batch_multiple, config.repeats)
        if batch_size < batch_multiple:
            raise InputError(
                f"batch_size is {batch_size}: give at least {batch_multiple}, as so many clips stay in one batch"
            )
        self._microbatches = split_step(
            self.global_batch, batch_size, batch_multiple, world_size, rank
        )
        self.microbatches_per_step = len(self._microbatches)
        self.batch_size = max(map(len, self._microbatches))
        self._dataset, self._config, self._seed = dataset, config, seed
        check_strides(dataset, config)
        step_size = self.global_batch // self.crops_per_decode
        share_of_node = step_size // config.canonical_nodes or 1
        served = {
            clip // self.crops_per_decode // share_of_node
            for clips in self._microbatches
            for clip in clips
        }
        self._order = SampleOrder(dataset, config, seed, step_size, len(served))

    @property
    def clips_per_epoch(self) -> int:
        return self._order.epoch_size * self.crops_per_decode

    def positions(self, batch: int) -> range:
        step, number = divmod(batch, self.microbatches_per_step)
        first = step * self.global_batch
        return range(
            first + self._microbatches[number].start, first + self._microbatches[number].stop
        )

    def samples(self, batch: int) -> list[int]:
        crops = self.crops_per_decode
        return [
            self._order.sample(position // crops) for position in self.positions(batch)[::crops]
        ]

    def row(self, position: int) -> PlanRow:
        return self._make_row(
            position, self._order.sample(position // self.crops_per_decode), attempt=0
        )

    def replacement(self, row: PlanRow, attempt: int) -> PlanRow:
        decode = row.position // self.crops_per_decode
        fraction = rng.uniforms(self._seed, Purpose.REPLACEMENT, (decode, attempt, 0), 1)[0]
        return self._make_row(
            row.position, self._order.replacement(decode, fraction, attempt), attempt
        )

    def _make_row(self, position: int, sample: int, attempt: int) -> PlanRow:
        config, video = self._config, self._dataset.samples[sample]
        decode = position // self.crops_per_decode
        when = rng.uniforms(self._seed, Purpose.FRAMES, (decode, attempt, 0), self.num_frames)
        where = rng.uniforms(self._seed, Purpose.CROP, (position, attempt, 0), crops.DRAWS + 1)
        sides = video.width, video.height
        if config.crop == "multiscale":
            crop = crops.multiscale_crop(*sides, where[1:], self.frame_size)
        else:
            crop = crops.random_resized_crop(
                *sides, where[1:], config.crop_min_area, self.frame_size
            )
        flip = config.flip and where[0] < 0.5
        frames = choose_frames(video, config, when)
        return PlanRow(position, sample, frames, crop, flip, *self._augmentation(position, attempt))

    def _augmentation(
        self, position: int, attempt: int
    ) -> tuple[tuple[AugmentOp, ...], EraseBox | None]:
        count, share = self._config.rand_augment, self._config.random_erasing
        if not count and not share:
            return (), None
        needed = augmentations.NUMBERS_FOR_ERASING + count * augmentations.NUMBERS_PER_OP
        numbers = rng.uniforms(self._seed, Purpose.AUGMENT, (position, attempt, 0), needed)
        box = augmentations.sample_erase_box(share, numbers)
        rest = numbers[augmentations.NUMBERS_FOR_ERASING :]
        return augmentations.sample_ops(count, self._config.rand_augment_magnitude, rest), box


class EvaluationPlan(ClipPlan):
    """Every video of a dataset once, as `num_temporal` clips × `num_spatial` crops, for tests.

    As in the published evaluation, a single clip is the middle one; several begin with the first and end with the last
    there is, or, of segments, take frames 0, 1/K, 2/K… into each part. The views of a video follow each other; the last
    batches may be short or empty, so no clip is counted twice at any world size.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        config: DataConfig,
        *,
        num_frames: int,
        image_size: int | Sequence[int],
        batch_size: int,
        num_temporal: int = 1,
        num_spatial: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Raises InputError if the batch cannot hold whole groups of spatial views or a stride does not fit."""
        if batch_size % num_spatial:
            raise InputError(
                f"batch_size {batch_size} is not a multiple of the {num_spatial} spatial views"
            )
        self.num_frames, self.frame_size = num_frames, FrameSize.of(image_size)
        self.batch_size, self.crops_per_decode = batch_size, num_spatial
        self.microbatches_per_step = 1
        self._dataset, self._config, self._num_temporal = dataset, config, num_temporal
        self._rank, self._world_size = rank, world_size
        check_strides(dataset, config)
        self._chosen = choose_subset(dataset, config)

    def __len__(self) -> int:
        """Clips of all ranks together."""
        return len(self._chosen) * self._num_temporal * self.crops_per_decode

    def positions(self, batch: int) -> range:
        first = (batch * self._world_size + self._rank) * self.batch_size
        return range(first, min(first + self.batch_size, len(self)))

    def row(self, position: int) -> PlanRow:
        rest, spatial = divmod(position, self.crops_per_decode)
        place, temporal = divmod(rest, self._num_temporal)
        sample = int(self._chosen[place])
        video = self._dataset.samples[sample]
        last = self._num_temporal - (self._config.sampling == "strided")
        share = temporal / last if self._num_temporal > 1 else 0.5
        frames = choose_frames(video, self._config, [share] * self.num_frames)
        crop = crops.view_crop(
            video.width, video.height, spatial, self.crops_per_decode, self.frame_size
        )
        return PlanRow(position, sample, frames, crop, flip=False)


def split_step(clips: int, most: int, multiple: int, world_size: int, rank: int) -> list[range]:
    """List the clips of a step, from 0, that a rank takes in each of its forward passes: `most` at most in one.

    All passes of all ranks hold the same number of groups of `multiple` clips or one less, so that no more than two
    shapes are compiled; ranks, too, differ by one group at most. The first passes of all ranks come first, and together
    the passes are the step, in its order. Raises InputError if a rank would have nothing to do.
    """
    groups, odd = divmod(clips, multiple)
    if odd:
        raise InputError(
            f"global_batch is {clips}: give a multiple of {multiple}, as so many clips stay in one batch"
        )
    if groups < world_size:
        raise InputError(
            f"global_batch is {clips}, and each of {world_size} processes takes a multiple of {multiple} clips: start"
            " fewer processes, or raise global_batch"
        )
    rounds = ceil_div(groups, world_size * (most // multiple))
    size, larger = divmod(groups, world_size * rounds)
    smaller = (
        world_size * rounds - larger
    )  # passes, which come first: an empty one is the first of its rank
    starts = [number * size + max(0, number - smaller) for number in range(world_size * rounds + 1)]
    parts = [range(start * multiple, end * multiple) for start, end in pairwise(starts)]
    return [part for part in parts[rank::world_size] if part]


def check_strides(dataset: ShardDataset, config: DataConfig) -> None:
    """Raise InputError if data.frame_stride is no whole number of stored frames of some video. Segments and data.fps
    have no stride."""
    thinned = dataset.info.frame_strides if config.sampling == "strided" else []
    if config.frame_stride is None or not any(config.frame_stride % stride for stride in thinned):
        return
    fps = dataset.info.encode.get("fps")  # each video was thinned by a stride of its own
    advice = (
        f"set data.fps={fps:g}"
        if fps
        else f"give a multiple of {math.lcm(*thinned)}, or set data.fps"
    )
    raise InputError(
        f"data.frame_stride is {config.frame_stride}, but {dataset.folder} stores one frame of every"
        f" {' or '.join(map(str, thinned))}: {advice} instead"
    )


def choose_frames(video: Sample, config: DataConfig, shares: list[float]) -> tuple[int, ...]:
    """Choose as many frames as `shares` in [0, 1), of which the first says where a clip begins that has a stride."""
    if config.sampling == "segments":
        return segment_frames(video.num_frames, shares)
    step = frame_step(video.fps, video.frame_stride, config)
    return strided_frames(video.num_frames, len(shares), step, shares[0])


def frame_step(fps: Number, stored_stride: Number, config: DataConfig) -> Number:
    """Compute the stored frames, of `fps` a second and of every `stored_stride` of the source, from one frame of a clip
    to the next."""
    return (
        fps / config.fps if config.fps else (config.frame_stride or DEFAULT_STRIDE) / stored_stride
    )


def largest_stride(frames: np.ndarray, num_frames: int) -> int:
    """Return the largest stride of a clip of `num_frames` that fits into nearly all videos of `frames`; at least 1."""
    return max(
        1, int(np.quantile((frames - 1) // max(1, num_frames - 1), MAX_SHORT, method="lower"))
    )


def strided_frames(available: int, wanted: int, step: float, share: float) -> tuple[int, ...]:
    """Choose the frames nearest to `wanted` places `step` apart, the first at `share` in [0, 1] of all starts. The last
    is repeated where the video is too short, and any where `step` is below 1."""
    places = [math.floor(number * step + 0.5) for number in range(wanted)]
    starts = max(1, available - places[-1])
    start = min(int(share * starts), starts - 1)
    return tuple(min(start + place, available - 1) for place in places)


def segment_frames(available: int, shares: list[float]) -> tuple[int, ...]:
    """Choose one frame from each of len(shares) equal parts of the video; shares in [0, 1) say where in its part."""
    return tuple(
        min(int((part + share) * available / len(shares)), available - 1)
        for part, share in enumerate(shares)
    )
