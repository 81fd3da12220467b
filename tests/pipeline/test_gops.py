"""Clips from the GOPs that they need: every frame is the same as in the whole video."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from made_videos import encode, store

from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.shards.gops import GOP, GopIndex, checksum
from adamae.pipeline.video_error import VideoError
from adamae.shard_tools.write import index_gops

NUM_FRAMES = 38


def index(data: bytes) -> GopIndex:
    return GopIndex(index_gops(data, NUM_FRAMES), len(data), NUM_FRAMES)


def reader(data: bytes) -> Callable[[int, int], bytes]:
    """Return what reads bytes of a video at an offset."""

    def read(offset: int, size: int) -> bytes:
        return data[offset : offset + size]

    return read


def test_only_the_groups_of_a_clip_are_read() -> None:
    data = store("h264", NUM_FRAMES)
    gops = index(data)
    ranges: list[tuple[int, int]] = []

    def read(offset: int, size: int) -> bytes:
        ranges.append((offset, offset + size))
        return data[offset : offset + size]

    starts = [*gops.rows["offset"].tolist(), len(data)]
    gops.slice_video(range(17, 31), read)
    assert ranges == [(0, starts[1]), (starts[3], starts[5])]
    ranges.clear()
    gops.slice_video(range(3, 12), read)
    assert ranges == [(0, starts[3])], "the header and the GOPs behind it at once"


@pytest.mark.parametrize("row", [0, 1, 3, 5])
@pytest.mark.parametrize("column", GOP.names or ())
def test_any_changed_row_is_found_where_it_would_matter(column: str, row: int) -> None:
    data = store("vp9", NUM_FRAMES)
    rows = index(data).rows
    expected = decode_frames(data, range(NUM_FRAMES), NUM_FRAMES)
    for change in (1, -1, 7):
        changed = rows.copy()
        changed[column][row] += np.array(change).astype(rows[column].dtype)
        gops = GopIndex(changed, len(data), NUM_FRAMES)
        num_errors = 0
        for number in range(NUM_FRAMES):
            try:
                cut = gops.slice_video([number], reader(data))
                (frame,) = decode_frames(cut.data, cut.numbers, cut.num_frames)
            except VideoError:
                num_errors += 1
            else:
                assert np.array_equal(frame, expected[number]), f"frame {number} is another one"
        assert num_errors


def test_changed_and_missing_bytes_are_found() -> None:
    data = store("h264", NUM_FRAMES)
    gops = index(data)
    changed = bytearray(data)
    changed[int(gops.rows["offset"][3]) + 200] ^= 1
    with pytest.raises(VideoError, match="group 3 has changed"):
        gops.slice_video([17], reader(bytes(changed)))
    gops.slice_video([3, 30], reader(bytes(changed)))
    with pytest.raises(VideoError, match="the shard ends after"):
        gops.slice_video([37], reader(data[:-100]))
    with pytest.raises(VideoError, match="frames 30 to 38 are wanted of 38"):
        gops.slice_video([30, 38], reader(data))


def test_the_checksum_is_the_one_that_is_described() -> None:
    digest = hashlib.sha256(b"\5\0\0\0abc").digest()
    assert checksum(5, b"abc") == int.from_bytes(digest[:8], "little")


def test_what_cannot_be_cut_has_no_groups() -> None:
    assert not len(index_gops(encode(20), 20)), "not fragmented"
    assert not len(index_gops(encode(20, container="matroska"), 20))
    data = store("h264", NUM_FRAMES)
    assert not len(index_gops(data, NUM_FRAMES + 1)), "frames that no fragment has"
    assert not len(index_gops(b"", 0))


def test_a_video_that_is_cut_off_has_only_whole_groups() -> None:
    data = store("h264", NUM_FRAMES)
    rows = index_gops(data, NUM_FRAMES)
    num_frames = int(rows["first_frame"][-1])
    for end in range(len(data)):
        assert len(index_gops(data[:end], num_frames)) in (0, len(rows) - 1)


def test_damaged_boxes_are_no_error() -> None:
    """A wrong index is found by its checksums; see above."""
    data = store("h264", NUM_FRAMES)
    random = np.random.default_rng(0)
    for _ in range(2000):
        broken = bytearray(data)
        for position in random.integers(0, 1200, 3):
            broken[position] = random.integers(256)
        index_gops(bytes(broken), NUM_FRAMES)


def test_fragments_that_begin_within_a_group_are_not_cut() -> None:
    """Streaming encoders write such fragments."""
    muxing = {"movflags": "+empty_moov+default_base_moof+skip_trailer", "frag_duration": "300000"}
    data = encode(24, options={"g": "8", "bf": "0"}, **muxing)
    assert data.count(b"moof") > 3
    assert not len(index_gops(data, 24))
