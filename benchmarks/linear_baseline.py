"""Compare an encoder with features made by hand.

    python benchmarks/linear_baseline.py TRAIN VALIDATION --model RUN

Videos of the labeled shards VALIDATION are classified by those of TRAIN: by ridge regression (its
penalty is chosen by leaving one training video out) and by 20-NN. Features made by hand are the
mean color and the mean absolute difference of frames 1/8 s apart, each in the cells of an 8 × 8
grid: what a video encoder must exceed to be worth anything. Those of an encoder are the mean and
standard deviation over windows of a video, which overlap by three quarters.
"""

from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
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
from adamae.training.feature_files import read_feature_files
from adamae.training.remote_run import local_run
from adamae.training.video_windows import WindowReader

# Cells of a frame, along each side.
GRID = 8
# Pixels of a frame, along each side: a cell has 8 × 8 of them.
SIDE = 64
# The rate at which the labeled clips of docs/results.md are stored.
FPS = 8.0
KNN_NEIGHBORS = 20
KNN_TEMPERATURE = 0.07


class Labeled(NamedTuple):
    """Features of videos and their classes, in the same order."""

    classes: list[str]
    features: Float[Tensor, "V D"]


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("train", metavar="TRAIN")
    parser.add_argument("validation", metavar="VALIDATION")
    parser.add_argument(
        "--model",
        help="a run, a checkpoint or an export (default: features made by hand alone)",
    )
    options = parser.parse_args()
    train = describe_videos(options.train)
    validation = describe_videos(options.validation)
    if options.model:
        name = f"encoder of {options.model}"
        run = local_run(options.model)
        train[name] = encode_videos(run, options.train)
        validation[name] = encode_videos(run, options.validation)
    # Chance and the most common class come first: without them, an accuracy says nothing.
    rows = list_trivial_rows(train["mean color"].classes, validation["mean color"].classes)
    for name, features in train.items():
        rows.append({"features": name, **classify(features, validation[name])})
    Report("linear_baseline", options.output, choose_device()).write(rows)
    print_table(rows)


def list_trivial_rows(train: list[str], validation: list[str]) -> list[Row]:
    """Return the accuracies of guessing, and of always naming the most common class."""
    counts = Counter(validation)
    most_common = max(counts.values()) / counts.total()
    return [
        {"features": "none: chance", "linear_top1": 1 / len(set(train))},
        {"features": "none: most common class", "linear_top1": most_common},
    ]


def describe_videos(shards: str) -> dict[str, Labeled]:
    """Return the hand-made features of labeled shards, by name.

    Raise InputError if a video has no label.
    """
    dataset = ShardDataset.open(shards)
    check_labels(dataset)
    reader = WindowReader(DataConfig(fps=FPS), FrameSize(SIDE, SIDE))
    classes = []
    colors = []
    differences = []
    for video in reader.list_samples(dataset):
        frames = np.stack([frame.image for frame in video.frames()])
        color, difference = describe(frames)
        classes.append(video.label)
        colors.append(color)
        differences.append(difference)
    return {
        "mean color": Labeled(classes, torch.tensor(np.stack(colors))),
        "frame difference": Labeled(classes, torch.tensor(np.stack(differences))),
    }


