"""Videos that are joined into one: every frame is the same as in its own video, bit for bit."""

import io
from itertools import cycle

import av
import numpy as np
import pytest
from made_videos import cut_video, encode, store

from adamae.pipeline.decoding.encoded import EncodedVideo
from adamae.pipeline.decoding.joining import join_videos
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.planning.crops import Crop
from adamae.pipeline.planning.plan import PlanRow, index_frames
from adamae.pipeline.shards.gops import VideoSlice
from adamae.shard_tools.codecs import CODECS

NUM_FRAMES = 21
# The frames of each clip: groups in a row and apart, repeated frames, whole and half used groups.
CLIPS = [(0, 1, 2, 3), (7, 8, 9, 10), (2, 10, 18, 18), (20, 20, 20, 20), (5, 9, 13, 17)]


def cut_clips(codec: str, **settings: int) -> list[VideoSlice]:
    """Cut the slices of CLIPS out of videos that show other frames each."""
    slices = []
    for index, numbers in enumerate(CLIPS):
        data = store(codec, NUM_FRAMES, first=5 * index, **settings)
        slices.append(cut_video(data, sorted(set(numbers)), NUM_FRAMES))
    return slices


def lay_out(slices: list[VideoSlice]) -> tuple[dict[int, EncodedVideo], np.ndarray]:
    """Lay slices into a block as a decode worker does, two views of each."""
    videos = {}
    start = 0
    for index, (video, frames) in enumerate(zip(slices, cycle(CLIPS), strict=False)):
        rows = [
            PlanRow(0, 0, frames, Crop(0, 0, 32, 24), flip=False),
            PlanRow(0, 0, frames, Crop(3, 1, 32, 24), flip=True),
        ]
        encoded = EncodedVideo.find(video, rows)
        assert encoded is not None
        span = slice(start, start + len(video.data))
        videos[2 * index] = encoded._replace(span=span)
        start = span.stop
    return videos, np.frombuffer(b"".join(video.data for video in slices), np.uint8)


@pytest.mark.parametrize("codec", CODECS)
def test_joined_clips_are_decoded_as_alone(codec: str) -> None:
    slices = cut_clips(codec)
    (joined,) = join_videos(*lay_out(slices))
    num_frames = sum(video.num_frames for video in slices)
    frames = decode_frames(joined.data.tobytes(), joined.numbers, num_frames)
    assert joined.numbers == sorted(set(joined.numbers))
    assert [cut.clip for cut in joined.cuts] == list(range(2 * len(slices)))
    for cut in joined.cuts:
        video = slices[cut.clip // 2]
        alone = decode_frames(video.data, video.numbers, video.num_frames)
        (indices,) = index_frames([cut.row])
        clip = np.stack([frames[cut.first + index] for index in cut.order])
        assert np.array_equal(clip, alone[indices])
    with av.open(io.BytesIO(joined.data)) as container:
        times = [packet.dts for packet in container.demux(video=0) if packet.size]
    assert len(times) == num_frames
    assert len(set(np.diff(times))) == 1, "no gaps, and never back"


def test_only_videos_of_one_size_are_joined_and_few_at_a_time() -> None:
    videos, block = lay_out([*2 * cut_clips("h264"), *cut_clips("h264", width=80)])
    joined = [[cut.clip for cut in video.cuts] for video in join_videos(videos, block)]
    assert joined == [[*range(16)], [*range(16, 20)], [*range(20, 30)]]


@pytest.mark.parametrize(
    ("data", "num_frames"),
    [(encode(20), 20), (store("h264", 16), 15), (store("h264", 16)[:-9], 16), (b"no video", 1)],
    ids=["not fragmented", "other frames than the table says", "cut short", "none"],
)
def test_what_cannot_be_joined(data: bytes, num_frames: int) -> None:
    assert EncodedVideo.find(VideoSlice(data, (0,), num_frames), []) is None
