"""Edits of what a video is made of: the boxes of an MP4, the packets of any container, and what it claims to be."""

import io
import struct
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import av

PARENTS = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"dinf", b"moof", b"traf", b"mvex", b"udta"}
NUMBERS = (0, 1, 2, 15, 16, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
# Where what a playlist names would be, seen from the video's own folder and from that of the command.
ELSEWHERE = ("../../elsewhere/secret.mp4", "../elsewhere/secret.mp4")


class Box(NamedTuple):
    start: int
    end: int
    kind: bytes


def boxes(data: bytes, start: int = 0, end: int | None = None, depth: int = 0) -> Iterator[Box]:
    """All boxes of an MP4 file, parents before their children."""
    end = len(data) if end is None else end
    while start + 8 <= end and depth < 8:
        size, kind = struct.unpack_from(">I4s", data, start)
        stop = min(end, start + size) if size >= 8 else end
        yield Box(start, stop, kind)
        if kind in PARENTS:
            yield from boxes(data, start + 8, stop, depth + 1)
        start = stop


def box_field(data: bytes, rng: Random) -> bytes:
    """Four bytes in a small box (sizes, times, counts, the matrix, the picture's sides) say something else."""
    found = [box for box in boxes(data) if box.kind not in PARENTS | {b"mdat"} and box.end - box.start >= 16]
    if not found:
        return data
    box = rng.choice(found)
    place = rng.randrange(box.start + 8, box.end - 3)
    place -= (place - box.start) % 4 if rng.random() < 0.8 else 0
    (old,) = struct.unpack_from(">I", data, place)
    value = rng.choice((*NUMBERS, old + 1, old - 1, old * 2, rng.getrandbits(32))) % 2**32
    return data[:place] + struct.pack(">I", value) + data[place + 4 :]


def box_size(data: bytes, rng: Random) -> bytes:
    found = list(boxes(data))
    if not found:
        return data
    box = rng.choice(found)
    size = rng.choice((0, 1, 7, 8, 9, box.end - box.start + 8, len(data), 2**31, 2**32 - 1))
    return data[: box.start] + struct.pack(">I", size) + data[box.start + 4 :]


def box_kind(data: bytes, rng: Random) -> bytes:
    found = list(boxes(data))
    if not found:
        return data
    box, other = rng.choice(found), rng.choice(found)
    kind = rng.choice((other.kind, b"free", b"uuid", b"\0\0\0\0"))
    return data[: box.start + 4] + kind + data[box.start + 8 :]


def box_moved(data: bytes, rng: Random) -> bytes:
    """A box is gone, stands twice, or stands elsewhere, with the sizes of those around it left as they were."""
    found = list(boxes(data))
    if not found:
        return data
    box, other = rng.choice(found), rng.choice(found)
    piece = data[box.start : box.end]
    without = data[: box.start] + data[box.end :]
    place = min(other.start, len(without))
    return rng.choice((without, data[: box.end] + data[box.start :], without[:place] + piece + without[place:]))


def packets(data: bytes, rng: Random) -> bytes:
    """The packets are lost, doubled, out of order, damaged, or at other times; the container is whole."""
    try:
        return _remuxed(data, rng)
    except (av.error.FFmpegError, ValueError, TypeError, OverflowError, struct.error):
        return data


def _remuxed(data: bytes, rng: Random) -> bytes:
    target = io.BytesIO()
    with av.open(io.BytesIO(data)) as source:
        name = source.format.name.split(",")[0]
        with av.open(target, "w", format={"mov": "mp4"}.get(name, name)) as output:
            stream = source.streams.video[0]
            packets = [packet for packet in source.demux(stream) if packet.size]
            for packet in _edited(packets, rng):
                packet.stream = _copy_of(stream, output)
                output.mux(packet)
    return target.getvalue()


def _copy_of(stream: Any, output: Any) -> Any:
    return output.streams.video[0] if output.streams.video else output.add_stream_from_template(stream)


def _edited(packets: list[Any], rng: Random) -> list[Any]:
    place = rng.randrange(len(packets))
    packet = packets[place]
    kind = rng.randrange(7)
    if kind == 0:
        del packets[place : place + rng.choice((1, 1, 4))]
    elif kind == 1:
        packets.insert(rng.randrange(len(packets)), packets.pop(place))
    elif kind == 2:
        shift = rng.choice((-(2**31), -1000, -1, 1, 1000, 2**31, 2**40))
        for later in packets[place:]:
            later.pts, later.dts = (later.pts or 0) + shift, (later.dts or 0) + shift
    elif kind == 3:
        packet.pts = rng.choice((None, 0, -1, packets[-1].pts, (packet.pts or 0) + 1, 2**40))
    elif kind == 4:
        packet.is_keyframe = not packet.is_keyframe
    elif kind == 5:
        for one in packets:
            one.duration = rng.choice((0, 1, 2**31))
    else:
        content = bytearray(packet)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        packet.update(bytes(content))
    return packets


def playlist(data: bytes, rng: Random) -> bytes:
    """The file is a text that asks FFmpeg to open another file, or a port."""
    where = rng.choice(ELSEWHERE)
    return rng.choice(
        (
            f"ffconcat version 1.0\nfile {where}\nduration 1\n",
            f"ffconcat version 1.0\nfile 'file:{where}'\nfile 'subfile,,start,0,end,0,,:{where}'\n",
            f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1.0,\n{where}\n#EXT-X-ENDLIST\n",
            "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1.0,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
            "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 15004 RTP/AVP 96\n"
            "a=rtpmap:96 H264/90000\n",
            f'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"'
            f' mediaPresentationDuration="PT1S"><Period><AdaptationSet mimeType="video/mp4"><Representation id="1"'
            f' bandwidth="1"><BaseURL>{where}</BaseURL></Representation></AdaptationSet></Period></MPD>',
            f"RTSPtext\nrtsp://127.0.0.1:9/{where}\n",
            f"[playlist]\nFile1={where}\n",
        )
    ).encode()


BOXES = (box_field, box_field, box_field, box_size, box_kind, box_moved)
EDITS = (*BOXES, packets, packets, packets)
