"""Clips out of the groups of pictures that they need: every frame is the one that it is in the whole video."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from made_videos import encode, store

from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.shards.gops import GOP as GOP_ROW
from adamae.pipeline.shards.gops import GopIndex, checksum
from adamae.pipeline.video_error import VideoError
from adamae.shard_tools.write import index_gops

NUM_FRAMES, GOP = 38, 8


def groups_of(data: bytes) -> GopIndex:
    return GopIndex(index_gops(data, NUM_FRAMES), len(data), NUM_FRAMES)


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


def test_only_the_groups_of_a_clip_are_read() -> None:
    data = store("h264", NUM_FRAMES)
    groups, read = groups_of(data), []

    def ranges(offset: int, size: int) -> bytes:
        read.append((offset, offset + size))
        return data[offset : offset + size]

    starts = [*groups.rows["offset"].tolist(), len(data)]
    groups.slice_video(range(17, 31), ranges)
    assert read == [(0, starts[1]), (starts[3], starts[5])]
    read.clear()
    groups.slice_video(range(3, 12), ranges)
    assert read == [(0, starts[3])], "the first bytes and the groups behind them at once"


@pytest.mark.parametrize(
    ("column", "row"), [(c, r) for c in GOP_ROW.names or () for r in (0, 1, 3, 5)]
)
def test_any_changed_row_is_found_where_it_would_matter(column: str, row: int) -> None:
    data = store("vp9", NUM_FRAMES)
    groups = groups_of(data)
    whole = decode_frames(data, range(NUM_FRAMES), NUM_FRAMES)
    for change in (1, -1, 7):
        rows = groups.rows.copy()
        rows[column][row] += np.array(change).astype(rows[column].dtype)
        found = 0
        for wanted in range(NUM_FRAMES):
            try:
                cut = GopIndex(rows, len(data), NUM_FRAMES).slice_video([wanted], reader(data))
                (frame,) = decode_frames(cut.data, cut.numbers, cut.num_frames)
            except VideoError:
                found += 1
            else:
                assert np.array_equal(frame, whole[wanted]), f"frame {wanted} is another one"
        assert found


def test_changed_and_missing_bytes_are_found() -> None:
    data = store("h264", NUM_FRAMES)
    groups = groups_of(data)
    place = int(groups.rows["offset"][3]) + 200
    other = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    with pytest.raises(VideoError, match="group 3 has changed"):
        groups.slice_video([17], reader(other))
    groups.slice_video([3, 30], reader(other))
    with pytest.raises(VideoError, match="the shard ends after"):
        groups.slice_video([37], reader(data[:-100]))
    with pytest.raises(VideoError, match="frames 30 to 38 are wanted of 38"):
        groups.slice_video([30, 38], reader(data))


def test_the_checksum_is_the_one_that_is_described() -> None:
    assert checksum(5, b"abc") == int.from_bytes(
        hashlib.sha256(b"\5\0\0\0abc").digest()[:8], "little"
    )


def test_what_cannot_be_cut_has_no_groups() -> None:
    assert not len(index_gops(encode(20), 20)), "not fragmented"
    assert not len(index_gops(encode(20, container="matroska"), 20))
    data = store("h264", NUM_FRAMES)
    assert not len(index_gops(data, NUM_FRAMES + 1)), "frames that no fragment has"
    assert not len(index_gops(b"", 0))
    rows = index_gops(data, NUM_FRAMES)
    for end in range(len(data)):
        found = index_gops(data[:end], int(rows["first_frame"][-1]))
        assert len(found) in (0, len(rows) - 1)
    random = np.random.default_rng(0)
    for _ in range(2000):
        broken = bytearray(data)
        for place in random.integers(0, 1200, 3):
            broken[place] = random.integers(256)
        index_gops(bytes(broken), NUM_FRAMES)  # any answer, but no exception


def test_fragments_that_begin_within_a_group_are_not_cut() -> None:
    """As streaming encoders write them."""
    muxing = {"movflags": "+empty_moov+default_base_moof+skip_trailer", "frag_duration": "300000"}
    data = encode(24, options={"g": "8", "bf": "0"}, **muxing)
    assert data.count(b"moof") > 3
    assert not len(index_gops(data, 24))
