"""Which videos DALI decodes, joined into one, since opening a video costs DALI more than decoding a clip.

What is stored for training consists of groups of pictures that need no others. So videos that begin with the same bytes
(size, parameters of the codec) are one video where the groups of one follow those of another, in bytes and in time.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from pipeline.planning.plan import PlanRow
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice
from pipeline.shards.mp4 import read_fragments

CLIPS_PER_VIDEO = 8  # beyond, what opening a video costs is little beside its frames
OF_64_BITS = 1  # version of the box tfdt

Bytes = UInt8[np.ndarray, " bytes"]


class DaliPolicy(NamedTuple):
    """A pure function of video and place, so that the same videos go to the same decoder in every run with the same
    configuration, except after failures of DALI, which a resumed run does not remember."""

    codecs: frozenset[str] = frozenset()  # that DALI decodes, and is to decode
    share: float = 0.0  # of the videos; of what a chunk may leave to DALI
    side_step: int = 1  # sides must be multiples of this: see format.SIDE_STEP

    def suits_dali(self, sample: Sample, decode: int, video: VideoSlice) -> bool:
        """Return whether DALI decodes a video; `decode`: number of the decode in the run."""
        sides_fit = not (sample.width % self.side_step or sample.height % self.side_step)
        # What was re-encoded for training has groups; decoders may not agree about other videos.
        return sample.codec in self.codecs and sides_fit and video.in_groups and is_in_share(self.share, decode)


def is_in_share(share: float, number: int) -> bool:
    """Return whether a number is one of a `share` of all, which is spread evenly."""
    return math.floor((number + 1) * share) > math.floor(number * share)


class EncodedVideo(NamedTuple):
    """A video that is left to DALI: where its bytes lie in the block, and what is wanted of it."""

    place: slice
    first_group: int  # byte; the header lies before it
    times: list[tuple[int, int]]  # of each group, the byte from which on it is told when it begins, and its duration
    num_frames: int
    numbers: tuple[int, ...]  # of the wanted frames
    rows: list[PlanRow]


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


def find_groups(video: VideoSlice) -> tuple[int, list[tuple[int, int]]] | None:
    """Return EncodedVideo's first_group and times; None for a video that cannot be joined with others."""
    with suppress(ValueError, IndexError, struct.error):
        fragments = list(read_fragments(video.data))
        times = [
            (fragment.time + 4, fragment.duration) for fragment in fragments if fragment.time and fragment.duration
        ]
        have_64_bits = all(video.data[time - 4] == OF_64_BITS for time, _ in times)
        num_frames = sum(fragment.num_frames for fragment in fragments)
        if have_64_bits and len(times) == len(fragments) and num_frames == video.num_frames:
            return fragments[0].start, times
    return None


def join_videos(videos: Mapping[int, EncodedVideo], block: Bytes) -> list[JoinedVideo]:
    """Join videos by their headers; the keys are the batch's indices of their first clips."""
    alike: dict[bytes, list[tuple[int, EncodedVideo]]] = defaultdict(list)
    for first, video in videos.items():
        alike[block[video.place][: video.first_group].tobytes()].append((first, video))
    starts = [(group, start) for group in alike.values() for start in range(0, len(group), CLIPS_PER_VIDEO)]
    return [_join(group[start : start + CLIPS_PER_VIDEO], block) for group, start in starts]


def _join(videos: Sequence[tuple[int, EncodedVideo]], block: Bytes) -> JoinedVideo:
    header = videos[0][1].first_group
    bodies = [block[video.place][header:] for _, video in videos]
    data = np.concatenate([block[videos[0][1].place][:header], *bodies])
    numbers: list[int] = []
    cuts: list[Cut] = []
    moved = time = before = 0  # bytes, time and frames of the videos before
    for (first, video), body in zip(videos, bodies, strict=True):
        for place, duration in video.times:
            data[moved + place :][:8] = np.frombuffer(struct.pack(">Q", time), np.uint8)
            time += duration
        unique = sorted(set(video.numbers))  # for a repeated frame, DALI would return to the beginning
        order = [unique.index(number) for number in video.numbers]
        cuts += [Cut(first + i, row, len(numbers), order) for i, row in enumerate(video.rows)]
        numbers += [before + number for number in unique]
        moved += len(body)
        before += video.num_frames
    return JoinedVideo(data, numbers, cuts)
