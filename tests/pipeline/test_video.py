"""Frame k is the k-th that decodes from the start: for every codec, container and kind of frame."""

import io
from pathlib import Path

import av
import numpy as np
import pytest
from made_videos import KINDS, LEVELS, X264, encode, read_number, remux
from PIL import Image

from adamae.pipeline.decoding.sources import CLIP_SOURCES, decode_frames
from adamae.pipeline.decoding.video import Video, as_rgb
from adamae.pipeline.planning.crops import Crop
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.video_error import VideoError


def decode_all(data: bytes) -> list[np.ndarray]:
    """Decode all frames, counted from the start."""
    with av.open(io.BytesIO(data)) as video:
        return [as_rgb(frame) for frame in video.decode(video=0)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_frame_asked_for_is_the_frame_given(kind: str) -> None:
    data = encode(50, pattern=True, **KINDS[kind])  # type: ignore[arg-type]
    expected = decode_all(data)
    requests = [[number] for number in range(50)]
    requests += [[number, min(number + 7, 49)] for number in range(50)]
    requests += [[13, 14, 15], [25, 24, 25], [2, 40, 41]]
    requests += [list(range(3, 50, 4)), list(range(50))]
    for numbers in requests:
        frames = decode_frames(data, numbers, num_frames=50)
        assert np.array_equal(frames, [expected[number] for number in numbers]), numbers


def test_no_more_is_decoded_than_needed() -> None:
    def decoded(data: bytes, numbers: list[int], num_frames: int = 50) -> int:
        video = Video(data, num_frames)
        shown = [(number, read_number(as_rgb(frame))) for number, frame in video.frames(numbers)]
        assert shown == [(number, number % LEVELS) for number in numbers]
        return video.frames_decoded

    short = encode(50, options={"g": "8", "bf": "0"})
    assert decoded(short, list(range(17, 25))) == 9, "from keyframe 16 on"
    assert decoded(short, [47]) == 8
    assert decoded(short, [0, 40]) == 2, "what lies between is jumped over"
    assert decoded(short, [1, 9]) == 4, "and the rest of a group"
    assert decoded(short, [0]) == 1
    assert decoded(short, [25], num_frames=51) == 26, "counted from the start: the number differs"
    options = {"g": "48", "bf": "3", "b-pyramid": "none", "b_strategy": "0", "sc_threshold": "0"}
    reordered = encode(50, options=options)
    assert decoded(reordered, [4, 16, 28]) <= 12, "B-frames that nobody asked for are left out"
    matroska = encode(50, **KINDS["h264 in mkv"])  # type: ignore[arg-type]
    with av.open(io.BytesIO(matroska)) as video:
        assert next(video.demux(video=0)).dts is None
    assert decoded(matroska, [45]) <= 12, "from the keyframe before, also without decoding times"


def test_edit_lists_hide_frames() -> None:
    """A cut between keyframes: the container says to decode some frames and not to show them."""

    def shift(packet: av.Packet, _: int) -> av.Packet:
        # Five frames of 1/8 s.
        num_units = round(5 / 8 / packet.time_base)
        packet.pts -= num_units
        packet.dts -= num_units
        return packet

    cut = remux(encode(40, options={**X264, "g": "10", "bf": "2"}), "mp4", shift)
    visible = [read_number(frame) for frame in decode_all(cut)]
    assert 30 <= len(visible) < 40, "the edit list takes effect"
    for number, expected in enumerate(visible):
        assert read_number(decode_frames(cut, [number], num_frames=len(visible))[0]) == expected


def test_variable_frame_rate_and_late_start() -> None:
    def spread(packet: av.Packet, index: int) -> av.Packet:
        time_in_frames = 3 + index + 0.4 * (index % 3)
        packet.pts = packet.dts = int(time_in_frames / 8 / packet.time_base)
        return packet

    data = remux(encode(30, options={**X264, "g": "10", "bf": "0"}), "mp4", spread)
    for numbers in (list(range(30)), [29, 11]):
        shown = [read_number(frame) for frame in decode_frames(data, numbers, 30)]
        assert shown == [number % LEVELS for number in numbers]


@pytest.mark.parametrize("angle", [0, 90, 180, 270])
def test_rotation_is_undone(angle: int) -> None:
    data = encode(1, pattern=True, rotation=angle)
    (upright,) = decode_frames(data, [0])
    (stored,) = decode_frames(encode(1, pattern=True), [0])
    assert np.array_equal(upright, np.rot90(stored, angle // 90))
    height, width = upright.shape[:2]
    sample = Sample("v", "mp4", "h264", 1, 8.0, 1, width, height, None, "", "")
    scaled = np.array(Image.fromarray(upright).resize((64, 64), Image.Resampling.BILINEAR))
    assert np.abs(clip_of_one_frame(data, sample, 64).astype(int) - scaled).mean() < 4


def clip_of_one_frame(data: bytes, sample: Sample, size: int, number: int = 0) -> np.ndarray:
    """Scale the whole frame as the loader does."""
    row = PlanRow(0, 0, (number,), Crop(0, 0, sample.width, sample.height), flip=False)
    video = VideoSlice(data, row.frames, sample.num_frames)
    clips = np.empty((1, 1, size, size, 3), np.uint8)
    CLIP_SOURCES["video"].cut_views(video, sample, [row], clips)
    return clips[0, 0]


@pytest.mark.parametrize(
    "data", [b"", b"no video at all", encode(10)[:700]], ids=["empty", "text", "cut short"]
)
def test_what_is_no_video_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(VideoError, match="cannot be opened"):
        decode_frames(data, [0])


def test_frames_beyond_the_end_are_an_error() -> None:
    with pytest.raises(VideoError, match="frame 10 does not decode"):
        decode_frames(encode(10), [8, 10])
    with pytest.raises(ValueError, match="negative"):
        decode_frames(encode(10), [-1])


# Decodes 40 videos whole.
@pytest.mark.slow
def test_real_clips_of_every_kind(shared_folder: Path | None) -> None:
    """Frames from keyframes equal frames counted from the start, whoever has encoded them."""
    if shared_folder is None:
        pytest.skip("no shared clips beside the repository")
    checked = 0
    # The folders derived and edge, whose videos are small.
    for path in sorted((shared_folder / "videos").glob("[de][ed][rg]*/*.*")):
        if path.suffix == ".tsv" or path.stat().st_size > 2_000_000:
            continue
        data = path.read_bytes()
        try:
            expected = decode_all(data)
        except av.error.FFmpegError:
            continue
        numbers = sorted({0, len(expected) // 3, len(expected) // 2, len(expected) - 1})
        for number, frame in Video(data, len(expected)).frames(numbers):
            assert np.array_equal(as_rgb(frame), expected[number]), (path.name, number)
            checked += 1
        upright = decode_frames(data, [numbers[-1]], len(expected))[0]
        height, width = upright.shape[:2]
        sample = Sample("v", "", "", len(expected), 8.0, 1, width, height, None, "", "")
        clip = clip_of_one_frame(data, sample, 112, numbers[-1]).astype(float)
        scaled = np.array(Image.fromarray(upright).resize((112, 112), Image.Resampling.BILINEAR))
        # It is 2 for real videos; one of 64x64 pixels has the finest colors.
        assert np.abs(clip - scaled).mean() < 8, path.name
    assert checked > 40
