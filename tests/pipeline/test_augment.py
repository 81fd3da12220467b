"""RandAugment and random erasing: sampled in the plan, the same in all frames, with timm's strengths."""

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
    "rotate": (
        timm_augment.rotate,
        (-15,),
        {**FILL, "resample": Image.Resampling.BILINEAR},
    ),  # PIL's sign is opposite
    "translate_x": (timm_augment.translate_x_rel, (-0.225,), FILL),
    "translate_y": (timm_augment.translate_y_rel, (-0.225,), FILL),
}


def augment_one(
    clip: Tensor, ops: tuple[AugmentOp, ...], box: EraseBox | None = None, seed: int = 0
) -> Tensor:
    row = PlanRow(seed, 0, (0,), Crop(0, 0, 1, 1), flip=False, augment_ops=ops, erase_box=box)
    return augment(clip[None], [row])[0]


def picture() -> np.ndarray:
    """Colors from dark to bright, with one sharp square: uint8 [64, 64, 3]."""
    down, across = np.mgrid[0:64, 0:64] / 63
    image = np.stack([40 + 150 * across, 30 + 190 * down, 90 + 60 * across * down], -1).astype(
        np.uint8
    )
    image[20:32, 20:32] = (200, 40, 90)
    return image


@pytest.mark.parametrize("name", TIMM)
def test_operations_are_timms(name: str) -> None:
    function, arguments, options = TIMM[name]
    expected = np.asarray(function(Image.fromarray(picture()), *arguments, **options)).astype(int)
    found = augment_one(torch.from_numpy(picture()).expand(2, 64, 64, 3), (AugmentOp(name, 0.5),))
    assert torch.equal(found[0], found[1]), "all frames alike"
    difference = np.abs(found[0].numpy() - expected)
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
    found = augment_one(frames.permute(0, 2, 3, 1), (AugmentOp(name, strength),))
    assert found.is_contiguous()
    difference = (found.int() - expected.permute(0, 2, 3, 1)).abs()
    assert difference.max() <= (name != "sharpness"), "coordinates are rounded otherwise"
    assert difference.float().mean() < 1e-3


def test_hardly_any_strength_changes_hardly_anything() -> None:
    """Solarizing at a threshold of 256 is an error of torchvision's."""
    clip = torch.from_numpy(picture()).expand(2, 64, 64, 3)
    for name in sorted(
        {*OPERATIONS, *AFFINE} - {"autocontrast", "equalize", "invert", "posterize"}
    ):
        assert (augment_one(clip, (AugmentOp(name, 0.0),)).int() - clip).abs().max() <= 1, name


def test_operations_follow_magnitude_and_probability() -> None:
    rng = np.random.default_rng(0)
    ops = [op for _ in range(2000) for op in sample_ops(4, 9, rng.random(20).tolist())]
    assert 3800 < len(ops) < 4200, "half of four"
    assert set(Counter(op.name for op in ops)) == set(NAMES) == {*OPERATIONS, *AFFINE}
    strengths = np.array([op.strength for op in ops])
    assert 0.45 < (strengths > 0).mean() < 0.55
    assert abs(np.abs(strengths).mean() - 0.897) < 0.005
    assert np.abs(strengths).max() == 1


def test_erased_boxes_have_area_and_ratio() -> None:
    rng = np.random.default_rng(0)
    boxes = [sample_erase_box(0.25, rng.random(NUMBERS_FOR_ERASING).tolist()) for _ in range(4000)]
    found = [box for box in boxes if box is not None]
    assert 900 < len(found) < 1100
    assert all(0 <= b.top <= 1 - b.height and 0 <= b.left <= 1 - b.width for b in found)
    areas, ratios = [b.height * b.width for b in found], [b.height / b.width for b in found]
    assert min(areas) >= 0.02
    assert 0.3 < max(areas) <= 1 / 3 + 1e-9
    assert 0.3 - 1e-9 <= min(ratios) < max(ratios) <= 10 / 3 + 1e-9


def test_erasing_fills_the_box_with_noise_and_nothing_else() -> None:
    clip, box = torch.full((2, 40, 40, 3), 7, dtype=torch.uint8), EraseBox(0.25, 0.5, 0.5, 0.25)
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
    plain, augmented = (
        torch.cat([batch.clip for batch in first_batches(short, settings, 3)])
        for settings in (DataConfig(frame_stride=1), config)
    )
    rows = [row for index in range(3) for row in plan_of(short, config).batch(index)]
    assert 0 < sum(row.erase_box is not None for row in rows) < 12
    assert torch.equal(augment(plain, rows), augmented), "in one batch as in three"
