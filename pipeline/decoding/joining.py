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

from adamae.pipeline.decoding.encoded import Bytes, EncodedVideo
from adamae.pipeline.planning.plan import PlanRow, index_frames

# With more clips in a video, the cost of opening it is little beside that of its frames.
CLIPS_PER_VIDEO = 8


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


def cut_clips(first_clip: int, rows: list[PlanRow], first_frame: int) -> list[Cut]:
    """Return the cuts of a video's clips, whose frames were decoded from `first_frame` on."""
    cuts = []
    for clip, (row, indices) in enumerate(zip(rows, index_frames(rows), strict=True), first_clip):
        first = min(indices)
        order = [index - first for index in indices]
        cuts.append(Cut(clip, row, first_frame + first, order))
    return cuts


class JoinedVideo(NamedTuple):
    data: Bytes
    # The frames to decode, ascending.
    numbers: list[int]
    cuts: list[Cut]


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
        cuts += cut_clips(first_clip, video.rows, len(numbers))
        # A frame is asked for once: for a repeated one, DALI would return to the beginning of the
        # video.
        numbers += [num_frames + number for number in video.numbers]
        num_bytes += len(body)
        num_frames += video.num_frames
    return JoinedVideo(data, numbers, cuts)
