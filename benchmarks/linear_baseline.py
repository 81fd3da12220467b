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
from jaxtyping import Float
from safetensors import safe_open

from benchmarks.arguments import ArgumentParser
from benchmarks.harness import Report, Row, print_table
from common.devices import choose_device
from common.errors import InputError, run_command
from extract_features import list_samples
from pipeline.config import DataConfig
from pipeline.planning.crops import FrameSize
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import DATASET_FILE
from training.evaluation import check_labels, knn_top1

GRID, SIDE, FPS = 8, 64, 8.0
PENALTIES = np.geomspace(1, 1e5, 21)
Labeled = tuple[str, dict[str, Float[np.ndarray, " D"]]]  # a video's class and its features by name


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("train", type=Path, metavar="TRAIN")
    parser.add_argument("validation", type=Path, metavar="VALIDATION")
    options = parser.parse_args()
    found = classify(options.train, options.validation)
    rows: list[Row] = [
        {"features": name, **{f"{key}_top1": value for key, value in f.items()}} for name, f in found.items()
    ]
    Report("linear_baseline", options.output, choose_device()).write(rows)
    print_table(rows)


def classify(train: Path, validation: Path) -> dict[str, dict[str, float]]:
    """Return the top-1 accuracy of ridge regression and of 20-NN by the name of the features."""
    given, asked = list(read_features(train)), list(read_features(validation))
    names, true_names = ([label for label, _ in videos] for videos in (given, asked))
    if missing := set(true_names) - set(names):
        raise InputError(f"{train} has no video of {min(missing)}, a class of {validation}: add some")
    classes = sorted(set(names))
    labels, true = (np.array([classes.index(name) for name in each]) for each in (names, true_names))
    found = {}
    for kind in given[0][1]:
        x, y = (np.stack([features[kind] for _, features in videos]) for videos in (given, asked))
        reference, features, neighbors, wanted = map(torch.from_numpy, (x, y, labels, true))
        everyone = torch.ones(len(true), len(labels), dtype=torch.bool)
        found[kind] = {
            "linear": float((ridge_predict(x, labels, y) == true).mean()),
            "knn": knn_top1(features, wanted, reference, neighbors, everyone),
        }
    return found


def read_features(place: Path) -> Iterator[Labeled]:
    """Yield a folder's labeled videos; raise InputError where there are none."""
    if (place / DATASET_FILE).is_file():
        dataset = ShardDataset.open(str(place))
        check_labels(dataset)
        for video in list_samples(dataset, "", FrameSize(SIDE, SIDE), DataConfig(fps=FPS)):
            yield video.label, describe(np.stack([shown[-1] for shown in video.frames()]))
        return
    files = sorted(place.rglob("*.safetensors"))
    if not files:
        raise InputError(
            f"{place} has neither {DATASET_FILE} nor *.safetensors: give shards or extract_features.py's OUT"
        )
    for file in files:
        with safe_open(file, "numpy") as opened:
            yield opened.metadata()["label"], {"encoder": opened.get_tensor("features").mean(axis=0)}


def describe(frames: np.ndarray) -> dict[str, Float[np.ndarray, " D"]]:
    """Average the color and the change of frames [T, SIDE, SIDE, C] in the cells of the grid."""
    cells = frames.astype(np.float32).reshape(len(frames), GRID, SIDE // GRID, GRID, SIDE // GRID, -1)
    change = np.abs(np.diff(cells, axis=0)).mean(axis=(0, 2, 4, 5)) if len(frames) > 1 else np.zeros((GRID, GRID))
    return {"mean color": cells.mean(axis=(0, 2, 4)).ravel(), "frame difference": np.log1p(change).ravel()}


def ridge_predict(
    train: Float[np.ndarray, "V D"], labels: np.ndarray, validation: Float[np.ndarray, "W D"]
) -> np.ndarray:
    """Fit ±1 of each class with the penalty of the least leave-one-out error; return the classes of `validation`."""
    mean, std = train.mean(axis=0), train.std(axis=0) + 1e-6
    x, y = (np.pad((values - mean) / std, ((0, 0), (0, 1)), constant_values=1) for values in (train, validation))
    target = 2.0 * np.eye(labels.max() + 1)[labels] - 1
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)

    def left_out_error(penalty: float) -> float:
        hat = u * (s**2 / (s**2 + penalty))
        residual = (target - hat @ (u.T @ target)) / (1 - (hat * u).sum(axis=1))[:, None]
        return float((residual**2).mean())

    penalty = min(PENALTIES, key=left_out_error)
    weights = vt.T @ ((s / (s**2 + penalty))[:, None] * (u.T @ target))
    return (y @ weights).argmax(axis=1)


if __name__ == "__main__":
    run_command(main)
