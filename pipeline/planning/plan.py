"""Decide which clip stands at each position of a run: video, frames, crop, flip and augmentations.

Every row of a plan is a pure function of (seed, position). Training clips form one endless stream,
numbered by their positions 0, 1, 2, …; epochs follow each other without padding or dropping. Step s
holds the positions s · global_batch + 0, 1, …, which ranks and their forward passes share
(split_step). So every world size sees the same steps, and a resume needs nothing but s. Other
random numbers, such as those of masks: docs/architecture.md#what-is-random-and-where-it-is-decided.
"""

import math
from collections.abc import Sequence
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

# A few short videos must not decide the stride of all: so many may be shorter than a clip.
MAX_SHORT_FRACTION = 0.05
# By which a frame rate of NTSC, 30000/1001 instead of 30, is off, and a little more.
NTSC_TOLERANCE = 1.001e-3

Number = TypeVar("Number", float, np.ndarray)


# A named tuple is pickled three times as fast as a dataclass.
class PlanRow(NamedTuple):
    """One clip: what to decode, and what to do with it."""

    # In the stream of clips.
    position: int
    # Index into ShardDataset.samples.
    sample: int
    # Stored frames, ascending. Some are repeated where the video is too short or too slow.
    frames: tuple[int, ...]
    # In stored pixels.
    crop: Crop
    # Left to right.
    flip: bool
    augment_ops: tuple[AugmentOp, ...] = ()
    erase_box: EraseBox | None = None


class ClipPlan(Protocol):
    """What the loader needs of a plan. `crops_per_decode` neighboring rows share one decode."""

    num_frames: int
    frame_size: FrameSize
    # The largest number of rows of a batch.
    batch_size: int
    crops_per_decode: int
    # Batches of this rank in a step.
    microbatches_per_step: int

    def positions(self, index: int) -> Sequence[int]:
        """Return the positions of this rank's clips in a batch, none after the end of the plan."""

    def row(self, position: int) -> PlanRow:
        """Decide on a clip."""

    def batch(self, index: int) -> list[PlanRow]:
        """Decide on all clips of a batch."""
        return [self.row(position) for position in self.positions(index)]

    def samples(self, index: int) -> list[int]:
        """Return the samples of a batch, one per decode; a look ahead, where rows cost too much."""
        decoded = self.positions(index)[:: self.crops_per_decode]
        return [self.row(position).sample for position in decoded]

    def replacement(self, row: PlanRow, attempt: int) -> PlanRow | None:
        """Choose another clip where `row` and `attempt` - 1 replacements cannot be decoded.

        None means that a broken video is an error.
        """
        return None


