"""Clips have the colors that FFmpeg's own conversion gives, in every pixel format and crop."""

import av
import numpy as np
import pytest
from av.filter import Graph
from av.video.format import VideoFormat, names  # type: ignore[attr-defined]
from av.video.frame import VideoFrame

from adamae.pipeline.decoding.colors import BT601, BT709, BT2020, find_matrix, find_siting
from adamae.pipeline.decoding.video import as_rgb
from adamae.pipeline.decoding.video_source import FATAL, Scaler, declare_colors
from adamae.pipeline.planning.crops import Crop, FrameSize
from adamae.pipeline.video_error import VideoError

# FFmpeg takes a second for the tables of each of their graphs; no value is shared between pixels.
EXPENSIVE = {"xyz12be", "xyz12le"}
# In gray levels: both images are rounded, one of them twice.
MAX_ERROR = 2
WIDTH = 96
HEIGHT = 64
SIDE = 24
# A crop, and whether it is flipped.
CASES = {
    "usual": (Crop(8, 0, 48, 48), True),
    "of a part of 4:1:0's samples": (Crop(6, 2, 46, 42), False),
    "flipped": (Crop(2, 10, 46, 46), True),
    "same size": (Crop(2, 6, SIDE, SIDE), False),
}
Y, X = np.mgrid[:HEIGHT, :WIDTH]
# Colors that change by at most two gray levels per pixel.
RAMP = np.stack([40 + 1.5 * X, 60 + 2 * Y, 220 - X - 0.5 * Y], -1)


def draw_ramp() -> VideoFrame:
    return VideoFrame.from_ndarray(RAMP.round().astype(np.uint8), format="rgb24")


def frame_in(name: str) -> VideoFrame | None:
    """Convert the ramp to a pixel format; None where FFmpeg's scaler does not write and read it."""
    if name in FATAL:
        return None
    frame = draw_ramp()
    if name == "pal8":
        ramp = np.arange(256, dtype=np.uint8)
        palette = np.stack([np.full_like(ramp, 255), ramp, ramp, ramp], 1)
        image = frame.to_ndarray(format="gray"), palette
        return VideoFrame.from_ndarray(image, format="pal8")  # type: ignore[arg-type]
    try:
        pixels = VideoFormat(name)
        if pixels.is_bayer:
            return bayer(pixels, frame.to_ndarray())
        written = frame.reformat(format=name, dst_colorspace="ITU601")
        # Some formats are written, but not read.
        written.reformat(format="gbrp")
        return written
    except (ValueError, av.error.FFmpegError):
        return None


def bayer(pixels: VideoFormat, rgb: np.ndarray) -> VideoFrame:
    """Make a frame of a Bayer pattern: bayer_rggb16le has squares of R, G, G, B."""
    mosaic = np.empty((HEIGHT, WIDTH))
    pattern = pixels.name.split("_")[1][:4]
    for index, channel in enumerate(pattern):
        row, column = divmod(index, 2)
        mosaic[row::2, column::2] = rgb[row::2, column::2, "rgb".index(channel)]
    if "16" in pixels.name:
        sample_type = ">u2" if pixels.is_big_endian else "<u2"
        content = (mosaic * 257).astype(sample_type).view(np.uint8)
    else:
        content = mosaic.astype(np.uint8)
    frame = VideoFrame(WIDTH, HEIGHT, pixels.name)
    padded = np.zeros((HEIGHT, frame.planes[0].line_size), np.uint8)
    padded[:, : content.shape[1]] = content
    frame.planes[0].update(padded.tobytes())
    return frame


def convert(frame: VideoFrame, matrix: str = BT601) -> VideoFrame:
    """Convert the whole frame to planar RGB: FFmpeg's path to packed RGB misreads some formats."""
    scale = f"flags=bilinear+full_chroma_int+accurate_rnd:in_chroma_loc={find_siting(frame)}"
    return run_graph(frame, declare_colors(matrix), ("scale", scale), ("format", "gbrp"))


def test_every_pixel_format_has_its_colors_wherever_it_is_cropped() -> None:
    """Compare with the same crop of the converted frame, except for the border.

    There one of them sees beyond the crop: by two pixels where chroma lies on the left ones.
    """
    wrong = []
    num_seen = 0
    reference = {case: Scaler(*settings, SIDE, (WIDTH, HEIGHT)) for case, settings in CASES.items()}
    for name in sorted(names - EXPENSIVE):
        frame = frame_in(name)
        if frame is None:
            continue
        whole = convert(frame)
        num_seen += 1
        for case, settings in CASES.items():
            clip = Scaler(*settings, SIDE, (WIDTH, HEIGHT))(frame)
            error = np.abs(clip.astype(int) - reference[case](whole))[1:-1, 2:-2].max()
            if error > MAX_ERROR:
                wrong.append((name, case, error))
    assert not wrong
    assert num_seen > 150


