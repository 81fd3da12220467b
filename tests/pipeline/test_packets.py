"""Frames straight from packets are those that FFmpeg's demuxer leads to, and whatever is unusual takes that way."""

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
    """The frames, upright."""
    frames = Video(video.data, video.num_frames, video.in_groups).frames(video.numbers)
    return {
        number: np.rot90(frame.to_ndarray(format="rgb24"), count_turns(frame))
        for number, frame in frames
    }


def decode_by_demuxer(video: VideoSlice) -> Frames:
    return decode(video._replace(in_groups=False))


def assert_equal(found: Frames, expected: Frames) -> None:
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[number], expected[number]) for number in expected)


@pytest.mark.parametrize("codec", CODECS)
def test_frames_are_those_of_the_demuxer_and_of_the_whole_video(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [[*range(start, start + 10)] for start in range(0, NUM_FRAMES - 9, 3)]
    apart = [[0], [NUM_FRAMES - 1], [1, 20, 37], [5, 6, 30], [7, 8, 8, 8], [3, 35]]
    clips, data = [*places, *apart], store(codec, NUM_FRAMES)
    whole = decode_by_demuxer(VideoSlice(data, tuple(range(NUM_FRAMES)), NUM_FRAMES))
    slices = [cut_video(data, wanted, NUM_FRAMES) for wanted in clips]
    expected = [decode_by_demuxer(video) for video in slices]
    monkeypatch.setattr(Video, "_open", None)  # which is not called
    for video, wanted, frames in zip(slices, clips, expected, strict=True):
        assert_equal(decode(video), frames)
        assert all(
            np.array_equal(frames[n], whole[k]) for n, k in zip(video.numbers, wanted, strict=True)
        )


def test_no_more_is_decoded_than_needed() -> None:
    cut = cut_video(store("h264", NUM_FRAMES), [3, 12, 13], NUM_FRAMES)
    video = Video(cut.data, cut.num_frames, in_groups=True)
    assert len(list(video.frames(cut.numbers))) == 3
    assert video.frames_decoded == 4 + 6, "no tails of groups"


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    assert len(old) == len(new)
    return data.replace(old, new)


def change_extradata(data: bytes) -> bytes:
    sets = read_header(data[: next(read_fragments(data)).start])[1] or b""
    return changed(data, sets, sets[:9] + bytes(byte ^ 0x55 for byte in sets[9:]))


def turn_track(data: bytes) -> bytes:
    """Turn the track's matrix, which comes behind the movie's, by 180 degrees."""
    before, _, after = data.rpartition(IDENTITY)
    turned = before + struct.pack(">9I", 0xFFFF0000, 0, 0, 0, 0xFFFF0000, 0, 0, 0, 1 << 30) + after
    with av.open(io.BytesIO(turned)) as container:
        assert abs(next(container.decode(video=0)).rotation) == 180
    return turned


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
    video, (change, reason) = (
        cut_video(store("h264", NUM_FRAMES), [1, 9, 20], NUM_FRAMES),
        UNUSUAL[kind],
    )
    found = assert_same_outcome(video._replace(data=change(video.data)))
    assert reason in found if reason else not found


def assert_same_outcome(video: VideoSlice) -> str:
    """Return the error, if there is one."""
    (expected, reason), (found, found_reason) = (
        attempt(way, video) for way in (decode_by_demuxer, decode)
    )
    assert found_reason == reason
    assert_equal(found, expected)
    return reason


def attempt(way: Callable[[VideoSlice], Frames], video: VideoSlice) -> tuple[Frames, str]:
    try:
        return way(video), ""
    except VideoError as error:
        return {}, str(error)


@pytest.mark.parametrize("codec", CODECS)
def test_packets_damaged_before_the_checksum_give_what_the_demuxer_gives(codec: str) -> None:
    random = np.random.default_rng(0)
    video = cut_video(store(codec, NUM_FRAMES), [2, 9, 12], NUM_FRAMES)
    whole = [packet for fragment in read_fragments(video.data) for packet in fragment.packets or ()]
    for _ in range(12):
        data = bytearray(video.data)
        for packet in (whole[place] for place in random.integers(0, len(whole), 3)):
            data[random.integers(packet.start, packet.stop)] = random.integers(256)
        assert_same_outcome(video._replace(data=bytes(data)))


def test_fragments_in_another_order_have_no_packets() -> None:
    """With composition offsets; sizes and key frames are read all the same."""
    data = store("h264", 16)
    at = data.index(b"trun")
    (bits,) = struct.unpack_from(">I", data, at + 4)
    reordered = data[: at + 4] + struct.pack(">I", bits & ~0x200 | 0x800) + data[at + 8 :]
    assert [fragment.packets is None for fragment in read_fragments(reordered)] == [True, False]
    assert [fragment.num_frames for fragment in read_fragments(reordered)] == [8, 8]
