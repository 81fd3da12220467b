"""RandAugment and random erasing: planned, the same in all frames, and as strong as timm's."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F
from loading import first_batches, plan_of
from PIL import Image
from timm.data import auto_augment as timm_augment
from torch import Tensor

from adamae.pipeline.augment import AFFINE, OPERATIONS, augment
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning.augmentations import (
    NAMES,
    NUMBERS_FOR_ERASING,
    AugmentOp,
    EraseBox,
    sample_erase_box,
    sample_ops,
)
from adamae.pipeline.planning.crops import Crop
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.dataset import ShardDataset

FILL = {"fillcolor": (128,) * 3}
# timm's function, the argument it gets for strength 0.5, and options.
TIMM = {
    "autocontrast": (timm_augment.auto_contrast, (), {}),
    "equalize": (timm_augment.equalize, (), {}),
    "invert": (timm_augment.invert, (), {}),
    "posterize": (timm_augment.posterize, (2,), {}),
    "solarize": (timm_augment.solarize, (128,), {}),
    "solarize_add": (timm_augment.solarize_add, (55,), {}),
    "color": (timm_augment.color, (1.45,), {}),
    "contrast": (timm_augment.contrast, (1.45,), {}),
    "brightness": (timm_augment.brightness, (1.45,), {}),
    "sharpness": (timm_augment.sharpness, (1.45,), {}),
    # PIL's sign is the opposite one.
    "rotate": (timm_augment.rotate, (-15,), {**FILL, "resample": Image.Resampling.BILINEAR}),
    "translate_x": (timm_augment.translate_x_rel, (-0.225,), FILL),
    "translate_y": (timm_augment.translate_y_rel, (-0.225,), FILL),
}


def augment_one(
    clip: Tensor, ops: tuple[AugmentOp, ...], box: EraseBox | None = None, seed: int = 0
) -> Tensor:
    row = PlanRow(seed, 0, (0,), Crop(0, 0, 1, 1), flip=False, augment_ops=ops, erase_box=box)
    return augment(clip[None], [row])[0]


def picture() -> np.ndarray:
    """Draw colors from dark to bright, with one sharp square: uint8 [64, 64, 3]."""
    down, across = np.mgrid[0:64, 0:64] / 63
    channels = [40 + 150 * across, 30 + 190 * down, 90 + 60 * across * down]
    image = np.stack(channels, -1).astype(np.uint8)
    image[20:32, 20:32] = (200, 40, 90)
    return image


@pytest.mark.parametrize("name", TIMM)
def test_operations_are_timms(name: str) -> None:
    function, arguments, options = TIMM[name]
    expected = np.asarray(function(Image.fromarray(picture()), *arguments, **options)).astype(int)
    clip = torch.from_numpy(picture()).expand(2, 64, 64, 3)
    first, second = augment_one(clip, (AugmentOp(name, 0.5),))
    assert torch.equal(first, second), "all frames alike"
    difference = np.abs(first.numpy() - expected)
    assert np.median(difference) <= 2
    assert difference.mean() < 4


@pytest.mark.parametrize("strength", [-0.9, 0.3, 1.0])
@pytest.mark.parametrize(
    "name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y", "sharpness"]
)
def test_own_operations_are_torchvisions(name: str, strength: float) -> None:
    noise = torch.randint(0, 256, (2, 3, 6, 5), dtype=torch.uint8)
    frames = torch.nn.functional.interpolate(noise, (48, 40))
    if name == "sharpness":
        expected = F.adjust_sharpness(frames, max(0.1, 1 + 0.9 * strength))
    else:
        settings = {"angle": 0.0, "translate": [0.0, 0.0], "scale": 1.0, "shear": [0.0, 0.0]}
        settings |= {
            "rotate": {"angle": 30 * strength},
            "shear_x": {"shear": [math.degrees(math.atan(0.3 * strength)), 0.0]},
            "shear_y": {"shear": [0.0, math.degrees(math.atan(0.3 * strength))]},
            "translate_x": {"translate": [0.45 * strength * 40, 0.0]},
            "translate_y": {"translate": [0.0, 0.45 * strength * 48]},
        }[name]
        bilinear = F.InterpolationMode.BILINEAR
        expected = F.affine(frames, **settings, interpolation=bilinear, fill=[128.0])  # type: ignore[arg-type]
    augmented = augment_one(frames.permute(0, 2, 3, 1), (AugmentOp(name, strength),))
    assert augmented.is_contiguous()
    difference = (augmented.int() - expected.permute(0, 2, 3, 1)).abs()
    # torchvision rounds the coordinates of affine transforms in another way.
    max_difference = 0 if name == "sharpness" else 1
    assert difference.max() <= max_difference
    assert difference.float().mean() < 1e-3


def test_hardly_any_strength_changes_hardly_anything() -> None:
    """torchvision refuses to solarize at a threshold of 256."""
    clip = torch.from_numpy(picture()).expand(2, 64, 64, 3)
    without_strength = {"autocontrast", "equalize", "invert", "posterize"}
    for name in sorted({*OPERATIONS, *AFFINE} - without_strength):
        augmented = augment_one(clip, (AugmentOp(name, 0.0),))
        assert (augmented.int() - clip).abs().max() <= 1, name


def test_operations_follow_magnitude_and_probability() -> None:
    rng = np.random.default_rng(0)
    ops: list[AugmentOp] = []
    for _ in range(2000):
        ops += sample_ops(4, 9, rng.random(20).tolist())
    assert 3800 < len(ops) < 4200, "half of four"
    assert set(Counter(op.name for op in ops)) == set(NAMES) == {*OPERATIONS, *AFFINE}
    strengths = np.array([op.strength for op in ops])
    assert 0.45 < (strengths > 0).mean() < 0.55
    assert abs(np.abs(strengths).mean() - 0.897) < 0.005
    assert np.abs(strengths).max() == 1


def test_erased_boxes_have_area_and_ratio() -> None:
    rng = np.random.default_rng(0)
    boxes: list[EraseBox] = []
    for _ in range(4000):
        box = sample_erase_box(0.25, rng.random(NUMBERS_FOR_ERASING).tolist())
        if box is not None:
            boxes.append(box)
            assert 0 <= box.top <= 1 - box.height
            assert 0 <= box.left <= 1 - box.width
    assert 900 < len(boxes) < 1100
    areas = [box.height * box.width for box in boxes]
    ratios = [box.height / box.width for box in boxes]
    assert min(areas) >= 0.02
    assert 0.3 < max(areas) <= 1 / 3 + 1e-9
    assert 0.3 - 1e-9 <= min(ratios) < max(ratios) <= 10 / 3 + 1e-9


def test_erasing_fills_the_box_with_noise_and_nothing_else() -> None:
    clip = torch.full((2, 40, 40, 3), 7, dtype=torch.uint8)
    box = EraseBox(0.25, 0.5, 0.5, 0.25)
    result = augment_one(clip, (), box, seed=3)
    assert torch.equal(augment_one(clip, (), box, seed=3), result)
    inside = result[:, 10:30, 20:30]
    assert 110 < inside.float().mean() < 122
    assert inside.float().std() > 40
    inside.fill_(7)
    assert torch.equal(result, clip)
    assert (clip == 7).all(), "the loader's memory is left alone"


def test_the_loader_augments_as_planned(short: ShardDataset) -> None:
    config = DataConfig(frame_stride=1, rand_augment=3, random_erasing=0.5)
    plain = first_batches(short, DataConfig(frame_stride=1), 3)
    augmented = first_batches(short, config, 3)
    rows = [row for index in range(3) for row in plan_of(short, config).batch(index)]
    assert 0 < sum(row.erase_box is not None for row in rows) < 12
    # In one batch as in three.
    expected = augment(torch.cat([batch.clip for batch in plain]), rows)
    assert torch.equal(torch.cat([batch.clip for batch in augmented]), expected)
