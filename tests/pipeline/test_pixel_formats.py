"""Clips have the colours that FFmpeg's own conversion gives, in every pixel format and wherever they are cut."""

import av
import numpy as np
import pytest
from av.video.format import names
from av.video.frame import VideoFrame

from benchmarks.pixel_formats import CASES, HEIGHT, WIDTH, errors_of, frame_in
from pipeline.crops import Crop
from pipeline.cutting import FATAL, Scaler
from pipeline.video import EIGHT_BIT_420, VideoError

DITHERED = {"monow", "monob", "rgb8", "bgr8", "rgb4_byte", "bgr4_byte"}  # of no even colours, and none that are shared
LEVELS_APART = {"444": 17, "555": 8, "565": 8}  # FFmpeg fills up the bits that these lack in two ways
SHORT_CUT = {"yuv422p", "yuvj422p", "yuva420p", "yuyv422", "uyvy422", "yvyu422"}  # to packed RGB of the same size
SLOW = {"xyz12be", "xyz12le"}  # a second for the tables of each graph; nothing in them is shared between pixels


def allowed(name: str, case: str) -> float:
    """Grey levels."""
    if name.startswith("bayer"):  # two of three colours of a pixel are its neighbours'
        return 4
    if (name in EIGHT_BIT_420 and case != "even") or (name in SHORT_CUT and case == "same_size"):
        return 5  # a colour sample of two by two pixels is half off, in colours that change by two levels a pixel
    # A chroma sample that is rounded once more is .9 of a level of blue, and both results are rounded to levels.
    return LEVELS_APART.get(name[3:6], 2.0)


def test_every_pixel_format_has_its_colours_wherever_it_is_cut() -> None:
    wrong, seen = [], 0
    for name in sorted(names - DITHERED - SLOW):
        try:
            found = errors_of(name)
        except VideoError:  # said, not shown wrongly
            assert name.startswith("rgbf32"), name
            continue
        if found is not None:
            seen += 1
            wrong += [(name, case, found[case]) for case in CASES if found[case] > allowed(name, case)]
    assert not wrong
    assert seen > 200 or int(av.__version__.split(".")[0]) < 18


def test_usual_videos_take_one_step() -> None:
    """8-bit 4:2:0 pays nothing for the others: its pixels at an odd place are those of FFmpeg's crop alone."""
    frame = frame_in("yuv420p")
    assert frame is not None
    data = [np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size) for plane in frame.planes]
    whole = VideoFrame(WIDTH - 4, HEIGHT - 4, "yuv420p")  # the same, its planes begun at (3, 1), as crop does
    for plane, source, (x, y) in zip(whole.planes, data, [(3, 1), (1, 0), (1, 0)], strict=True):
        lines = np.zeros((plane.buffer_size // plane.line_size, plane.line_size), np.uint8)
        part = source[y : y + plane.height, x : x + plane.width]
        lines[: plane.height, : plane.width] = part
        plane.update(lines.tobytes())
    size = WIDTH - 4, HEIGHT - 4
    there = Scaler(Crop(3, 1, *size), False, 32, (WIDTH, HEIGHT))(frame)
    assert np.array_equal(there, Scaler(Crop(0, 0, *size), False, 32, size)(whole))


def test_what_ends_the_process_is_refused() -> None:
    for name in FATAL:
        with pytest.raises(VideoError, match="cannot be scaled"):
            Scaler(Crop(0, 0, 16, 16), False, 16, (16, 16))(VideoFrame(16, 16, name))