class TrainingPlan(ClipPlan):
    """The endless stream of training clips."""

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

        batch_size: the largest number of clips of a batch; global_batch: clips of a step of all
        ranks, by default a full batch of every rank; batch_multiple: divides the number of clips of
        every batch. Raise InputError if batches cannot hold whole groups of repeats, a stride does
        not fit the shards, or colors are to be changed in clips that have none.
        """
        if config.rand_augment and dataset.channels != 3:
            raise InputError(
                f"data.rand_augment changes colors, and these clips have {dataset.channels}"
                " channels"
            )
        self.num_frames = num_frames
        self.frame_size = FrameSize.of(image_size)
        self.crops_per_decode = config.repeats
        self.global_batch = global_batch or batch_size * world_size
        batch_multiple = math.lcm(batch_multiple, config.repeats)
        if batch_size < batch_multiple:
            raise InputError(
                f"batch_size is {batch_size}: give at least {batch_multiple}, as so many clips stay"
                " in one batch"
            )
        self._microbatches = split_step(
            self.global_batch, batch_size, batch_multiple, world_size, rank
        )
        self.microbatches_per_step = len(self._microbatches)
        self.batch_size = max(map(len, self._microbatches))
        self._dataset = dataset
        self._config = config
        self._seed = seed
        check_strides(dataset, config)
        step_size = self.global_batch // self.crops_per_decode
        num_cached_nodes = self._count_nodes(step_size)
        self._order = SampleOrder(dataset, config, seed, step_size, num_cached_nodes)

    def _count_nodes(self, step_size: int) -> int:
        """Count the canonical nodes that fill the batches of this rank; see SampleOrder."""
        # 1 only where there are too many nodes, which SampleOrder refuses.
        node_step_size = max(1, step_size // self._config.canonical_nodes)
        nodes: set[int] = set()
        for clips in self._microbatches:
            nodes.update(clip // self.crops_per_decode // node_step_size for clip in clips)
        return len(nodes)

    @property
    def clips_per_epoch(self) -> int:
        """The number of clips of an epoch of all ranks together."""
        return self._order.epoch_size * self.crops_per_decode

    def positions(self, index: int) -> range:
        """Return the positions of this rank's clips in a batch."""
        step, microbatch = divmod(index, self.microbatches_per_step)
        first = step * self.global_batch
        clips = self._microbatches[microbatch]
        return range(first + clips.start, first + clips.stop)

    def samples(self, index: int) -> list[int]:
        """Return the samples of a batch, one per decode."""
        decoded = self.positions(index)[:: self.crops_per_decode]
        return [self._order.sample(position // self.crops_per_decode) for position in decoded]

    def row(self, position: int) -> PlanRow:
        """Decide on a clip."""
        sample = self._order.sample(position // self.crops_per_decode)
        return self._make_row(position, sample, attempt=0)

    def replacement(self, row: PlanRow, attempt: int) -> PlanRow:
        """Choose another clip where `row` and `attempt` - 1 replacements cannot be decoded."""
        decode = row.position // self.crops_per_decode
        (fraction,) = self._draw(Purpose.REPLACEMENT, decode, attempt, 1)
        sample = self._order.replacement(decode, fraction, attempt)
        return self._make_row(row.position, sample, attempt)

    def _draw(self, purpose: Purpose, index: int, attempt: int, count: int) -> list[float]:
        """Return uniform numbers in [0, 1) for a clip or a decode, or for its replacement."""
        return rng.uniforms(self._seed, purpose, (index, attempt, 0), count)

    def _make_row(self, position: int, sample: int, attempt: int) -> PlanRow:
        config = self._config
        video = self._dataset.samples[sample]
        # Clips that share a decode share their frames, or most of them. Each has a crop and a flip
        # of its own.
        decode = position // self.crops_per_decode
        frame_numbers = self._draw(Purpose.FRAMES, decode, attempt, self.num_frames)
        if config.views_apart_s > 0:
            (view_number,) = self._draw(Purpose.VIEW, position, attempt, 1)
            frames = view_frames(video, config, self.num_frames, frame_numbers[0], view_number)
        else:
            frames = choose_frames(video, config, frame_numbers)
        numbers = self._draw(Purpose.CROP, position, attempt, 1 + crops.NUMBERS_PER_CROP)
        flip_number, *crop_numbers = numbers
        if config.crop == "multiscale":
            crop = crops.multiscale_crop(video.width, video.height, crop_numbers, self.frame_size)
        else:
            crop = crops.random_resized_crop(
                video.width, video.height, crop_numbers, config.crop_min_area, self.frame_size
            )
        flip = config.flip and flip_number < 0.5
        ops, erase_box = self._choose_augmentations(position, attempt)
        return PlanRow(position, sample, frames, crop, flip, ops, erase_box)

    def _choose_augmentations(
        self, position: int, attempt: int
    ) -> tuple[tuple[AugmentOp, ...], EraseBox | None]:
        num_ops = self._config.rand_augment
        erase_probability = self._config.random_erasing
        if num_ops == 0 and erase_probability == 0:
            return (), None
        count = augmentations.NUMBERS_FOR_ERASING + num_ops * augmentations.NUMBERS_PER_OP
        numbers = self._draw(Purpose.AUGMENT, position, attempt, count)
        erase_box = augmentations.sample_erase_box(erase_probability, numbers)
        op_numbers = numbers[augmentations.NUMBERS_FOR_ERASING :]
        magnitude = self._config.rand_augment_magnitude
        return augmentations.sample_ops(num_ops, magnitude, op_numbers), erase_box


class EvaluationPlan(ClipPlan):
    """Every video of a dataset once, as `num_temporal` clips × `num_spatial` crops."""

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
        replaces: bool = False,
    ) -> None:
        """Prepare the plan of one rank.

        replaces: whether the next videos stand in for one that does not decode, which is an error
            otherwise. The batch has their keys then.

        Raise InputError if the batch cannot hold whole groups of spatial views or a stride does not
        fit the shards.
        """
        if batch_size % num_spatial:
            raise InputError(
                f"batch_size {batch_size} is not a multiple of the {num_spatial} spatial views"
            )
        self.num_frames = num_frames
        self.frame_size = FrameSize.of(image_size)
        self.batch_size = batch_size
        self.crops_per_decode = num_spatial
        self.microbatches_per_step = 1
        self._dataset = dataset
        self._config = config
        self._num_temporal = num_temporal
        self._rank = rank
        self._world_size = world_size
        self._replaces = replaces
        check_strides(dataset, config)
        self._subset = choose_subset(dataset, config)

    def __len__(self) -> int:
        """Return the number of clips of all ranks together."""
        return len(self._subset) * self._num_temporal * self.crops_per_decode

    def positions(self, index: int) -> range:
        """Return the positions of this rank's clips in a batch; ranks take turns."""
        first = (index * self._world_size + self._rank) * self.batch_size
        return range(first, min(first + self.batch_size, len(self)))

    def samples(self, index: int) -> list[int]:
        """Return the samples of a batch, one per decode; their rows are not read for it."""
        decoded = self.positions(index)[:: self.crops_per_decode]
        views_per_video = self._num_temporal * self.crops_per_decode
        return [int(self._subset[position // views_per_video]) for position in decoded]

    def row(self, position: int) -> PlanRow:
        """Decide on a clip: of each video, all spatial views of a temporal one come first."""
        decode, spatial = divmod(position, self.crops_per_decode)
        subset_index, temporal = divmod(decode, self._num_temporal)
        sample = int(self._subset[subset_index])
        video = self._dataset.samples[sample]
        numbers = [self._place_view(temporal)] * self.num_frames
        frames = choose_frames(video, self._config, numbers)
        crop = crops.view_crop(
            video.width, video.height, spatial, self.crops_per_decode, self.frame_size
        )
        return PlanRow(position, sample, frames, crop, flip=False)

    def replacement(self, row: PlanRow, attempt: int) -> PlanRow | None:
        """Choose the same view of the video that comes `attempt` videos later, or None."""
        if not self._replaces or attempt >= len(self._subset):
            return None
        views_per_video = self._num_temporal * self.crops_per_decode
        position = (row.position + attempt * views_per_video) % len(self)
        return self.row(position)._replace(position=row.position)

    def _place_view(self, temporal: int) -> float:
        """Return where a temporal view lies: in [0, 1] of the video, or in [0, 1) of a segment."""
        if self._num_temporal == 1:
            return 0.5
        if self._config.sampling == "strided":
            return temporal / (self._num_temporal - 1)
        # At 1, a segment's frame would be the first of the next one.
        return temporal / self._num_temporal


def split_step(
    num_clips: int, max_clips: int, multiple: int, world_size: int, rank: int
) -> list[range]:
    """Return the clips of a step, numbered from 0, for each of a rank's forward passes.

    A pass holds `max_clips` or fewer, in groups of `multiple`. All passes of all ranks hold the
    same number of groups or one less, so that no more than two shapes are compiled; ranks, too,
    differ by one group at most. The first passes of all ranks come first, and the passes together
    are the step in its order. Raise InputError if a rank would have nothing to do.

    For example, 20 clips are 10 groups of 2. If passes hold 6 clips or fewer, 2 ranks need 2 passes
    each, of 2, 2, 3 and 3 groups. Rank 0 takes the clips 0-3 and then 8-13, rank 1 takes 4-7 and
    then 14-19.
    """
    num_groups, remainder = divmod(num_clips, multiple)
    if remainder:
        raise InputError(
            f"global_batch is {num_clips}: give a multiple of {multiple}, as so many clips stay in"
            " one batch"
        )
    if num_groups < world_size:
        raise InputError(
            f"global_batch is {num_clips}, and each of {world_size} processes takes a multiple of"
            f" {multiple} clips: start fewer processes, or raise global_batch"
        )
    max_groups = max_clips // multiple
    num_passes = world_size * ceil_div(num_groups, world_size * max_groups)
    groups_per_pass, num_larger = divmod(num_groups, num_passes)
    passes = []
    start = 0
    for index in range(num_passes):
        size = groups_per_pass * multiple
        # Smaller passes come first: an empty one is the first of its rank, so others remain.
        if index >= num_passes - num_larger:
            size += multiple
        passes.append(range(start, start + size))
        start += size
    return [clips for clips in passes[rank::world_size] if clips]


def check_strides(
    dataset: ShardDataset,
    config: DataConfig,
    stride_option: str = "data.frame_stride=",
    fps_option: str = "data.fps=",
) -> None:
    """Raise InputError if some video does not store every frame that data.frame_stride asks for.

    Segments and data.fps have no stride. The options are those of the command, for its sentence.
    """
    if config.sampling != "strided" or config.frame_stride is None:
        return
    stored_strides = dataset.info.frame_strides
    if all(config.frame_stride % stride == 0 for stride in stored_strides):
        return
    # Shards that were made with a frame rate hold videos of several strides.
    fps = dataset.info.encode.get("fps")
    advice = f"give {stride_option}{math.lcm(*stored_strides)} or a multiple, or {fps_option}RATE"
    if fps:
        advice = f"give {fps_option}{fps:g}"
    raise InputError(
        f"the frame stride is {config.frame_stride}, but {dataset.folder} stores one frame of every"
        f" {' or '.join(map(str, stored_strides))}: {advice}"
    )


def choose_frames(video: Sample, config: DataConfig, numbers: list[float]) -> tuple[int, ...]:
    """Choose as many frames of a video as there are `numbers`, which are uniform in [0, 1).

    Of a clip with a stride, the first number says where it begins; others are not used.
    """
    if config.sampling == "segments":
        return segment_frames(video.num_frames, numbers)
    step = frame_step(video.fps, video.frame_stride, config)
    return strided_frames(video.num_frames, len(numbers), step, numbers[0])


def view_frames(
    video: Sample, config: DataConfig, num_frames: int, fraction: float, view: float
) -> tuple[int, ...]:
    """Choose the frames of one of several clips that begin up to data.views_apart_s apart.

    They are cut out of one longer clip, which begins at `fraction` of all frames at which it can,
    so they share its frames. `view` in [0, 1) says at which of its frames this clip begins. The
    longer clip is no longer than the video: in one without a spare frame, all clips are the same.

    For example, 3 frames 2 apart in clips of 25 frames a second that begin up to 0.16 s apart are
    in a clip of 5 frames. If that begins at frame 10, it has the frames 10, 12, 14, 16 and 18, and
    a view of 0.5 begins at the second of the three that are possible: (12, 14, 16).
    """
    step = frame_step(video.fps, video.frame_stride, config)
    num_later = count_later_starts(video.num_frames, video.fps, step, num_frames, config)
    frames = strided_frames(video.num_frames, num_frames + num_later, step, fraction)
    start = int(view * (num_later + 1))
    return frames[start : start + num_frames]


def count_later_starts(
    stored_frames: int, fps: float, step: float, num_frames: int, config: DataConfig
) -> int:
    """Return at how many later frames than the first one a view can begin.

    They are whole steps apart, up to data.views_apart_s or the last clip that a video has.
    """
    # The small term is for quotients that are whole but for rounding.
    wanted = math.floor(config.views_apart_s * fps / step + NTSC_TOLERANCE)
    # The frame at `steps` steps is at most half a frame later.
    possible = math.floor((stored_frames - 0.5) / step) - (num_frames - 1)
    num_later = max(0, min(wanted, possible))
    while num_later and clip_offsets(num_frames + num_later, step)[-1] >= stored_frames:
        num_later -= 1
    return num_later


def join_frames(rows: Sequence[PlanRow]) -> tuple[int, ...]:
    """Return the stored frames that clips of one decode show, ascending, each once."""
    return tuple(sorted({frame for row in rows for frame in row.frames}))


def index_frames(rows: Sequence[PlanRow]) -> list[list[int]]:
    """Return where the frames of each clip are among those of `join_frames`.

    Clips of the frames 10, 12 and 12, 14 have [[0, 1], [1, 2]].
    """
    index_of = {frame: index for index, frame in enumerate(join_frames(rows))}
    return [[index_of[frame] for frame in row.frames] for row in rows]


def frame_step(fps: Number, stored_stride: Number, config: DataConfig) -> Number:
    """Return how many stored frames lie from one frame of a clip to the next.

    fps: of the stored video, which keeps one of every `stored_stride` frames of its source.
    """
    if config.fps:
        return _round_step(fps / config.fps)
    return (config.frame_stride or DEFAULT_STRIDE) / stored_stride


def _round_step(step: Number) -> Number:
    """Return the whole number that a step is within NTSC's tolerance, else the step itself.

    Every third frame of 24000/1001 per second is 7.992 per second. For fps=8, each of them is
    sampled: otherwise, one of a thousand would be repeated.
    """
    if isinstance(step, np.ndarray):
        wholes = np.rint(step)
        return np.where(abs(wholes - step) <= NTSC_TOLERANCE * step, wholes, step)
    whole = float(round(step))
    return whole if abs(whole - step) <= NTSC_TOLERANCE * step else step


def largest_stride(counts: np.ndarray, num_frames: int) -> int:
    """Return the largest stride, or 1, at which clips of `num_frames` fit into nearly all videos.

    counts: the number of frames of each video.
    """
    largest_of_each = (counts - 1) // max(1, num_frames - 1)
    return max(1, int(np.quantile(largest_of_each, MAX_SHORT_FRACTION, method="lower")))


def strided_frames(
    num_available: int, num_frames: int, step: float, fraction: float
) -> tuple[int, ...]:
    """Choose the frames nearest to `num_frames` times that lie `step` frames apart.

    The first one is at `fraction` in [0, 1] of all frames at which the clip can begin. The last one
    is repeated where the video is too short, and any where `step` is below 1.

    For example, 4 frames 2.5 apart span 9 stored frames (0, 3, 5, 8), so a clip can begin at the
    frames 0 to 3 of 12. At a fraction of 0.3 it begins at 1. A video of 5 frames is too short:

        0  1  2  3  4  5  6  7  8  9 10 11
           x        x     x        x            strided_frames(12, 4, 2.5, 0.3) == (1, 4, 6, 9)
        x        x  xx                          strided_frames(5, 4, 2.5, 0.3) == (0, 3, 4, 4)
    """
    offsets = clip_offsets(num_frames, step)
    num_starts = max(1, num_available - offsets[-1])
    start = min(int(fraction * num_starts), num_starts - 1)
    return tuple(min(start + offset, num_available - 1) for offset in offsets)


def clip_offsets(num_frames: int, step: float) -> list[int]:
    """Return how far each frame of a clip is from the first one: the nearest frames to `step`."""
    return [math.floor(index * step + 0.5) for index in range(num_frames)]


def segment_frames(num_available: int, numbers: list[float]) -> tuple[int, ...]:
    """Choose a frame from each of len(numbers) equal segments of a video (TSN; Wang et al., 2016).

    A number in [0, 1) says where in its segment. Of 12 frames in 3 segments, for example, [0, .5,
    .9] chooses 0, 6 and 11.
    """
    frames = []
    for segment, number in enumerate(numbers):
        frame = int((segment + number) * num_available / len(numbers))
        frames.append(min(frame, num_available - 1))
    return tuple(frames)
