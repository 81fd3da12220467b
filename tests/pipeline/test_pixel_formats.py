"""Clips have the colors that FFmpeg's own conversion gives, in every pixel format and wherever they are cropped."""

import av
import numpy as np
import pytest
from av.filter import Graph
from av.video.format import VideoFormat, names  # type: ignore[attr-defined]
from av.video.frame import VideoFrame
from jaxtyping import Float

from pipeline.decoding.video import as_rgb
from pipeline.decoding.video_source import BT601, FATAL, Scaler, crop_filters
from pipeline.planning.crops import Crop
from pipeline.video_error import VideoError

SLOW = {"xyz12be", "xyz12le"}  # a second for the tables of each graph; no value is shared between their pixels
ALLOWED = 2  # gray levels: both images are rounded, one of them twice
WIDTH, HEIGHT, SIDE = 96, 64, 24
CASES = {
    "even": (Crop(8, 0, 48, 48), True),
    "odd x": (Crop(5, 0, 48, 48), True),
    "odd y": (Crop(4, 3, 48, 48), False),
    "odd x and y": (Crop(7, 5, 48, 48), False),
    "odd, flipped": (Crop(1, 9, 48, 48), True),
    "same size": (Crop(3, 5, SIDE, SIDE), False),
    "odd sides": (Crop(4, 4, 47, 45), False),
    "odd sides, flipped": (Crop(3, 7, 45, 47), True),
}


def image() -> Float[np.ndarray, "H W 3"]:
    """Colors that change by at most two gray levels per pixel."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([40 + 1.5 * x, 60 + 2 * y, 220 - x - 0.5 * y], -1)


def frame_in(name: str) -> VideoFrame | None:
    """The image in a pixel format; None where FFmpeg's scaler does not write and read it."""
    if name in FATAL:
        return None
    frame = VideoFrame.from_ndarray(image().round().astype(np.uint8), format="rgb24")
    if name == "pal8":
        gray, ramp = frame.to_ndarray(format="gray"), np.arange(256, dtype=np.uint8)
        palette = np.stack([np.full_like(ramp, 255), ramp, ramp, ramp], 1)
        return VideoFrame.from_ndarray((gray, palette), format="pal8")  # type: ignore[arg-type]
    try:
        form = VideoFormat(name)
        if form.is_bayer:
            return _bayer(form, frame.to_ndarray())
        written = frame.reformat(format=name, dst_colorspace="ITU601")
        written.reformat(format="gbrp")  # some are written and not read
        return written
    except (ValueError, av.error.FFmpegError):
        return None


def _bayer(form: VideoFormat, rgb: np.ndarray) -> VideoFrame:
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


def convert(frame: VideoFrame) -> VideoFrame:
    """The whole frame, converted by FFmpeg to planar RGB, as its direct path to packed RGB misreads some formats."""
    graph = Graph()
    size = f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1"
    steps = [("buffer", size), BT601, ("scale", "flags=bilinear+full_chroma_int+accurate_rnd"), ("format", "gbrp")]
    graph.link_nodes(*(graph.add(*step) for step in steps), graph.add("buffersink")).configure()
    graph.vpush(frame)
    return graph.vpull()


def test_every_pixel_format_has_its_colors_wherever_it_is_cropped() -> None:
    """Compared with the same crop of the converted frame, but for the border, where one sees beyond the crop."""
    wrong, num_seen = [], 0
    for name in sorted(names - SLOW):
        frame = frame_in(name)
        if frame is None:
            continue
        whole = convert(frame)
        num_seen += 1
        for case, (crop, flip) in CASES.items():
            scaler = Scaler(crop, flip, SIDE, (WIDTH, HEIGHT))
            error = np.abs(scaler(frame).astype(int) - scaler(whole))[1:-1, 1:-1].max()
            if error > ALLOWED:
                wrong.append((name, case, error))
    assert not wrong
    assert num_seen > 150


def test_usual_videos_take_one_step() -> None:
    """8-bit 4:2:0 pays nothing for the others."""
    assert len(crop_filters(VideoFormat("yuv420p"), Crop(3, 1, 47, 45), (WIDTH, HEIGHT))) == 1
    assert len(crop_filters(VideoFormat("yuv420p10le"), Crop(3, 1, 47, 45), (WIDTH, HEIGHT))) > 1


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("crop", [Crop(4, 4, 48, 48), Crop(3, 7, 45, 47), Crop(3, 5, SIDE, SIDE)])
def test_rgb_is_cropped_and_scaled_as_arithmetic_has_it(crop: Crop, flip: bool) -> None:
    """With colors that change linearly, every filter gives the same."""
    ramp = image()
    frame = VideoFrame.from_ndarray(np.ascontiguousarray(ramp.round().astype(np.uint8)), format="rgb24")
    found = Scaler(crop, flip, SIDE, (WIDTH, HEIGHT))(frame.reformat(format="gbrp"))
    down, across = ((np.arange(SIDE) + 0.5) * length / SIDE - 0.5 for length in (crop.height, crop.width))
    across = across[::-1] if flip else across
    changes = ramp[1, 0] - ramp[0, 0], ramp[0, 1] - ramp[0, 0]
    expected = ramp[crop.y, crop.x] + down[:, None, None] * changes[0] + across[:, None] * changes[1]
    assert np.abs(found - expected)[1:-1, 1:-1].max() < 1.2  # both are rounded


@pytest.mark.parametrize("name", ["rgb555be", "bgr565be", "rgb565le", "rgb444be", "bgr8"])
def test_whole_frames_of_few_bits_have_their_colors_too(name: str) -> None:
    frame = frame_in(name)
    assert frame is not None
    assert np.array_equal(as_rgb(frame), convert(frame).to_ndarray())


def test_formats_that_abort_the_process_are_refused() -> None:
    for name in FATAL:
        with pytest.raises(VideoError, match="cannot be scaled"):
            Scaler(Crop(0, 0, 16, 16), False, 16, (16, 16))(VideoFrame(16, 16, name))
