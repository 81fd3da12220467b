"""Frames straight from packets are those that FFmpeg's demuxer gives.

Whatever is unusual is left to the demuxer.
"""

import io
import struct
from collections.abc import Callable

import av
import numpy as np
import pytest
from made_videos import KINDS, cut_video, encode, store

from adamae.pipeline.decoding.packets import IDENTITY, read_header
from adamae.pipeline.decoding.video import Video, count_turns
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.shards.mp4 import read_fragments
from adamae.pipeline.video_error import VideoError
from adamae.shard_tools.codecs import CODECS

NUM_FRAMES = 38
Frames = dict[int, np.ndarray]


def decode(video: VideoSlice) -> Frames:
    """Decode the frames of a slice, and turn them upright."""
    frames = {}
    decoder = Video(video.data, video.num_frames, video.in_groups)
    for number, frame in decoder.frames(video.numbers):
        frames[number] = np.rot90(frame.to_ndarray(format="rgb24"), count_turns(frame))
    return frames


def decode_by_demuxer(video: VideoSlice) -> Frames:
    return decode(video._replace(in_groups=False))


def assert_equal(frames: Frames, expected: Frames) -> None:
    assert frames.keys() == expected.keys()
    for number, frame in frames.items():
        assert np.array_equal(frame, expected[number]), number


@pytest.mark.parametrize("codec", CODECS)
def test_frames_are_those_of_the_demuxer_and_of_the_whole_video(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = [list(range(start, start + 10)) for start in range(0, NUM_FRAMES - 9, 3)]
    clips += [[0], [NUM_FRAMES - 1], [1, 20, 37], [5, 6, 30], [7, 8, 8, 8], [3, 35]]
    data = store(codec, NUM_FRAMES)
    whole = decode_by_demuxer(VideoSlice(data, tuple(range(NUM_FRAMES)), NUM_FRAMES))
    slices = [cut_video(data, numbers, NUM_FRAMES) for numbers in clips]
    expected = [decode_by_demuxer(video) for video in slices]
    # The container is not opened: that would fail now.
    monkeypatch.setattr(Video, "_open", None)
    for video, numbers, frames in zip(slices, clips, expected, strict=True):
        assert_equal(decode(video), frames)
        for number_in_slice, number in zip(video.numbers, numbers, strict=True):
            assert np.array_equal(frames[number_in_slice], whole[number])


def test_no_more_is_decoded_than_needed() -> None:
    cut = cut_video(store("h264", NUM_FRAMES), [3, 12, 13], NUM_FRAMES)
    video = Video(cut.data, cut.num_frames, in_groups=True)
    assert len(list(video.frames(cut.numbers))) == 3
    assert video.frames_decoded == 4 + 6, "no tails of groups"


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace bytes by as many others."""
    assert old in data
    assert len(old) == len(new)
    return data.replace(old, new)


def change_extradata(data: bytes) -> bytes:
    """Garble a decoder's parameters, but for the nine bytes at their beginning."""
    _, extradata = read_header(data[: next(read_fragments(data)).start])
    assert extradata is not None
    garbled = extradata[:9] + bytes(byte ^ 0x55 for byte in extradata[9:])
    return changed(data, extradata, garbled)


def turn_track(data: bytes) -> bytes:
    """Turn the track's matrix, which comes behind the movie's, by 180 degrees."""
    before, _, after = data.rpartition(IDENTITY)
    matrix = struct.pack(">9I", 0xFFFF0000, 0, 0, 0, 0xFFFF0000, 0, 0, 0, 1 << 30)
    turned = before + matrix + after
    with av.open(io.BytesIO(turned)) as container:
        assert abs(next(container.decode(video=0)).rotation) == 180
    return turned


# A change of the video, and the reason for which it cannot be decoded, "" if it can.
UNUSUAL: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "reordered": (lambda _: encode(24, **KINDS["h264 with B-frames"]), ""),  # type: ignore[arg-type]
    "webm": (lambda _: encode(24, **KINDS["vp9"]), ""),  # type: ignore[arg-type]
    "not fragmented": (lambda _: encode(24, width=65, height=49, pix_fmt="yuv444p"), ""),
    "no extradata": (lambda data: changed(data, b"avcC", b"skip"), "cannot be opened"),
    "upside down": (turn_track, ""),
    "two tracks": (lambda data: changed(data, b"udta", b"trak"), ""),
    "edit list": (lambda data: changed(data, b"udta", b"edts"), ""),
    "extradata of another video": (change_extradata, "Invalid data"),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_unusual_gives_what_the_demuxer_gives(kind: str) -> None:
    video = cut_video(store("h264", NUM_FRAMES), [1, 9, 20], NUM_FRAMES)
    change, reason = UNUSUAL[kind]
    error = assert_same_outcome(video._replace(data=change(video.data)))
    if reason:
        assert reason in error
    else:
        assert error == ""


def assert_same_outcome(video: VideoSlice) -> str:
    """Check that both ways give the same; return the error, "" if there is none."""
    expected, expected_error = attempt(decode_by_demuxer, video)
    frames, error = attempt(decode, video)
    assert error == expected_error
    assert_equal(frames, expected)
    return error


def attempt(function: Callable[[VideoSlice], Frames], video: VideoSlice) -> tuple[Frames, str]:
    """Return the frames, or the error, of one way to decode."""
    try:
        return function(video), ""
    except VideoError as error:
        return {}, str(error)


@pytest.mark.parametrize("codec", CODECS)
def test_packets_damaged_before_the_checksum_give_what_the_demuxer_gives(codec: str) -> None:
    random = np.random.default_rng(0)
    video = cut_video(store(codec, NUM_FRAMES), [2, 9, 12], NUM_FRAMES)
    packets: list[slice] = []
    for fragment in read_fragments(video.data):
        assert fragment.packets is not None
        packets += fragment.packets
    for _ in range(12):
        data = bytearray(video.data)
        for index in random.integers(0, len(packets), 3):
            packet = packets[index]
            data[random.integers(packet.start, packet.stop)] = random.integers(256)
        assert_same_outcome(video._replace(data=bytes(data)))


def test_fragments_in_another_order_have_no_packets() -> None:
    """With composition offsets; sizes and key frames are read all the same."""
    data = store("h264", 16)
    position = data.index(b"trun") + 4
    (flags,) = struct.unpack_from(">I", data, position)
    # Instead of sizes (0x200), each frame has a composition offset (0x800).
    flags = flags & ~0x200 | 0x800
    reordered = data[:position] + struct.pack(">I", flags) + data[position + 4 :]
    first, second = read_fragments(reordered)
    assert first.packets is None
    assert second.packets is not None
    assert first.num_frames == second.num_frames == 8
