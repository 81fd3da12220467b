"""Clips have the colours that FFmpeg's own conversion gives, in every pixel format and wherever they are cut."""

import av
import numpy as np
import pytest
from av.video.format import VideoFormat, names
from av.video.frame import VideoFrame

from benchmarks.data.pixel_formats import CASES, HEIGHT, SIDE, WIDTH, converted, errors_of, frame_in, picture
from pipeline.decoding.scaling import FATAL, Scaler, _cut
from pipeline.decoding.video import VideoError, as_rgb
from pipeline.planning.crops import Crop

SLOW = {"xyz12be", "xyz12le"}  # a second for the tables of each graph; nothing in them is shared between pixels
# Both pictures are rounded, one of them twice: 204 of 226 formats are within 1, and the worst pixel of the rest at 2.
ALLOWED = 2  # grey levels


def test_every_pixel_format_has_its_colours_wherever_it_is_cut() -> None:
    wrong, seen = [], 0
    for name in sorted(names - SLOW):
        try:
            found = errors_of(name)
        except VideoError:  # said, not shown wrongly
            assert name.startswith("rgbf32"), name
            continue
        if found is not None:
            seen += 1
            wrong += [(name, case, found[case]) for case in CASES if found[case] > ALLOWED]
    assert not wrong
    assert seen > 200 or int(av.__version__.split(".")[0]) < 18


def test_usual_videos_take_one_step() -> None:
    """8-bit 4:2:0 pays nothing for the others."""
    assert len(_cut(VideoFormat("yuv420p"), Crop(3, 1, 47, 45), (WIDTH, HEIGHT))) == 1
    assert len(_cut(VideoFormat("yuv420p10le"), Crop(3, 1, 47, 45), (WIDTH, HEIGHT))) > 1


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("crop", [Crop(4, 4, 48, 48), Crop(3, 7, 45, 47), Crop(3, 5, SIDE, SIDE)])
def test_rgb_is_cut_and_scaled_as_arithmetic_has_it(crop: Crop, flip: bool) -> None:
    """Of colours that change evenly, every filter makes the same."""
    image = picture()
    frame = VideoFrame.from_ndarray(np.ascontiguousarray(image.round().astype(np.uint8)), format="rgb24")
    cut = Scaler(crop, flip, SIDE, (WIDTH, HEIGHT))(frame.reformat(format="gbrp"))
    down, across = ((np.arange(SIDE) + 0.5) * length / SIDE - 0.5 for length in (crop.height, crop.width))
    across = across[::-1] if flip else across
    changes = image[1, 0] - image[0, 0], image[0, 1] - image[0, 0]
    expected = image[crop.y, crop.x] + down[:, None, None] * changes[0] + across[:, None] * changes[1]
    assert np.abs(cut - expected)[1:-1, 1:-1].max() < 1.2  # both are rounded


@pytest.mark.parametrize("name", ["rgb555be", "bgr555be", "rgb565be", "bgr565be", "rgb565le", "rgb444be", "bgr8"])
def test_whole_frames_of_few_bits_have_their_colours_too(name: str) -> None:
    frame = frame_in(name)
    assert frame is not None
    assert np.array_equal(as_rgb(frame), converted(frame).to_ndarray())


def test_what_ends_the_process_is_refused() -> None:
    for name in FATAL:
        with pytest.raises(VideoError, match="cannot be scaled"):
            Scaler(Crop(0, 0, 16, 16), False, 16, (16, 16))(VideoFrame(16, 16, name))