def describe(
    frames: UInt8[np.ndarray, "T H W C"],
) -> tuple[Float[np.ndarray, " color"], Float[np.ndarray, " difference"]]:
    """Average the color, and the change from frame to frame, in the cells of the grid."""
    num_frames, height, width, _ = frames.shape
    shape = (num_frames, GRID, height // GRID, GRID, width // GRID, -1)
    cells = frames.astype(np.float32).reshape(shape)
    color = cells.mean(axis=(0, 2, 4))
    # A copy of the last frame adds no change, and lets a video of a single frame have a sum.
    change = np.abs(np.diff(cells, axis=0, append=cells[-1:]))
    num_changes = max(1, num_frames - 1)
    mean_change = change.sum(axis=0).mean(axis=(1, 3, 4)) / num_changes
    return color.ravel(), np.log1p(mean_change).ravel()


def encode_videos(model: Path, shards: str) -> Labeled:
    """Extract a model's features of labeled shards, at the frame rate that it was trained with."""
    # A quarter of a window. With the standard deviation over windows beside the mean, ridge
    # regression reached 0.47 instead of 0.37 on four held-out groups of UCF-101.
    stride = max(1, load_encoder(model).config.num_frames // 4)
    # The command prints where its features are, but this folder is deleted at once.
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        arguments = [shards, folder, f"--model={model}", f"--stride={stride}"]
        extract_features(parse_extraction(arguments))
        videos, features = read_features(Path(folder))
    return Labeled([video["label"] for video in videos], features)


def classify(train: Labeled, validation: Labeled) -> Row:
    """Return the top-1 accuracy of ridge regression and of 20-NN.

    Raise InputError if a class of the validation videos is none of the training videos'.
    """
    missing = set(validation.classes) - set(train.classes)
    if missing:
        raise InputError(
            f"no training video is of {min(missing)!r}, but a validation video is: add some"
        )
    ids = {name: number for number, name in enumerate(sorted(set(train.classes)))}
    labels = torch.tensor([ids[name] for name in train.classes])
    true_labels = torch.tensor([ids[name] for name in validation.classes])
    predicted = ridge_predict(train.features, labels, validation.features)
    # Every training video may be a neighbor of every validation video.
    allowed = torch.ones(len(true_labels), len(labels), dtype=torch.bool)
    return {
        "linear_top1": (predicted == true_labels).double().mean().item(),
        "knn_top1": knn_top1(validation.features, true_labels, train.features, labels, allowed),
    }


def ridge_predict(
    train: Float[Tensor, "V D"], labels: Int[Tensor, " V"], validation: Float[Tensor, "W D"]
) -> Int[Tensor, " W"]:
    """Fit ±1 for each class by ridge regression; return the classes of the validation videos.

    The penalty is that of the least leave-one-out error, which one singular value decomposition
    gives for all penalties (Hastie, Tibshirani, Friedman: The Elements of Statistical Learning,
    equation 7.64): the residual of each video divided by one minus its leverage.
    """
    mean = train.mean(dim=0)
    # A feature that is the same in all videos has no deviation to divide by.
    std = train.std(dim=0) + 1e-6

    def standardize(features: Tensor) -> Tensor:
        """Standardize, and append a column of ones for the bias."""
        # In double precision: with more features than videos, leverages come close to 1, and the
        # error is divided by their distance to it.
        return F.pad((features - mean) / std, (0, 1), value=1).double()

    target = 2 * F.one_hot(labels).double() - 1
    u, s, vt = torch.linalg.svd(standardize(train), full_matrices=False)
    projected = u.T @ target

    def leave_one_out_error(penalty: float) -> float:
        scaled = u * (s**2 / (s**2 + penalty))
        residuals = target - scaled @ projected
        leverages = (scaled * u).sum(dim=1, keepdim=True)
        left_out_residuals = residuals / (1 - leverages)
        return left_out_residuals.square().mean().item()

    # Four penalties per decade. Each costs one product of matrices, as all share the decomposition.
    penalty = min(np.geomspace(1, 1e5, 21), key=leave_one_out_error)
    shrunk = s / (s**2 + penalty)
    weights = vt.T @ (shrunk[:, None] * projected)
    return (standardize(validation) @ weights).argmax(dim=1)


def knn_top1(
    queries: Float[Tensor, "Q D"],
    query_labels: Int[Tensor, " Q"],
    references: Float[Tensor, "R D"],
    reference_labels: Int[Tensor, " R"],
    allowed: Bool[Tensor, "Q R"],
) -> float:
    """Compute the 20-NN accuracy of the queries that have any allowed neighbor, by features.

    Each of the nearest neighbors by cosine similarity s of centered features votes for its class
    with the weight exp(s / KNN_TEMPERATURE); neighbors that are not allowed have the weight 0.
    """
    # Features of a masked autoencoder have a large mean, beside which all are alike.
    center = references.mean(dim=0)
    similarity = F.normalize(queries - center, dim=1) @ F.normalize(references - center, dim=1).T
    num_neighbors = min(KNN_NEIGHBORS, len(references))
    nearest = similarity.masked_fill(~allowed, -torch.inf).topk(num_neighbors, dim=1)
    weights = (nearest.values / KNN_TEMPERATURE).exp()
    votes = F.one_hot(reference_labels[nearest.indices]) * weights[..., None]
    is_right = votes.sum(dim=1).argmax(dim=1) == query_labels
    return is_right[allowed.any(dim=1)].double().mean().item()


def read_features(folder: Path) -> tuple[list[dict[str, Any]], Float[Tensor, "V 2D"]]:
    """Read the metadata and features of all videos that extract_features.py has written.

    Features are the mean and the standard deviation over the windows of a video, since how they
    change tells motions apart. Raise InputError if there are none, or one has no label.
    """
    metadata = []
    features = []
    for video in read_feature_files(folder):
        if not video.metadata.get("label"):
            raise InputError(
                f"{video.file} has no label: extract features of class folders, or of shards with"
                " labels"
            )
        metadata.append(video.metadata)
        std, mean = torch.std_mean(video.features, dim=0, correction=0)
        features.append(torch.cat((mean, std)))
    if not metadata:
        raise InputError(
            f"{folder} has no features as safetensors or for webdataset: run extract_features.py,"
            " or name labeled shards"
        )
    return metadata, torch.stack(features)


if __name__ == "__main__":
    run_command(main)
