"""Small videos and shards made on the spot.

The number of every frame can be read from its pixels, also after a crop.
"""

import hashlib
import io
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np

from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import SAMPLE, DatasetInfo, Sample
from adamae.pipeline.shards.gops import GopIndex, VideoSlice
from adamae.pipeline.shards.index import Tables
from adamae.shard_tools.codecs import CODECS, open_encoder
from adamae.shard_tools.encoding.encode import VideoWriter
from adamae.shard_tools.encoding.picture import FrameConverter
from adamae.shard_tools.settings import Settings
from adamae.shard_tools.write import index_gops, publish_tables, write_shard

# Gray levels that survive any codec and any scaling.
LEVELS = 22

X264 = {"preset": "ultrafast"}
X265 = {"preset": "ultrafast", "x265-params": "keyint=10:open-gop=1:log-level=0"}
VPX = {"g": "12", "lag-in-frames": "16", "auto-alt-ref": "1"}
# For lp=1 see av1 in shard_tools/codecs.py.
SVT = {"g": "12", "preset": "12", "svtav1-params": "lp=1"}
KINDS: dict[str, dict[str, object]] = {
    "h264 without B-frames": {"options": {**X264, "g": "8", "bf": "0"}},
    "h264 with B-frames": {"options": {**X264, "g": "12", "bf": "3", "b-pyramid": "normal"}},
    "h264 with open GOPs": {
        "options": {**X264, "g": "10", "bf": "3", "x264-params": "open-gop=1:scenecut=0"}
    },
    "h264 in mkv": {"container": "matroska", "options": {**X264, "g": "12", "bf": "3"}},
    "h264 intra refresh": {"options": {**X264, "g": "12", "x264-params": "intra-refresh=1"}},
    "h264, one keyframe": {"options": {**X264, "g": "250", "bf": "2"}},
    "hevc with open GOPs": {"codec": "libx265", "options": X265},
    "vp9": {"codec": "libvpx-vp9", "container": "webm", "options": VPX},
    "vp8": {"codec": "libvpx", "container": "webm", "options": VPX},
    "av1 with hidden frames": {"codec": "libsvtav1", "options": SVT},
    "mpeg4 with B-frames": {
        "codec": "mpeg4",
        "container": "avi",
        "options": {"g": "12", "bf": "2", "b": "8M"},
    },
    "mjpeg": {"codec": "mjpeg", "container": "avi"},
}


def gray(number: int) -> int:
    """Return the level that stands for a frame's number."""
    return 20 + 10 * (number % LEVELS)


def read_number(image: np.ndarray) -> int:
    """Return the number, modulo LEVELS, that a frame [H, W, 3] of `encode` shows."""
    return round((float(image.mean()) - 20) / 10) % LEVELS


def drawn(number: int, width: int, height: int, pattern: bool) -> np.ndarray:
    """Draw a frame whose gray tells its number, uint8 [H, W, 3].

    With `pattern`, ramps of red and green lie over it, and the number cannot be read.
    """
    image = np.full((height, width, 3), gray(number), np.uint8)
    if pattern:
        image[..., 0] = np.linspace(0, 255, width)
        image[..., 1] = np.linspace(0, 255, height)[:, None]
    return image


def encode(
    num_frames: int,
    *,
    codec: str = "libx264",
    container: str = "mp4",
    width: int = 64,
    height: int = 48,
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    first: int = 0,
    pattern: bool = False,
    rotation: int = 0,
    **muxing: str,
) -> bytes:
    """Encode a video whose frame k is `drawn` of `first` + k.

    A player turns it counter-clockwise by `rotation` degrees. `muxing` are options of the
    container.
    """
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=muxing) as output:
        output.metadata["title"] = "TITLE"
        stream = output.add_stream(codec, rate=Fraction(8))
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else pix_fmt
        stream.options = options or {}
        if rotation:
            stream.set_display_rotation(rotation)
        open_encoder(stream.codec_context)
        for number in range(first, first + num_frames):
            image = drawn(number, width, height, pattern)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def keep(packet: av.Packet, _: int) -> av.Packet:
    return packet


def remux(
    data: bytes,
    container: str,
    change: Callable[[av.Packet, int], av.Packet] = keep,
    **options: str,
) -> bytes:
    """Write the packets, each as `change`(packet, number) returns it, to another container."""
    with tempfile.NamedTemporaryFile() as file:
        with (
            av.open(io.BytesIO(data)) as source,
            av.open(file.name, "w", format=container, options=options) as output,
        ):
            stream = output.add_stream_from_template(source.streams.video[0])
            packets = [packet for packet in source.demux(video=0) if packet.size]
            for number, packet in enumerate(packets):
                changed = change(packet, number)
                changed.stream = stream
                output.mux(changed)
        return Path(file.name).read_bytes()


