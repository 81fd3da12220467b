"""Crop boxes: their distribution, and that they lie in the frame at any size."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adamae.pipeline.planning import crops
from adamae.pipeline.planning.crops import Crop, FrameSize

SIDES = st.integers(2, 2000)
NUMBERS = st.lists(
    st.floats(0, 1, exclude_max=True),
    min_size=crops.NUMBERS_PER_CROP,
    max_size=crops.NUMBERS_PER_CROP,
)


def draw_numbers(rng: np.random.Generator) -> list[float]:
    return rng.random(crops.NUMBERS_PER_CROP).tolist()


@pytest.mark.parametrize("shape", [crops.SQUARE, FrameSize(2, 3), FrameSize(500, 1)], ids=str)
@pytest.mark.parametrize(
    "make_crop", [crops.multiscale_crop, partial(crops.random_resized_crop, min_area=0.5)]
)
@given(width=SIDES, height=SIDES, numbers=NUMBERS)
def test_boxes_lie_in_the_frame(
    make_crop: Callable[..., Crop],
    shape: FrameSize,
    width: int,
    height: int,
    numbers: list[float],
) -> None:
    box = make_crop(width, height, numbers, shape=shape)
    assert min(box.width, box.height) >= 2
    assert not any(value % 2 for value in box)
    assert 0 <= box.x <= width - box.width
    assert 0 <= box.y <= height - box.height


def test_multiscale_has_ten_sizes_and_thirteen_places() -> None:
    """By hand for 340×256: scales of 256, neighbors at most one step apart, offsets in quarters."""
    rng = np.random.default_rng(0)
    boxes = [crops.multiscale_crop(340, 256, draw_numbers(rng)) for _ in range(5000)]
    sizes = Counter((box.width, box.height) for box in boxes)
    assert set(sizes) == {
        (256, 256),
        (256, 224),
        (224, 256),
        (224, 224),
        (224, 192),
        (192, 224),
        (192, 192),
        (192, 168),
        (168, 192),
        (168, 168),
    }
    assert min(sizes.values()) > 380, "all equally likely: 500 each"
    places = {(box.x, box.y) for box in boxes if (box.width, box.height) == (192, 224)}
    # A quarter of the free space, in whole chroma samples.
    across = (340 - 192) // 8 * 2
    down = (256 - 224) // 8 * 2
    assert places == {
        (0, 0),
        (4 * across, 0),
        (0, 4 * down),
        (4 * across, 4 * down),
        (2 * across, 2 * down),
        (0, 2 * down),
        (4 * across, 2 * down),
        (2 * across, 4 * down),
        (2 * across, 0),
        (across, down),
        (3 * across, down),
        (across, 3 * down),
        (3 * across, 3 * down),
    }


def test_random_resized_keeps_area_and_ratio() -> None:
    rng = np.random.default_rng(0)
    boxes = [crops.random_resized_crop(400, 300, draw_numbers(rng), 0.5) for _ in range(2000)]
    areas = [box.width * box.height / (400 * 300) for box in boxes]
    ratios = [box.width / box.height for box in boxes]
    assert 0.49 < min(areas) < 0.51
    assert max(areas) > 0.98
    assert 0.74 < min(ratios) < 0.77
    assert 1.31 < max(ratios) < 1.35
    boxes = [crops.random_resized_crop(400, 300, draw_numbers(rng), 0.08) for _ in range(2000)]
    areas = [box.width * box.height / (400 * 300) for box in boxes]
    assert 0.079 < min(areas) < 0.09


def test_a_frame_in_which_no_box_fits_is_cropped_in_the_center() -> None:
    numbers = [0.5] * crops.NUMBERS_PER_CROP
    assert crops.random_resized_crop(1000, 10, numbers, 0.5) == (492, 0, 14, 10)


def test_boxes_of_other_shapes_by_hand() -> None:
    """For clips of 128×256: the largest box of 340×256 is 340×170."""
    shape = FrameSize(128, 256)
    assert crops.largest_box(340, 256, shape) == (340, 170)
    assert crops.largest_box(340, 100, shape) == (200, 100)
    assert crops.largest_box(3, 2000, FrameSize(1, 2)) == (3, 1)
    assert crops.multiscale_crop(340, 256, [0.0, 0.0] + [0.5] * 20, shape) == (0, 0, 340, 170)
    rng = np.random.default_rng(0)
    boxes = [crops.random_resized_crop(400, 300, draw_numbers(rng), 0.1, shape) for _ in range(500)]
    ratios = [box.width / box.height / 2 for box in boxes]
    assert 0.7 < min(ratios) < 0.8
    assert 1.27 < max(ratios) < 1.4


def test_views_lie_evenly_along_the_longer_side() -> None:
    shape = FrameSize(128, 256)
    wide = [crops.view_crop(340, 100, index, 3, shape) for index in range(3)]
    assert wide == [(0, 0, 200, 100), (70, 0, 200, 100), (140, 0, 200, 100)]
    tall = [crops.view_crop(60, 100, index, 3) for index in range(3)]
    assert [view.y for view in tall] == [0, 20, 40]
    assert crops.view_crop(100, 60, 0, 1) == (20, 0, 60, 60)


@pytest.mark.parametrize(
    ("box", "stored", "frame", "expected"),
    [
        ((320, 40, 240, 280), (560, 320), (560, 320), (320, 40, 240, 280)),
        ((328, 0, 240, 280), (569, 320), (568, 320), (328, 0, 240, 280)),
        ((80, 0, 112, 112), (199, 112), (200, 112), (80, 0, 112, 112)),
        ((0, 0, 1024, 576), (1024, 576), (719, 575), (0, 0, 718, 574)),
        ((510, 300, 2, 2), (512, 302), (3, 2), (0, 0, 2, 2)),
    ],
)
def test_a_box_keeps_its_edges_in_a_frame_of_other_pixels(
    box: tuple[int, int, int, int],
    stored: tuple[int, int],
    frame: tuple[int, int],
    expected: tuple[int, int, int, int],
) -> None:
    """Edges are at the nearest whole chroma samples, never outside of the frame."""
    assert Crop(*box).within(stored, frame) == expected
