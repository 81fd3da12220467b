"""Labels of the first frame are carried on by features: exact ones, random ones, those of a tiny model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from common.errors import InputError
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.weights import pretrained
from training.label_propagation import (
    boundary_f,
    jaccard,
    judge_key_points,
    judge_masks,
    label_maps,
    main,
    parse_arguments,
    propagate,
)

SIZE, GRID, FRAMES = 64, 16, 10
CONFIG = ModelConfig(
    encoder_width=48, encoder_depth=1, encoder_heads=3, decoder_width=32, decoder_depth=1, decoder_heads=2,
    num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75,
)  # fmt: skip


def make_masks() -> np.ndarray:
    """Two squares, which move to the right and downwards, a token a frame."""
    masks = np.zeros((FRAMES, SIZE, SIZE), np.int64)
    for i in range(FRAMES):
        masks[i, 8:24, 4 * i : 4 * i + 16] = 1
        masks[i, 24 + 4 * i - 4 : 36 + 4 * i, 44:60] = 2
    return masks


def features_of(masks: np.ndarray, scale: int = SIZE // GRID) -> torch.Tensor:
    """Tell objects apart, and nothing else."""
    labels = torch.from_numpy(masks[:, scale // 2 :: scale, scale // 2 :: scale])
    return torch.nn.functional.one_hot(labels, 3).float()


def test_exact_features_carry_masks_on_and_random_ones_do_not() -> None:
    masks = make_masks()
    first = label_maps(masks[0], (GRID, GRID), (SIZE, SIZE))
    assert first.shape == (3, GRID, GRID)
    assert torch.equal(first.sum(dim=0), torch.ones(GRID, GRID))
    exact = judge_masks(propagate(features_of(masks), first, 7, 16, 5), masks, (SIZE, SIZE))
    assert min(exact["J"]) > 0.9
    assert min(exact["F"]) > 0.9
    random = propagate(torch.randn(FRAMES, GRID, GRID, 8), first, 7, 16, 5)
    assert max(judge_masks(random, masks, (SIZE, SIZE))["J"]) < 0.3
    near = propagate(torch.randn(FRAMES, GRID, GRID, 8), first, 7, 1, 5)
    assert (near[1, 1][:, 7:] == 0).all(), "no label goes further than the radius: of columns 0 to 3, and one"


def test_a_label_comes_from_the_nearest_of_the_context() -> None:
    features = torch.zeros(4, 1, 2, 4)
    features[0, 0] = torch.eye(4)[:2]
    features[1, 0] = torch.eye(4)[[1, 2]]  # the second is new, and takes the mean of all that is as far
    features[2, 0] = features[3, 0] = torch.eye(4)[[2, 0]]
    first = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    found = propagate(features, first, context=1, radius=1, top_k=1)
    assert found[1, :, 0, 0].tolist() == [0, 1]
    assert torch.equal(found[2, :, 0, 0], found[1, :, 0, 1]), "of the frame before"
    assert found[3, :, 0, 1].tolist() == [1, 0], "of the first, whatever the context is"


def test_j_and_f_have_the_values_of_the_definition() -> None:
    truth, moved = np.zeros((2, 100, 100), bool)
    truth[20:60, 20:60] = True
    moved[20:60, 30:70] = True
    assert jaccard(truth, truth) == jaccard(~truth & truth, ~truth & truth) == 1
    assert jaccard(moved, truth) == 30 / 50
    assert boundary_f(truth, truth) == 1
    assert boundary_f(truth, ~truth & truth) == 0
    moved[:] = False
    moved[22:62, 20:60] = True
    assert boundary_f(moved, truth) == 1, "two pixels are allowed at a diagonal of 141"
    moved[:] = False
    moved[20:60, 40:80] = True
    assert 0.25 < boundary_f(moved, truth) < 0.35, "half of the horizontal edges fit, of the vertical ones their ends"


def test_key_points_follow_their_features() -> None:
    points = np.stack([[[10.0 + 4 * i, 30.0], [50.0, 10.0 + 4 * i], [34.0, 34.0]] for i in range(FRAMES)])
    features = torch.zeros(FRAMES, GRID, GRID, 4)
    features[..., 3] = 1
    for i, frame in enumerate(points):
        for number, (x, y) in enumerate(frame):
            features[i, int(y) // 4, int(x) // 4] = torch.eye(4)[number]
    first = label_maps(points[0], (GRID, GRID), (SIZE, SIZE))
    scores = judge_key_points(propagate(features, first, 3, 16, 1), points, (SIZE, SIZE))
    assert len(scores["PCK@0.1"]) == 3 * (FRAMES - 1)
    assert np.mean(scores["PCK@0.2"]) == 1
    stays = judge_key_points(first.expand(FRAMES, -1, -1, -1), points, (SIZE, SIZE))
    assert np.mean(stays["PCK@0.1"]) < 0.6


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Frames with noise, masks of `a/x`, key points of `b`, weights."""
    pretrained.save(tmp_path / "model.safetensors", AdaMAE(CONFIG).state_dict(), pretrained.make_metadata(CONFIG))
    masks = make_masks()
    for name, kind in (("a/x", "jpg"), ("b", "png"), ("c", "png")):
        (tmp_path / "frames" / name).mkdir(parents=True)
        for i, mask in enumerate(masks[:5]):
            frame = np.random.default_rng(0).integers(0, 99, (SIZE, SIZE, 3)) + 78 * mask[..., None]
            Image.fromarray(frame.astype(np.uint8)).save(tmp_path / f"frames/{name}/{i:05d}.{kind}")
    (tmp_path / "masks/a/x").mkdir(parents=True)
    for i, mask in enumerate(masks[:5]):
        Image.fromarray(mask.astype(np.uint8)).save(tmp_path / f"masks/a/x/{i:05d}.png")
    points = np.stack([[[10.0 + 4 * i, 30.0], [50.0, 10.0 + 4 * i]] for i in range(5)])
    for name in ("b", "c"):
        (tmp_path / "points" / name).mkdir(parents=True)
    np.save(tmp_path / "points/b/key_points.npy", points)
    savemat(tmp_path / "points/c/joint_positions.mat", {"pos_img": points.transpose(2, 1, 0) + 1})
    return tmp_path