@cache
def store(
    codec: str,
    num_frames: int,
    *,
    gop: int = 8,
    width: int = 64,
    height: int = 48,
    first: int = 0,
    pattern: bool = False,
) -> bytes:
    """Make what make_shards stores of frames that tell their numbers, `first` + k.

    Moving noise lies over them or, with `pattern`, what `drawn` draws.
    """
    noise = np.random.default_rng(0).integers(-12, 13, (height, width, 3))
    convert = FrameConverter(CODECS[codec], None, Fraction(1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "video.mp4")
        writer = VideoWriter(path, Settings(encode=codec, gop=gop), Fraction(8), (width, height))
        for number in range(num_frames):
            image = drawn(first + number, width, height, pattern)
            if not pattern:
                image = (image + np.roll(noise, 3 * number, axis=1)).astype(np.uint8)
            writer.write(convert(av.VideoFrame.from_ndarray(image, format="rgb24")))
        writer.close()
        return path.read_bytes()


def cut_video(data: bytes, numbers: Sequence[int], num_frames: int) -> VideoSlice:
    """Cut out what a clip reads of a stored video."""
    groups = GopIndex(index_gops(data, num_frames), len(data), num_frames)
    return groups.slice_video(numbers, lambda offset, size: data[offset : offset + size])


def write_shards(
    folder: Path,
    videos: list[tuple[str, bytes]],
    *,
    per_shard: int = 4,
    classes: int = 0,
    container: str = "mp4",
    broken: dict[str, bytes] | None = None,
    **columns: list[Any],
) -> Path:
    """Write a dataset folder as shard_tools does.

    Video i has the label i modulo `classes`; `columns` replace fields of the samples, one value
    each. `broken` has, by key, what is stored instead of the video that the tables describe.
    """
    folder.mkdir(parents=True)
    stored = dict(videos) | (broken or {})
    with tempfile.TemporaryDirectory() as temporary:
        pairs = []
        for number, (key, data) in enumerate(videos):
            path = Path(temporary, f"{number}.{container}")
            path.write_bytes(stored[key])
            sample = describe_video(key, data, container, stored[key])
            if classes:
                sample = replace(sample, labels=(number % classes,))
            for name, values in columns.items():
                sample = replace(sample, **{name: values[number]})
            pairs.append((sample, path))
        shards = []
        for start in range(0, len(videos), per_shard):
            name = f"shard-{len(shards):06d}.tar"
            shards.append(write_shard(folder, name, pairs[start : start + per_shard]))
    info = DatasetInfo(
        len(videos),
        sum(sample.num_frames for sample, _ in pairs),
        sum(shard.num_bytes for shard in shards),
        [f"class {i}" for i in range(classes)],
        {},
        shards,
    )
    publish_tables(folder, info)
    return folder


def describe_video(key: str, data: bytes, container: str, stored: bytes) -> Sample:
    """Return the row of the sample table for a video, with the hash of what is stored of it."""
    with av.open(io.BytesIO(data)) as video:
        num_frames = sum(1 for _ in video.decode(video=0))
        context = video.streams.video[0].codec_context
        codec, width, height = context.codec.canonical_name, context.width, context.height
    return Sample(
        key,
        container,
        codec,
        num_frames,
        fps=8.0,
        frame_stride=1,
        width=width,
        height=height,
        labels=None,
        source=f"{key}.{container}",
        sha256=hashlib.sha256(stored).hexdigest(),
    )


def broken_copy(source: Path, folder: Path, keys: set[str], start: float = 0.5) -> ShardDataset:
    """Copy shards, and flip the bits of a byte in each of the videos `keys`.

    The byte lies at the fraction `start` of its video.
    """
    dataset = ShardDataset.open(shutil.copytree(source, folder))
    for index, sample in enumerate(dataset.samples):
        if sample.key in keys:
            shard = np.memmap(dataset.shards[dataset.shard_of(index)], np.uint8, "r+")
            shard[sample.offset + int(sample.size * start)] ^= 0xFF
    return dataset


def make_hashes(num_samples: int) -> ShardDataset:
    """Return a dataset of which only hashes are known; each fourth one is a copy of another."""
    rows = np.zeros(num_samples, SAMPLE)
    words = np.random.default_rng(0).integers(0, 2**64, (num_samples, 4), np.uint64)
    words[::4] = words[-1]
    # Some differ in later words alone.
    words[1::50, 0] = words[1, 0]
    rows["sha256"] = words.astype(">u8").view(rows["sha256"].dtype)[:, 0]
    info = DatasetInfo(num_samples, 0, 0, [], {}, [])
    tables = Tables("made", info, np.array([num_samples]), lambda table: Path(table.file))
    tables.rows = rows
    return ShardDataset([tables])
