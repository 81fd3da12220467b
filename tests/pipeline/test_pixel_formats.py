"""Clips have the colors that FFmpeg's own conversion gives, in every pixel format and wherever they are cropped."""

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

EXPENSIVE = {
    "xyz12be",
    "xyz12le",
}  # a second for the tables of each graph; no value is shared between their pixels
ALLOWED = 2  # gray levels: both images are rounded, one of them twice
WIDTH, HEIGHT, SIDE = 96, 64, 24
CASES = {
    "usual": (Crop(8, 0, 48, 48), True),
    "of a part of 4:1:0's samples": (Crop(6, 2, 46, 42), False),
    "flipped": (Crop(2, 10, 46, 46), True),
    "same size": (Crop(2, 6, SIDE, SIDE), False),
}
Y, X = np.mgrid[:HEIGHT, :WIDTH]
RAMP = np.stack(
    [40 + 1.5 * X, 60 + 2 * Y, 220 - X - 0.5 * Y], -1
)  # at most two gray levels per pixel


def frame_in(name: str) -> VideoFrame | None:
    """Convert RAMP to a pixel format; None where FFmpeg's scaler does not write and read it."""
    if name in FATAL:
        return None
    frame = VideoFrame.from_ndarray(RAMP.round().astype(np.uint8), format="rgb24")
    if name == "pal8":
        ramp = np.arange(256, dtype=np.uint8)
        palette = np.stack([np.full_like(ramp, 255), ramp, ramp, ramp], 1)
        return VideoFrame.from_ndarray((frame.to_ndarray(format="gray"), palette), format="pal8")  # type: ignore[arg-type]
    try:
        form = VideoFormat(name)
        if form.is_bayer:
            return bayer(form, frame.to_ndarray())
        written = frame.reformat(format=name, dst_colorspace="ITU601")
        written.reformat(format="gbrp")  # some are written and not read
        return written
    except (ValueError, av.error.FFmpegError):
        return None