@pytest.mark.parametrize("bits", [8, 10])
@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("matrix", [BT601, BT709, BT2020])
def test_colors_are_those_that_frames_declare(matrix: str, full_range: bool, bits: int) -> None:
    """Within a gray level of the RGB that they were made of, and of FFmpeg's own conversion."""
    rgb = np.stack([235 - 2 * X, 40 + 3 * Y, 30 + 2 * X], -1).astype(np.uint8)
    color_range, siting = ("pc", "center") if full_range else ("tv", "left")
    options = f"out_color_matrix={matrix}:out_range={color_range}:out_chroma_loc={siting}"
    name = "yuv420p" if bits == 8 else "yuv420p10le"
    drawn = VideoFrame.from_ndarray(rgb, format="rgb24")
    stored = run_graph(drawn, ("scale", options), ("format", name))
    assert find_matrix(stored) == matrix
    clip = scale_whole(stored)
    assert mean_difference(clip, rgb) < 1
    assert mean_difference(clip, convert(stored, matrix).to_ndarray()) < 1
    assert mean_difference(as_rgb(stored), rgb) < 1
    misread = scale_whole(run_graph(stored, declare_colors(BT709 if matrix == BT601 else BT601)))
    assert np.abs(misread.astype(int) - rgb).mean() > 2, "the colors tell"


def scale_whole(frame: VideoFrame) -> np.ndarray:
    """Convert a frame with the scaler, without changing its size."""
    crop = Crop(0, 0, WIDTH, HEIGHT)
    return Scaler(crop, False, FrameSize(HEIGHT, WIDTH), (WIDTH, HEIGHT))(frame)


def mean_difference(image: np.ndarray, expected: np.ndarray) -> float:
    """Return the mean difference in gray levels, without a border of two pixels."""
    return float(np.abs(image.astype(int) - expected)[2:-2, 2:-2].mean())


def run_graph(frame: VideoFrame, *filters: tuple[str, str]) -> VideoFrame:
    """Take a frame through filters of FFmpeg, one after the other."""
    graph = Graph()
    source = f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1"
    nodes = [graph.add(*options) for options in [("buffer", source), *filters]]
    graph.link_nodes(*nodes, graph.add("buffersink")).configure()
    graph.vpush(frame)
    return graph.vpull()


@pytest.mark.parametrize("case", CASES)
def test_scaling_is_bilinear(case: str) -> None:
    """Of colors that change linearly, arithmetic tells what any filter gives."""
    crop, flip = CASES[case]
    clip = Scaler(crop, flip, SIDE, (WIDTH, HEIGHT))(draw_ramp().reformat(format="gbrp"))
    # The centers of the clip's pixels, in pixels of the crop.
    down = (np.arange(SIDE) + 0.5) * crop.height / SIDE - 0.5
    across = (np.arange(SIDE) + 0.5) * crop.width / SIDE - 0.5
    if flip:
        across = across[::-1]
    change_down = RAMP[1, 0] - RAMP[0, 0]
    change_across = RAMP[0, 1] - RAMP[0, 0]
    corner = RAMP[crop.y, crop.x]
    expected = corner + down[:, None, None] * change_down + across[:, None] * change_across
    # Both are rounded.
    assert np.abs(clip - expected)[1:-1, 1:-1].max() < 1.2


def test_a_stream_may_change_its_size() -> None:
    whole = draw_ramp().reformat(format="yuv420p")
    small = whole.reformat(WIDTH // 2, HEIGHT // 2)
    scaler = Scaler(Crop(0, 0, WIDTH, HEIGHT), False, SIDE, (WIDTH, HEIGHT))
    first, second, third = (scaler(frame).astype(int) for frame in (whole, small, whole))
    assert np.abs(first - second)[1:-1, 1:-1].max() <= 2
    assert np.array_equal(first, third)


@pytest.mark.parametrize("name", ["rgb555be", "bgr565be", "rgb565le", "rgb444be", "bgr8"])
def test_whole_frames_of_few_bits_have_their_colors_too(name: str) -> None:
    frame = frame_in(name)
    assert frame is not None
    assert np.array_equal(as_rgb(frame), convert(frame).to_ndarray())


@pytest.mark.parametrize("name", FATAL)
def test_formats_that_abort_the_process_are_refused(name: str) -> None:
    with pytest.raises(VideoError, match="cannot be scaled"):
        Scaler(Crop(0, 0, 16, 16), False, 16, (16, 16))(VideoFrame(16, 16, name))
