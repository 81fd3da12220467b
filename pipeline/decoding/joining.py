"""Videos of clips joined into one, since opening a video costs DALI more than decoding a clip.

What is stored for training consists of groups of pictures that need no others. So videos that begin with the same bytes
(size, parameters of the codec) are one video where the groups of one follow those of another, in bytes and in time.
"""

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from pipeline.planning.plan import PlanRow
from pipeline.shards.gops import VideoSlice, read_fragments

CLIPS_PER_VIDEO = 8  # beyond, what opening a video costs is little beside its frames
OF_64_BITS = 1  # version of the box tfdt

Bytes = UInt8[np.ndarray, " bytes"]


class EncodedVideo(NamedTuple):
    """A video that is left to DALI: where its bytes lie in the block, and what is wanted of it."""

    start: int
    num_bytes: int
    groups: "Groups"
    num_frames: int
    numbers: tuple[int, ...]  # of the wanted frames
    rows: list[PlanRow]

    def read(self, block: Bytes) -> Bytes:
        return block[self.start : self.start + self.num_bytes]


class Groups(NamedTuple):
    """Of the groups of pictures of a video, what joining it needs."""

    first: int  # byte; the header lies before it
    times: list[tuple[int, int]]  # of each, the byte from which on it is told when it begins, and how long it takes


class Cut(NamedTuple):
    """A clip in the frames of a joined video that are decoded."""

    clip: int  # its index in the batch
    row: PlanRow
    first: int  # of its frames among these
    order: list[int]  # of the clip's frames, from there on

    @property
    def num_frames(self) -> int:
        return max(self.order) + 1


class JoinedVideo(NamedTuple):
    data: Bytes
    numbers: list[int]  # of the frames to decode, ascending
    cuts: list[Cut]


def find_groups(video: VideoSlice) -> Groups | None:
    """Return None for a video that cannot be joined with others."""
    with suppress(ValueError, IndexError, struct.error):
        fragments = list(read_fragments(video.data))
        times = [
            (fragment.time + 4, fragment.duration)
            for fragment in fragments
            if fragment.duration and fragment.time is not None and video.data[fragment.time] == OF_64_BITS
        ]
        if len(times) == len(fragments) and sum(fragment.num_frames for fragment in fragments) == video.num_frames:
            return Groups(fragments[0].start, times)
    return None


def join_videos(videos: Mapping[int, EncodedVideo], block: Bytes) -> list[JoinedVideo]:
    """Join videos by their headers; the keys are the batch's indices of their first clips."""
    alike: dict[bytes, list[tuple[int, EncodedVideo]]] = defaultdict(list)
    for first, video in videos.items():
        alike[video.read(block)[: video.groups.first].tobytes()].append((first, video))
    parts = [
        group[start : start + CLIPS_PER_VIDEO]
        for group in alike.values()
        for start in range(0, len(group), CLIPS_PER_VIDEO)
    ]
    return [_join(part, block) for part in parts]


def _join(videos: Sequence[tuple[int, EncodedVideo]], block: Bytes) -> JoinedVideo:
    header = videos[0][1].groups.first
    views = [video.read(block) for _, video in videos]
    data = np.concatenate([views[0][:header], *(view[header:] for view in views)])
    numbers: list[int] = []
    cuts: list[Cut] = []
    moved = time = before = 0  # bytes, time and frames of the videos before
    for first, video in videos:
        for place, duration in video.groups.times:
            data[moved + place :][:8] = np.frombuffer(struct.pack(">Q", time), np.uint8)
            time += duration
        unique = sorted(set(video.numbers))  # for a repeated frame, DALI would return to the beginning
        order = [unique.index(number) for number in video.numbers]
        cuts += [Cut(first + i, row, len(numbers), order) for i, row in enumerate(video.rows)]
        numbers += [before + number for number in unique]
        moved += video.num_bytes - header
        before += video.num_frames
    return JoinedVideo(data, numbers, cuts)
