"""Sources of every kind come out upright, progressive, on time and in the right colors."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.video.frame import VideoFrame
from shard_making import decode, read_frame_number, read_numbers, store, write_video

from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.video_error import VideoError
from adamae.shard_tools.codecs import CODECS
from adamae.shard_tools.encoding.encode import StoredVideo
from adamae.shard_tools.encoding.picture import FrameConverter
from adamae.shard_tools.synthetic_videos import draw_frame_number, make_texture


def numbered(number: int, width: int = 96, height: int = 64) -> np.ndarray:
    """Return a smooth picture with its number in the corner, uint8 [height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    red = 40 + 170 * x / width
    green = 40 + 170 * y / height
    blue = 200 - 120 * x * y / width / height
    frame = np.stack([red, green, blue], axis=2).astype(np.uint8)
    draw_frame_number(frame, number)
    return frame


def stored(path: Path, **settings: Any) -> StoredVideo:
    """Store `path`; by default every frame at high quality."""
    defaults = {"frame_stride": 1, "quality": 4}
    return store(path, **(defaults | settings))


def ffmpegs_rgb(path: Path) -> np.ndarray:
    """Return the first frame in RGB as FFmpeg's own scale filter makes it, uint8 [H, W, 3]."""
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
        options = (
            f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/25"
            f":colorspace={int(frame.colorspace)}:range={int(frame.color_range)}"
        )
        graph = av.filter.Graph()
        source = graph.add("buffer", options)
        graph.link_nodes(source, graph.add("format", "rgb24"), graph.add("buffersink")).configure()
        graph.push(frame)
        return graph.pull().to_ndarray()


# The codec, the pixel format and fields of the codec context.
COLORS = {
    "plain": ("libx264", "yuv420p", {}),
    "bt709": ("libx264", "yuv420p", {"colorspace": 1, "color_range": 1}),
    "bt2020": ("libx265", "yuv420p10le", {"colorspace": 9, "color_range": 1}),
    "full range": ("libx264", "yuvj420p", {"color_range": 2}),
    "full range bt709": ("libx264", "yuvj420p", {"colorspace": 1, "color_range": 2}),
    "10 bit": ("libx265", "yuv420p10le", {}),
    "4:2:2": ("libx264", "yuv422p", {}),
    "4:4:4": ("libx264", "yuv444p", {}),
    "rgb": ("png", "rgb24", {}),
}


@pytest.mark.parametrize("encode", ["h264", "mjpeg"])
@pytest.mark.parametrize("kind", COLORS)
def test_colors_are_those_of_ffmpeg(tmp_path: Path, kind: str, encode: str) -> None:
    codec, pixel_format, context = COLORS[kind]
    options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    path = write_video(
        tmp_path / "in.mov", [numbered(0)] * 2, codec, pixel_format, options=options, **context
    )
    expected = ffmpegs_rgb(path).astype(float)
    actual = ffmpegs_rgb(stored(path, encode=encode, quality=2).path).astype(float)
    # Below and beside the number, whose edges lose color detail.
    difference = (actual - expected)[16:, 24:]
    assert np.abs(difference.mean(axis=(0, 1))).max() < 2
    assert np.quantile(np.abs(difference), 0.95) <= 4


def patch_display_matrix(path: Path, matrix: list[int]) -> None:
    """Overwrite a, b, c, d of the track's display matrix in an mp4 file."""
    data = bytearray(path.read_bytes())
    start = data.index(b"tkhd") + 44
    # Of nine fixed-point numbers of 32 bits, these are a, b, c and d.
    for index, value in zip((0, 1, 3, 4), matrix, strict=True):
        offset = start + 4 * index
        data[offset : offset + 4] = (value << 16).to_bytes(4, "big", signed=True)
    path.write_bytes(data)


# What was done to the picture, and the matrix (a, b, c, d) that undoes it.
UPRIGHT = {
    "turned left": (lambda x: np.rot90(x, 1), [0, 1, -1, 0]),
    "turned over": (lambda x: np.rot90(x, 2), [-1, 0, 0, -1]),
    "turned right": (lambda x: np.rot90(x, 3), [0, -1, 1, 0]),
    "mirrored": (lambda x: x[:, ::-1], [-1, 0, 0, 1]),
    "transposed": (lambda x: x.transpose(1, 0, 2), [0, 1, 1, 0]),
    "transposed the other way": (lambda x: np.rot90(x, 2).transpose(1, 0, 2), [0, -1, -1, 0]),
}


@pytest.mark.parametrize(("codec", "siting"), [("h264", 0), ("mjpeg", 0.5)])
@pytest.mark.parametrize("side", [256, 512])
def test_chroma_is_stored_where_decoders_expect_it(codec: str, siting: float, side: int) -> None:
    """Chroma lies left of the two pixels that share it, or between them where the range is full.

    That is what find_siting reads. A picture whose blue rises from left to right tells by its
    chroma where each sample lies.
    """
    # The positions of the inner chroma samples, in pixels of the source.
    positions = (2 * np.arange(8, 120) + siting + 0.5) * side / 256 - 0.5
    # Of 128, for the most saturated blue.
    levels = 112 if codec == "h264" else 127.5
    errors = []
    # Both ways, so that rounding cancels out.
    for first, last in ((0, 211), (211, 0)):
        pixels = np.zeros((side, side, 3), np.uint8)
        pixels[..., 2] = np.linspace(first, last, side).round()
        convert = FrameConverter(CODECS[codec], 256, None)
        stored = convert(VideoFrame.from_ndarray(pixels, format="rgb24"))
        u = np.frombuffer(memoryview(stored.planes[1]), np.uint8).reshape(128, -1)[:, 8:120]
        blue = np.interp(positions, (0, side - 1), (first, last))
        errors.append((u - 128 - levels / 255 * blue).mean())
    # Half a pixel away, it would be 0.18 or more.
    assert abs(errors[0] - errors[1]) / 2 < 0.09


@pytest.mark.parametrize("kind", UPRIGHT)
def test_turned_videos_are_stored_upright(tmp_path: Path, kind: str) -> None:
    change, matrix = UPRIGHT[kind]
    frames = [np.ascontiguousarray(change(numbered(number))) for number in range(5)]
    path = write_video(tmp_path / "in.mp4", frames)
    patch_display_matrix(path, matrix)
    made = stored(path)
    assert (made.width, made.height) == (96, 64)
    assert read_numbers(made.path) == list(range(5))
    if "turned" in kind:
        assert stored(path, encode="copy").width == 96
        return
    with pytest.raises(VideoError, match="mirrored, which copies are not: leave out --encode copy"):
        stored(path, encode="copy")


@pytest.mark.parametrize(
    ("size", "aspect", "expected"),
    [
        ((64, 64), Fraction(2), (128, 64)),
        ((321, 241), Fraction(1), (320, 240)),
        ((640, 360), Fraction(1), (448, 256)),
        ((360, 640), Fraction(1), (256, 448)),
        ((342, 256), Fraction(1), (336, 256)),
        ((240, 426), Fraction(1), (240, 432)),
        ((40, 30), Fraction(1), (48, 32)),
        ((4, 4), Fraction(1), (16, 16)),
        ((64, 64), Fraction(1000), (64, 64)),
    ],
)
def test_sizes(
    tmp_path: Path, size: tuple[int, int], aspect: Fraction, expected: tuple[int, int]
) -> None:
    # 4:2:0 has no odd sizes.
    pixel_format = "yuv444p" if size[0] % 2 else "yuv420p"
    path = write_video(
        tmp_path / "in.mp4",
        [numbered(0, *size)] * 2,
        pixel_format=pixel_format,
        sample_aspect_ratio=aspect,
    )
    made = stored(path)
    assert (made.width, made.height) == expected
    assert decode(made.path)[0].shape == (expected[1], expected[0], 3)


def shown_at(times_ms: list[int], fps: float, stride: int, count: int) -> list[int]:
    """Return the number of the frame shown at ticks 0, stride, … of a clock with `fps`."""
    first_ticks = np.round((np.array(times_ms) - times_ms[0]) * fps / 1000)
    ticks = range(0, count * stride, stride)
    return [int(np.flatnonzero(first_ticks <= tick)[-1]) for tick in ticks]


# Times are milliseconds.
EVEN = [40 * number for number in range(40)]


def pause(pause_ms: int) -> list[int]:
    """Return the times of frames of which the 20th is shown for longer."""
    return EVEN[:20] + [time + pause_ms for time in EVEN[20:]]


# The times of frames, and their rate.
CLOCKS: dict[str, tuple[list[int], float]] = {
    "a pause of 8 s": (pause(8_000), 25),
    "one of 20 s": (pause(20_000), 25),
    "a frame of 60 is missing": ([round(1000 * tick / 60) for tick in range(90) if tick != 33], 60),
    "some of 25 are missing": ([40 * tick for tick in range(30) if tick not in (5, 6, 7, 20)], 25),
    "rounded by the container": ([round(1000 * n * 1001 / 30000) for n in range(40)], 30000 / 1001),
    "shaking": ([time + 7 if time % 80 else time for time in EVEN], 25),
    "begins late": ([time + 10_000 for time in EVEN], 25),
    "begins before zero": ([time - 500 for time in EVEN], 25),
    "1 frames": (EVEN[:1], 25),
    "2 frames": (EVEN[:2], 25),
    "4 frames": (EVEN[:4], 25),
    "5 frames": (EVEN[:5], 25),
}


@pytest.mark.parametrize("kind", CLOCKS)
def test_clocks_are_kept(tmp_path: Path, kind: str) -> None:
    """A pause lasts as long: a tick without a frame repeats the last one."""
    times, fps = CLOCKS[kind]
    path = tmp_path / ("in.mp4" if kind == "some of 25 are missing" else "in.mkv")
    write_video(path, map(numbered, range(len(times))), times_ms=times)
    made = stored(path, frame_stride=3)
    assert made.fps == pytest.approx(fps / 3, rel=2e-3)
    num_ticks = round((times[-1] - times[0]) * fps / 1000) + 1
    assert made.num_frames == math.ceil(num_ticks / 3)
    assert read_numbers(made.path) == shown_at(times, fps, 3, made.num_frames)


def test_clocks_that_jump_or_begin_again_are_not_believed(tmp_path: Path) -> None:
    an_hour_ms = 3_600_000
    jumps = write_video(tmp_path / "in.mkv", map(numbered, range(40)), times_ms=pause(an_hour_ms))
    again = joined(tmp_path, [numbered(n) for n in range(20)], [numbered(n) for n in range(20, 40)])
    for path in (jumps, again):
        assert read_numbers(stored(path, frame_stride=4).path) == list(range(0, 40, 4))


@pytest.mark.parametrize("gap", [0, 3])
def test_a_stream_that_begins_in_a_group_begins_with_its_first_picture(
    tmp_path: Path, gap: int
) -> None:
    """With `gap`, three frames are missing later, so that times count."""
    frames = [*range(30), *range(30 + gap, 40)]
    path = write_video(
        tmp_path / "in.ts",
        map(numbered, frames),
        times_ms=[40 * number for number in frames],
        options={"g": "16", "sc_threshold": "0"},
    )
    with av.open(str(path)) as container:
        positions = [packet.pos for packet in container.demux(video=0)]
    path.write_bytes(path.read_bytes()[positions[6] :])
    made = stored(path)
    # Frame 29 is shown in place of those that are missing.
    expected = [*range(16, 30), *[29] * gap, *range(30 + gap, 40)]
    assert read_numbers(made.path) == expected


def with_exif(jpeg: bytes, orientation: int) -> bytes:
    """Insert EXIF metadata with one entry, the orientation, behind the first marker of a JPEG."""
    tiff = b"MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1" + orientation.to_bytes(2) + bytes(6)
    size = (8 + len(tiff)).to_bytes(2)
    return jpeg[:2] + b"\xff\xe1" + size + b"Exif\0\0" + tiff + jpeg[2:]


def jpegs(folder: Path, count: int, orientation: int) -> list[bytes]:
    """Return pictures of a camera that stores how it was held: 6 means to be turned right."""
    num_turns = 1 if orientation == 6 else 0
    turned = [np.rot90(numbered(number), num_turns) for number in range(count)]
    frames = map(np.ascontiguousarray, turned)
    path = write_video(
        folder / "jpegs.avi", frames, "mjpeg", "yuvj420p", options={"qmin": "1", "qmax": "2"}
    )
    with av.open(str(path)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    return [with_exif(packet, orientation) for packet in packets]


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("encode", ["copy", "h264"])
def test_motion_jpeg_may_have_exif_and_no_container(
    tmp_path: Path, encode: str, orientation: int
) -> None:
    path = tmp_path / "in.mjpeg"
    path.write_bytes(b"".join(jpegs(tmp_path, 5, orientation)))
    made = stored(path, encode=encode)
    assert (made.width, made.height, made.num_frames, made.fps) == (96, 64, 5, 25)
    shown = decode_frames(made.path.read_bytes(), range(5), 5)
    assert [read_frame_number(frame) for frame in shown] == list(range(5))


def joined(folder: Path, *parts: list[np.ndarray]) -> Path:
    """Write several MPEG-2 recordings into one file, each with its own clock and size."""
    path = folder / "joined.mpg"
    options = {"qmin": "2", "qmax": "2"}
    with path.open("wb") as file:
        for frames in parts:
            part = folder / "part.mpg"
            write_video(part, frames, "mpeg2video", options=options, time_base=Fraction(1, 25))
            file.write(part.read_bytes())
    return path


@pytest.mark.parametrize("width", [192, 96])
def test_a_change_of_size_is_scaled_and_a_change_of_shape_refused(
    tmp_path: Path, width: int
) -> None:
    before = [numbered(number) for number in range(8)]
    after = [numbered(number, width, height=128) for number in range(8, 16)]
    path = joined(tmp_path, before, after)
    if width == 96:
        with pytest.raises(VideoError, match="changes shape in the middle"):
            stored(path)
        return
    with pytest.raises(VideoError, match="changes size in the middle"):
        stored(path, encode="copy")
    made = stored(path)
    assert (made.width, made.height) == (96, 64)
    # FFmpeg's decoder drops the last frame before the change.
    assert read_numbers(made.path) == [*range(7), *range(8, 16)]


def combing(frame: np.ndarray) -> float:
    """Return how much more neighboring rows differ than rows two apart.

    It is above 1 in interlaced pictures of motion.
    """
    rows = frame.astype(float).mean(axis=2)[16:]
    neighbors = np.abs(rows[1:] - rows[:-1]).mean()
    two_apart = np.abs(rows[2:] - rows[:-2]).mean()
    return float(neighbors / two_apart)


def test_interlaced_sources_come_out_progressive(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    # Upright stripes: neighboring rows differ only where they show different moments.
    stripes = rng.integers(0, 120, (1, 50, 1), np.uint8).repeat(8, axis=1)
    background = make_texture(rng, 400, 96, contrast=10) // 2 + stripes
    moments = [background[:, 6 * field : 6 * field + 128] for field in range(40)]
    frames = []
    for number in range(20):
        frame = moments[2 * number].copy()
        frame[1::2] = moments[2 * number + 1][1::2]
        draw_frame_number(frame, number)
        frames.append(frame)
    options = {"x264-params": "tff=1", "flags": "+ilme+ildct"}
    path = write_video(tmp_path / "in.mp4", frames, options=options)
    assert np.mean([combing(frame) for frame in decode(path)]) > 1.3
    message = "it is interlaced, which copies stay: leave out --encode copy"
    with pytest.raises(VideoError, match=message):
        stored(path, encode="copy")
    made = stored(path)
    assert np.mean([combing(frame) for frame in decode(made.path)]) < 0.9
    assert read_numbers(made.path) == list(range(20))
    assert read_numbers(stored(path, frame_stride=4).path) == list(range(0, 20, 4))