def run(data: Path, labels: str, *more: str) -> dict:
    given = [data / "model.safetensors", data / "frames", data / labels, "--device", "cpu", "--output", data / "out"]
    main(parse_arguments([*map(str, given), *more]))
    return json.loads((data / "out/results.json").read_text())


def test_masks_and_key_points_of_folders(data: Path) -> None:
    found = run(data, "masks")
    assert found["J&F"] == (found["J"] + found["F"]) / 2
    assert 0 < found["first_frame_stays"]["J"] < 1, "objects move on"
    for file in (data / "masks/a/x").iterdir():  # other numbers, as DAVIS 2016 has them
        Image.fromarray(np.array([0, 7, 255], np.uint8)[np.asarray(Image.open(file))]).save(file)
    assert run(data, "masks") == found
    points = run(data, "points", "--radius", "2")
    assert points["videos"] == 2
    (data / "list.txt").write_text("b\n")
    assert run(data, "points", "--radius", "2", "--list", str(data / "list.txt"))["PCK@0.2"] == points["PCK@0.2"]


def test_what_cannot_be_judged_is_one_sentence(data: Path) -> None:
    with pytest.raises(InputError, match=r"holds neither masks .* nor key points"):
        run(data, "frames/none")
    (data / "frames/a/x/00004.jpg").unlink()
    with pytest.raises(InputError, match=r"has 4 frames .* and labels of 5: they must be as many"):
        run(data, "masks")
    with pytest.raises(InputError, match=r"names.txt does not exist"):
        run(data, "masks", "--list", "names.txt")
    Image.fromarray(np.zeros((SIZE, SIZE), np.uint8)).save(data / "masks/a/x/00000.png")
    with pytest.raises(InputError, match="of which the first marks an object"):
        run(data, "masks")
    assert not (data / "out").exists()