def bayer(form: VideoFormat, rgb: np.ndarray) -> VideoFrame:
    mosaic = np.empty((HEIGHT, WIDTH))
    for place, channel in enumerate(form.name.split("_")[1][:4]):
        at = np.s_[place // 2 :: 2, place % 2 :: 2]
        mosaic[at] = rgb[(*at, "rgb".index(channel))]
    kind = (">" if form.is_big_endian else "<") + "u2" if "16" in form.name else "u1"
    content = (mosaic * (257 if "16" in form.name else 1)).astype(kind).view(np.uint8)
    frame = VideoFrame(WIDTH, HEIGHT, form.name)
    padded = np.zeros((HEIGHT, frame.planes[0].line_size), np.uint8)
    padded[:, : content.shape[1]] = content
    frame.planes[0].update(padded.tobytes())
    return frame


def convert(frame: VideoFrame, matrix: str = BT601) -> VideoFrame:
    """Convert the whole frame to planar RGB; FFmpeg's direct path to packed RGB misreads some formats."""
    scale = f"flags=bilinear+full_chroma_int+accurate_rnd:in_chroma_loc={find_siting(frame)}"
    return run_graph(frame, declare_colors(matrix), ("scale", scale), ("format", "gbrp"))


def test_every_pixel_format_has_its_colors_wherever_it_is_cropped() -> None:
    """Compare with the same crop of the converted frame, except for the border, where one sees beyond the crop: two
    pixels where chroma lies on the left ones."""
    wrong, num_seen = [], 0
    reference = {case: Scaler(*settings, SIDE, (WIDTH, HEIGHT)) for case, settings in CASES.items()}
    for name in sorted(names - EXPENSIVE):
        if (frame := frame_in(name)) is None:
            continue
        whole = convert(frame)
        num_seen += 1
        for case, settings in CASES.items():
            clip = Scaler(*settings, SIDE, (WIDTH, HEIGHT))(frame)
            error = np.abs(clip.astype(int) - reference[case](whole))[1:-1, 2:-2].max()
            if error > ALLOWED:
                wrong.append((name, case, error))
    assert not wrong
    assert num_seen > 150


@pytest.mark.parametrize("bits", [8, 10])
@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("matrix", [BT601, BT709, BT2020])
def test_colors_are_those_that_frames_declare(matrix: str, full_range: bool, bits: int) -> None:
    """Within a gray level of the RGB that they were made of, and of FFmpeg's own conversion."""
    rgb = np.stack([235 - 2 * X, 40 + 3 * Y, 30 + 2 * X], -1).astype(np.uint8)
    options = (
        f"out_color_matrix={matrix}:out_range={'pc' if full_range else 'tv'}:out_chroma_loc=left"
    )
    if full_range:
        options = options.replace("left", "center")
    name = "yuv420p" if bits == 8 else "yuv420p10le"
    stored = run_graph(
        VideoFrame.from_ndarray(rgb, format="rgb24"), ("scale", options), ("format", name)
    )
    assert find_matrix(stored) == matrix
    clip = Scaler(Crop(0, 0, WIDTH, HEIGHT), False, FrameSize(HEIGHT, WIDTH), (WIDTH, HEIGHT))(
        stored
    )
    assert np.abs(clip.astype(int) - rgb)[2:-2, 2:-2].mean() < 1
    assert np.abs(clip.astype(int) - convert(stored, matrix).to_ndarray())[2:-2, 2:-2].mean() < 1
    assert np.abs(as_rgb(stored).astype(int) - rgb)[2:-2, 2:-2].mean() < 1
    other = run_graph(stored, declare_colors(BT709 if matrix == BT601 else BT601))
    misread = Scaler(Crop(0, 0, WIDTH, HEIGHT), False, FrameSize(HEIGHT, WIDTH), (WIDTH, HEIGHT))(
        other
    )
    assert np.abs(misread.astype(int) - rgb).mean() > 2, "the colors tell"


def run_graph(frame: VideoFrame, *steps: tuple[str, str]) -> VideoFrame:
    graph = Graph()
    source = f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1"
    graph.link_nodes(
        *(graph.add(*step) for step in [("buffer", source), *steps]), graph.add("buffersink")
    ).configure()
    graph.vpush(frame)
    return graph.vpull()


@pytest.mark.parametrize("case", CASES)
def test_scaling_is_bilinear(case: str) -> None:
    """Of colors that change linearly, arithmetic tells what any filter gives."""
    crop, flip = CASES[case]
    frame = VideoFrame.from_ndarray(RAMP.round().astype(np.uint8), format="rgb24")
    found = Scaler(crop, flip, SIDE, (WIDTH, HEIGHT))(frame.reformat(format="gbrp"))
    down, across = (
        (np.arange(SIDE) + 0.5) * length / SIDE - 0.5 for length in (crop.height, crop.width)
    )
    across = across[::-1] if flip else across
    changes = RAMP[1, 0] - RAMP[0, 0], RAMP[0, 1] - RAMP[0, 0]
    expected = (
        RAMP[crop.y, crop.x] + down[:, None, None] * changes[0] + across[:, None] * changes[1]
    )
    assert np.abs(found - expected)[1:-1, 1:-1].max() < 1.2  # both are rounded


def test_a_stream_may_change_its_size() -> None:
    whole = VideoFrame.from_ndarray(RAMP.round().astype(np.uint8), format="rgb24").reformat(
        format="yuv420p"
    )
    scaler = Scaler(Crop(0, 0, WIDTH, HEIGHT), False, SIDE, (WIDTH, HEIGHT))
    images = [
        scaler(frame).astype(int)
        for frame in (whole, whole.reformat(WIDTH // 2, HEIGHT // 2), whole)
    ]
    assert np.abs(images[0] - images[1])[1:-1, 1:-1].max() <= 2
    assert np.array_equal(images[0], images[2])


@pytest.mark.parametrize("name", ["rgb555be", "bgr565be", "rgb565le", "rgb444be", "bgr8"])
def test_whole_frames_of_few_bits_have_their_colors_too(name: str) -> None:
    frame = frame_in(name)
    assert frame is not None
    assert np.array_equal(as_rgb(frame), convert(frame).to_ndarray())


@pytest.mark.parametrize("name", FATAL)
def test_formats_that_abort_the_process_are_refused(name: str) -> None:
    with pytest.raises(VideoError, match="cannot be scaled"):
        Scaler(Crop(0, 0, 16, 16), False, 16, (16, 16))(VideoFrame(16, 16, name))
