"""Join videos for the GPU decoder: opening a video costs DALI more than decoding a clip.

What is stored for training consists of groups of pictures that need no others. So videos that begin
with the same bytes (size, parameters of the codec) are one video where the groups of one follow
those of another, in bytes and in time.
"""

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.shards.mp4 import read_fragments

# With more clips in a video, the cost of opening it is little beside that of its frames.
CLIPS_PER_VIDEO = 8
# The box tfdt begins with four bytes, of which the first is its version: 1 if the time that follows
# has 64 bits.
TIME_OFFSET = 4
VERSION_OF_64_BITS = 1

Bytes = UInt8[np.ndarray, " bytes"]


class GpuCodecs(NamedTuple):
    """Tells decode workers which videos of a batch they leave to the GPU decoder."""

    names: frozenset[str] = frozenset()
    # Both sides of a video must be multiples of it: see format.SIDE_STEP.
    side_step: int = 1

    def include(self, sample: Sample, video: VideoSlice) -> bool:
        """Return whether the GPU decoder takes a video."""
        sides_fit = sample.width % self.side_step == 0 and sample.height % self.side_step == 0
        # Decoders may not agree about videos that were not re-encoded for training, which have no
        # groups.
        return sample.codec in self.names and sides_fit and video.in_groups


class EncodedVideo(NamedTuple):
    """A video in the block, left to the GPU decoder, and the clips that are cut from it."""

    # Where its bytes lie in the block.
    span: slice
    # The first byte of its groups; the header lies before it.
    header_bytes: int
    # Of each group, the byte at which the 64 bits of its start time lie, and its duration.
    times: list[tuple[int, int]]
    num_frames: int
    # The frames that clips show, in their order; a frame may repeat.
    numbers: tuple[int, ...]
    # A row for each clip.
    rows: list[PlanRow]


class Cut(NamedTuple):
    """A clip in the decoded frames of a joined video."""

    # The clip's index in the batch.
    clip: int
    row: PlanRow
    # The index of the clip's first frame among the decoded ones.
    first: int
    # The clip's frames, counted from there; (0, 1, 1) repeats the second of two decoded frames.
    order: list[int]

    @property
    def num_frames(self) -> int:
        """The number of decoded frames that the clip is made of, each counted once."""
        return max(self.order) + 1


class JoinedVideo(NamedTuple):
    data: Bytes
    # The frames to decode, ascending.
    numbers: list[int]
    cuts: list[Cut]


def find_groups(video: VideoSlice) -> tuple[int, list[tuple[int, int]]] | None:
    """Return header_bytes and times of an EncodedVideo.

    Return None for a video that cannot be joined with others.
    """
    try:
        fragments = list(read_fragments(video.data))
    except (ValueError, struct.error):
        return None
    num_frames = sum(fragment.num_frames for fragment in fragments)
    if not fragments or num_frames != video.num_frames:
        return None
    times = []
    for fragment in fragments:
        if (
            fragment.time is None
            or not fragment.duration
            or video.data[fragment.time] != VERSION_OF_64_BITS
        ):
            return None
        times.append((fragment.time + TIME_OFFSET, fragment.duration))
    return fragments[0].start, times


def join_videos(videos: Mapping[int, EncodedVideo], block: Bytes) -> list[JoinedVideo]:
    """Join videos that have the same header.

    The keys are the indices of their first clips in the batch.
    """
    alike: dict[bytes, list[tuple[int, EncodedVideo]]] = defaultdict(list)
    for first_clip, video in videos.items():
        header = block[video.span][: video.header_bytes].tobytes()
        alike[header].append((first_clip, video))
    joined = []
    for group in alike.values():
        starts = range(0, len(group), CLIPS_PER_VIDEO)
        joined += [_join(group[start : start + CLIPS_PER_VIDEO], block) for start in starts]
    return joined


def _join(videos: Sequence[tuple[int, EncodedVideo]], block: Bytes) -> JoinedVideo:
    """Join videos with one header.

    The groups of each are moved behind those of the one before, in bytes and in time. Two videos
    with a header of 700 bytes and groups of 5,000 bytes, which take 8 frames of 512 units each,
    become one of 10,700 bytes: its second group begins at byte 5,700 and is to be shown from 8 *
    512 = 4,096 units on, so frame 3 of the second video is frame 11 of both.
    """
    header_bytes = videos[0][1].header_bytes
    header = block[videos[0][1].span][:header_bytes]
    bodies = [block[video.span][header_bytes:] for _, video in videos]
    data = np.concatenate([header, *bodies])
    numbers: list[int] = []
    cuts: list[Cut] = []
    # Bytes, time and frames of the videos before the current one.
    num_bytes = 0
    time = 0
    num_frames = 0
    for (first_clip, video), body in zip(videos, bodies, strict=True):
        for offset, duration in video.times:
            start = num_bytes + offset
            struct.pack_into(">Q", data.data, start, time)
            time += duration
        # A frame is asked for once: for a repeated one, DALI would return to the beginning of the
        # video.
        unique = sorted(set(video.numbers))
        order = [unique.index(number) for number in video.numbers]
        for index, row in enumerate(video.rows):
            cuts.append(Cut(first_clip + index, row, len(numbers), order))
        numbers += [num_frames + number for number in unique]
        num_bytes += len(body)
        num_frames += video.num_frames
    return JoinedVideo(data, numbers, cuts)
