"""RandAugment and random erasing: drawn in the plan, alike in all frames, with timm's strengths."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F
from PIL import Image
from timm.data import auto_augment as timm_augment
from torch import Tensor

from common.errors import InputError
from pipeline.augment import MAX_CLIPS, OPERATIONS, augment, batch_operations
from pipeline.config import DataConfig
from pipeline.loader import ClipLoader
from pipeline.planning.augmentations import (
    NAMES,
    NUMBERS_FOR_ERASING,
    AugmentOp,
    EraseBox,
    sample_erase_box,
    sample_ops,
)
from pipeline.planning.crops import Crop
from pipeline.planning.plan import PlanRow, TrainingPlan
from pipeline.shards.dataset import ShardDataset

# timm's function and the argument it gets for strength 0.5, of what needs no resampling.
TIMM = {
    "autocontrast": (timm_augment.auto_contrast, ()),
    "equalize": (timm_augment.equalize, ()),
    "invert": (timm_augment.invert, ()),
    "posterize": (timm_augment.posterize, (2,)),
    "solarize": (timm_augment.solarize, (128,)),
    "solarize_add": (timm_augment.solarize_add, (55,)),
    "color": (timm_augment.color, (1.45,)),
    "contrast": (timm_augment.contrast, (1.45,)),
    "brightness": (timm_augment.brightness, (1.45,)),
    "sharpness": (timm_augment.sharpness, (1.45,)),
    "rotate": (timm_augment.rotate, (-15,)),  # PIL turns the other way; the sign is drawn anyway
    "translate_x": (timm_augment.translate_x_rel, (-0.225,)),
    "translate_y": (timm_augment.translate_y_rel, (-0.225,)),
}


def alone(clip: Tensor, augment_ops: tuple[AugmentOp, ...], box: EraseBox | None = None, seed: int = 0) -> Tensor:
    """Of a batch of one clip [T, H, W, C]."""
    return augment(clip[None], [row_of(augment_ops, box, seed)])[0]


def row_of(ops: tuple[AugmentOp, ...], box: EraseBox | None = None, position: int = 0) -> PlanRow:
    return PlanRow(position, 0, 0, (0,), Crop(0, 0, 1, 1), flip=False, augment_ops=ops, erase_box=box)


def picture() -> np.ndarray:
    """Colored, from dark to bright, with one sharp square: uint8 [64, 64, 3]."""
    down, across = np.mgrid[0:64, 0:64] / 63
    image = np.stack([40 + 150 * across, 30 + 190 * down, 90 + 60 * across * down], -1).astype(np.uint8)
    image[20:32, 20:32] = (200, 40, 90)
    return image


@pytest.mark.parametrize("name", TIMM)
def test_operations_are_timms(name: str) -> None:
    function, arguments = TIMM[name]
    options = {"fillcolor": (128,) * 3, "resample": Image.Resampling.BILINEAR} if name in ("rotate",) else {}
    options |= {"fillcolor": (128,) * 3} if name.startswith("translate") else {}
    expected = np.asarray(function(Image.fromarray(picture()), *arguments, **options)).astype(int)
    clip = torch.from_numpy(picture()).expand(2, 64, 64, 3)
    ours = alone(clip, (AugmentOp(name, 0.5),))
    assert torch.equal(ours[0], ours[1]), "all frames alike"
    difference = np.abs(ours[0].numpy() - expected)
    assert np.median(difference) <= 2
    assert difference.mean() < 4


def by_torchvision(clip: Tensor, augment_ops: tuple[AugmentOp, ...]) -> Tensor:
    """One clip [T, H, W, C], by what torchvision does to one clip."""

    def moved(angle: float = 0, x: float = 0, y: float = 0, shear: tuple[float, float] = (0, 0)) -> Tensor:
        shift, degrees = [x * frames.shape[-1], y * frames.shape[-2]], [math.degrees(math.atan(part)) for part in shear]
        return F.affine(frames, angle, shift, 1.0, degrees, F.InterpolationMode.BILINEAR, fill=[128.0])

    frames = clip.permute(0, 3, 1, 2)
    for name, s in augment_ops:
        if name in ("autocontrast", "equalize", "invert"):
            frames = getattr(F, name)(frames)
        elif name == "posterize":
            frames = F.posterize(frames, max(1, 4 - int(4 * abs(s))))
        elif name == "solarize":
            frames = F.solarize(frames, 256 - int(256 * abs(s)))
        elif name == "solarize_add":
            lighter = (frames.int() + min(128, int(110 * abs(s)))).clamp(0, 255).to(torch.uint8)
            frames = torch.where(frames < 128, lighter, frames)
        elif name in ("color", "contrast", "brightness", "sharpness"):
            adjust = getattr(F, f"adjust_{'saturation' if name == 'color' else name}")
            frames = adjust(frames, max(0.1, 1 + 0.9 * s))
        else:
            by = {"rotate": ("angle", 30 * s), "translate_x": ("x", 0.45 * s), "translate_y": ("y", 0.45 * s)}
            by |= {"shear_x": ("shear", (0.3 * s, 0)), "shear_y": ("shear", (0, 0.3 * s))}
            frames = moved(**dict([by[name]]))
    return frames.permute(0, 2, 3, 1)


def test_a_batch_is_changed_as_its_clips_one_by_one_to_the_last_bit() -> None:
    rng = np.random.default_rng(0)
    drawn = [sample_ops(8, 9, rng.random(40).tolist()) for _ in range(2 * MAX_CLIPS)]
    assert {op.name for ops in drawn for op in ops} == set(NAMES)
    noise = torch.from_numpy(rng.integers(0, 256, (len(drawn), 3, 6, 5, 3), np.uint8)).float()
    clips = torch.nn.functional.interpolate(noise.permute(0, 4, 1, 2, 3), (3, 48, 40)).permute(0, 2, 3, 4, 1).byte()
    before = clips.clone()
    ours = augment(clips, [row_of(ops) for ops in drawn])
    assert torch.equal(clips, before), "the loader's memory is left alone"
    assert ours.is_contiguous()
    for clip, ops, found in zip(clips, drawn, ours, strict=True):
        assert torch.equal(found, by_torchvision(clip, ops)), ops


def test_what_is_alike_is_done_together_and_in_order() -> None:
    changes = [
        (AugmentOp("rotate", 1), AugmentOp("invert", 1)),
        (AugmentOp("shear_x", 0.5),),
        (),
        (AugmentOp("invert", 1),),
    ]
    batches = batch_operations(changes, 40, 60)
    assert [batch.clips for batch in batches] == [[0, 1], [3], [0]]
    assert [len(batch.parameters[0]) for batch in batches] == [6, 0, 0]
    many = batch_operations([(AugmentOp("invert", 1),)] * (MAX_CLIPS + 1), 40, 60)
    assert [len(batch.clips) for batch in many] == [MAX_CLIPS, 1]


def test_draws_follow_magnitude_and_share() -> None:
    rng = np.random.default_rng(0)
    drawn = [sample_ops(4, 9, rng.random(20).tolist()) for _ in range(2000)]
    changes = [change for row in drawn for change in row]
    assert 3800 < len(changes) < 4200, "half of four"
    assert set(Counter(change.name for change in changes)) == set(NAMES) == set(OPERATIONS)
    strengths = np.array([change.strength for change in changes])
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
    assert min(ratios) >= 0.3 - 1e-9
    assert max(ratios) <= 10 / 3 + 1e-9


def test_erasing_fills_the_box_with_noise_and_nothing_else() -> None:
    clip = torch.full((2, 40, 40, 3), 7, dtype=torch.uint8)
    box = EraseBox(0.25, 0.5, 0.5, 0.25)
    result = alone(clip, (), box, seed=3)
    inside = result[:, 10:30, 20:30]
    assert 110 < inside.float().mean() < 122
    assert inside.float().std() > 40
    result[:, 10:30, 20:30] = 7
    assert torch.equal(result, clip)
    assert torch.equal(alone(clip, (), box, seed=3), alone(clip, (), box, seed=3))


def test_the_loader_does_what_the_plan_says(short: ShardDataset) -> None:
    def batches(config: DataConfig) -> list[torch.Tensor]:
        plan = TrainingPlan(short, config, num_frames=8, image_size=32, seed=0, batch_size=4)
        with ClipLoader(short, plan, torch.device("cpu"), config, None) as loader:
            return [batch.clip for batch, _ in zip(loader.batches(0), range(3), strict=False)]

    config = DataConfig(frame_stride=1, rand_augment=3, random_erasing=0.5)
    plain, changed, again = batches(DataConfig(frame_stride=1)), batches(config), batches(config)
    assert all(torch.equal(a, b) for a, b in zip(changed, again, strict=True))
    plan = TrainingPlan(short, config, num_frames=8, image_size=32, seed=0, batch_size=4)
    rows = [row for index in range(3) for row in plan.batch(index)]
    clips = zip(torch.cat(plain), torch.cat(changed), rows, strict=True)
    for before, after, row in clips:
        expected = alone(before, row.augment_ops, row.erase_box, row.position)
        assert torch.equal(after, expected)
    assert 0 < sum(row.erase_box is not None for row in rows) < 12
    with pytest.raises(InputError, match=r"data\.random_erasing is 2"):
        DataConfig(random_erasing=2)
