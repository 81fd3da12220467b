"""Classify videos by linear regression and 20-NN: `python benchmarks/linear_baseline.py TRAIN VALIDATION`.

TRAIN and VALIDATION are labeled shards, of which hand-made features are taken, or two folders of extract_features.py.
Hand-made are the mean color and the mean absolute difference of frames 1/8 s apart, each in the cells of an 8 × 8 grid:
what a video encoder must exceed to be worth anything. An encoder's are the mean over a video's windows. The penalty of
the regression (ridge) is chosen by leaving one training video out, never on VALIDATION.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from benchmarks.arguments import ArgumentParser
from benchmarks.harness import Report, Row, print_table
from common.devices import choose_device
from common.errors import InputError, run_command
from extract_features import list_samples
from pipeline.config import DataConfig
from pipeline.planning.crops import FrameSize
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import DATASET_FILE
from training.evaluation import check_labels, knn_top1, read_features

GRID, SIDE, FPS = 8, 64, 8.0


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("train", type=Path, metavar="TRAIN")
    parser.add_argument("validation", type=Path, metavar="VALIDATION")
    options = parser.parse_args()
    rows = classify(options.train, options.validation)
    Report("linear_baseline", options.output, choose_device()).write(rows)
    print_table(rows)


def classify(train: Path, validation: Path) -> list[Row]:
    """Return the top-1 accuracy of ridge regression and of 20-NN, a row for each kind of features."""
    (names, given), (true_names, asked) = (zip(*list_features(place), strict=True) for place in (train, validation))
    if missing := set(true_names) - set(names):
        raise InputError(f"{train} has no video of {min(missing)}, a class of {validation}: add some")
    classes = sorted(set(names))
    labels, true = (torch.tensor([classes.index(name) for name in each]) for each in (names, true_names))
    everyone = torch.ones(len(true), len(labels), dtype=torch.bool)
    rows: list[Row] = []
    for kind in given[0]:
        x, y = (torch.tensor(np.stack([video[kind] for video in videos])) for videos in (given, asked))
        linear = (ridge_predict(x, labels, y) == true).double().mean().item()
        rows.append({"features": kind, "linear_top1": linear, "knn_top1": knn_top1(y, true, x, labels, everyone)})
    return rows


def list_features(place: Path) -> Iterator[tuple[str, dict[str, Float[np.ndarray, " D"]]]]:
    """Yield each labeled video's class and its features by kind; raise InputError where there are none."""
    if (place / DATASET_FILE).is_file():
        dataset = ShardDataset.open(str(place))
        check_labels(dataset)
        for video in list_samples(dataset, "", FrameSize(SIDE, SIDE), DataConfig(fps=FPS)):
            yield video.label, describe(np.stack([shown[-1] for shown in video.frames()]))
        return
    for about, features in zip(*read_features(place), strict=True):
        yield about["label"], {"encoder": features.numpy()}


def describe(frames: np.ndarray) -> dict[str, Float[np.ndarray, " D"]]:
    """Average the color and the change of frames [T, SIDE, SIDE, C] in the cells of the grid."""
    cells = frames.astype(np.float32).reshape(len(frames), GRID, SIDE // GRID, GRID, SIDE // GRID, -1)
    change = np.abs(np.diff(cells, axis=0, append=cells[-1:])).sum(axis=0).mean(axis=(1, 3, 4))
    steps = max(1, len(frames) - 1)
    return {"mean color": cells.mean(axis=(0, 2, 4)).ravel(), "frame difference": np.log1p(change / steps).ravel()}


def ridge_predict(
    train: Float[Tensor, "V D"], labels: Int[Tensor, " V"], validation: Float[Tensor, "W D"]
) -> Int[Tensor, " W"]:
    """Fit ±1 of each class with the penalty of the least leave-one-out error; return the classes of `validation`."""
    mean, std = train.mean(dim=0), train.std(dim=0) + 1e-6
    x, y = (F.pad((values - mean) / std, (0, 1), value=1).double() for values in (train, validation))
    target = 2 * F.one_hot(labels).double() - 1
    u, s, vt = torch.linalg.svd(x, full_matrices=False)

    def left_out_error(penalty: float) -> float:
        hat = u * (s**2 / (s**2 + penalty))
        return ((target - hat @ (u.T @ target)) / (1 - (hat * u).sum(dim=1, keepdim=True))).square().mean().item()

    penalty = min(np.geomspace(1, 1e5, 21), key=left_out_error)
    return (y @ vt.T @ ((s / (s**2 + penalty))[:, None] * (u.T @ target))).argmax(dim=1)


if __name__ == "__main__":
    run_command(main)
