"""Compare an encoder with hand-made features: `python benchmarks/linear_baseline.py TRAIN VALIDATION --model RUN`.

Videos of the labeled shards VALIDATION are classified by those of TRAIN: by ridge regression (its penalty is chosen by
leaving one training video out) and by 20-NN. Hand-made features are the mean color and the mean absolute difference of
frames 1/8 s apart, each in the cells of an 8 × 8 grid: what a video encoder must exceed to be worth anything. Those of
an encoder are the mean and standard deviation over windows of a video, which overlap by three quarters.
"""

from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import Report, Row, print_table
from adamae.common.devices import choose_device
from adamae.common.errors import InputError, run_command
from adamae.extract_features import main as extract_features
from adamae.extract_features import parse_arguments as parse_extraction
from adamae.model.weights.load_model import load_encoder
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning.crops import FrameSize
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.evaluation import check_labels
from adamae.training.held_out import knn_top1, read_features
from adamae.training.remote_run import local_run
from adamae.training.video_windows import WindowReader

GRID, SIDE, FPS = 8, 64, 8.0
Labeled = tuple[list[str], Float[Tensor, "V D"]]  # classes and features of videos


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("train", metavar="TRAIN")
    parser.add_argument("validation", metavar="VALIDATION")
    parser.add_argument(
        "--model", help="a run, a checkpoint or an export (default: hand-made features alone)"
    )
    options = parser.parse_args()
    given, asked = (describe_videos(shards) for shards in (options.train, options.validation))
    if options.model:
        for videos, shards in ((given, options.train), (asked, options.validation)):
            videos[f"encoder of {options.model}"] = encode_videos(local_run(options.model), shards)
    classes, counts = set(given["mean color"][0]), Counter(asked["mean color"][0])
    rows: list[Row] = [
        {"features": "none: chance", "linear_top1": 1 / len(classes)},
        {
            "features": "none: most common class",
            "linear_top1": max(counts.values()) / counts.total(),
        },
        *({"features": kind, **classify(given[kind], asked[kind])} for kind in given),
    ]
    Report("linear_baseline", options.output, choose_device()).write(rows)
    print_table(rows)


def describe_videos(shards: str) -> dict[str, Labeled]:
    """Make the hand-made features of labeled shards; raise InputError where a video has no label."""
    dataset = ShardDataset.open(shards)
    check_labels(dataset)
    videos = list(WindowReader(DataConfig(fps=FPS), FrameSize(SIDE, SIDE)).list_samples(dataset))
    found = [describe(np.stack([frame.image for frame in video.frames()])) for video in videos]
    labels = [video.label for video in videos]
    return {
        kind: (labels, torch.tensor(np.stack([features[kind] for features in found])))
        for kind in found[0]
    }


def describe(frames: np.ndarray) -> dict[str, Float[np.ndarray, " D"]]:
    """Average the color and the change of frames [T, SIDE, SIDE, C] in the cells of the grid."""
    cells = frames.astype(np.float32).reshape(
        len(frames), GRID, SIDE // GRID, GRID, SIDE // GRID, -1
    )
    change = np.abs(np.diff(cells, axis=0, append=cells[-1:])).sum(axis=0).mean(axis=(1, 3, 4))
    steps = max(1, len(frames) - 1)
    return {
        "mean color": cells.mean(axis=(0, 2, 4)).ravel(),
        "frame difference": np.log1p(change / steps).ravel(),
    }


def encode_videos(model: Path, shards: str) -> Labeled:
    """Extract a model's features of labeled shards, at the frame rate that it was trained with."""
    stride = max(1, load_encoder(model).config.num_frames // 4)
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):  # which names the folder
        extract_features(
            parse_extraction([shards, folder, f"--model={model}", f"--stride={stride}"])
        )
        about, features = read_features(Path(folder))
    return [video["label"] for video in about], features


def classify(given: Labeled, asked: Labeled) -> Row:
    """Return the top-1 accuracy of ridge regression and of 20-NN."""
    (names, x), (true_names, y) = given, asked
    if missing := set(true_names) - set(names):
        raise InputError(
            f"no training video is of {min(missing)!r}, but a validation video is: add some"
        )
    ids = {name: number for number, name in enumerate(sorted(set(names)))}
    labels, true = (torch.tensor([ids[name] for name in found]) for found in (names, true_names))
    everyone = torch.ones(len(true), len(labels), dtype=torch.bool)
    linear = (ridge_predict(x, labels, y) == true).double().mean().item()
    return {"linear_top1": linear, "knn_top1": knn_top1(y, true, x, labels, everyone)}


def ridge_predict(
    train: Float[Tensor, "V D"], labels: Int[Tensor, " V"], validation: Float[Tensor, "W D"]
) -> Int[Tensor, " W"]:
    """Fit ±1 of each class with the penalty of the least leave-one-out error; return the classes of `validation`."""
    mean, std = train.mean(dim=0), train.std(dim=0) + 1e-6
    x, y = (
        F.pad((values - mean) / std, (0, 1), value=1).double() for values in (train, validation)
    )
    target = 2 * F.one_hot(labels).double() - 1
    u, s, vt = torch.linalg.svd(x, full_matrices=False)

    def left_out_error(penalty: float) -> float:
        hat = u * (s**2 / (s**2 + penalty))
        return (
            ((target - hat @ (u.T @ target)) / (1 - (hat * u).sum(dim=1, keepdim=True)))
            .square()
            .mean()
            .item()
        )

    penalty = min(np.geomspace(1, 1e5, 21), key=left_out_error)
    return (y @ vt.T @ ((s / (s**2 + penalty))[:, None] * (u.T @ target))).argmax(dim=1)


if __name__ == "__main__":
    run_command(main)
