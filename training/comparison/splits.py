"""Open the shards of a comparison, and refuse those that cannot be compared."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from adamae.common.commands import command_line
from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import DATASET_FILE, Sample
from adamae.training.evaluation import check_labels


class Split(NamedTuple):
    """The shards of one side, and the videos of them that are compared."""

    # train, and validation or test.
    name: str
    location: str
    dataset: ShardDataset
    # Their numbers in `dataset`, and what is stored of them.
    numbers: Sequence[int]
    samples: Sequence[Sample]

    @property
    def num_left_out(self) -> int:
        """Return how many videos cannot be read by all rows."""
        return len(self.dataset.samples) - len(self.samples)

    def count_labels(self) -> Counter[int]:
        """Count the videos of each class."""
        return Counter(sample.label for sample in self.samples if sample.label is not None)


class Splits(NamedTuple):
    """Both sides of a comparison."""

    training: Split
    validation: Split

    @property
    def classes(self) -> list[str]:
        return self.training.dataset.info.classes

    def check_classes(self) -> None:
        """Raise InputError if there is one class, or none to learn a class from."""
        num_training = self.training.count_labels()
        if len(num_training) < 2:
            raise InputError(
                f"{self.training.location} has videos of {len(num_training)} class: add videos of"
                " another one"
            )
        num_validation = self.validation.count_labels()
        if not num_validation:
            raise InputError(f"no video of {self.validation.location} can be read")
        for label in sorted(num_validation):
            if label not in num_training:
                raise InputError(
                    f"no training video is of {self.classes[label]!r}, but"
                    f" {num_validation[label]} of the validation videos are: add some, or leave the"
                    " class out"
                )


def open_splits(source: str) -> Splits:
    """Open SHARDS/train and SHARDS/validation, or SHARDS/test where there is no validation.

    Raise InputError if they are not there, or their labels cannot be compared.
    """
    names = ["train", "validation"]
    if not is_remote(source):
        folder = Path(source)
        if not (folder / "validation").is_dir() and (folder / "test").is_dir():
            names = ["train", "test"]
        for name in names:
            if not (folder / name / DATASET_FILE).is_file():
                raise InputError(explain_missing_splits(folder))
    opened = []
    for name in names:
        location = f"{source.rstrip('/')}/{name}"
        dataset = ShardDataset.open(location)
        check_split(location, dataset)
        opened.append(Split(name, location, dataset, range(len(dataset.samples)), dataset.samples))
    splits = Splits(*opened)
    if splits.classes != splits.validation.dataset.info.classes:
        raise InputError(
            f"{splits.training.location} and {splits.validation.location} have different classes:"
            " make both with one command (--hold-out or --split)"
        )
    splits.check_classes()
    return splits


def explain_missing_splits(folder: Path) -> str:
    """Return the sentence that says how to make shards of a folder that is none."""
    if not folder.exists():
        return f"{folder} does not exist: name a folder of shards with train/ and validation/"
    videos = "VIDEOS" if (folder / DATASET_FILE).is_file() else str(folder)
    shards = Path("shards") / f"{folder.resolve().name}-split"
    make = command_line("shards", videos, shards, "--hold-out", "0.2")
    return f"{folder} has no train/ and validation/ of shards: `{make}`, then compare {shards}"


def check_split(location: str, dataset: ShardDataset) -> None:
    """Raise InputError unless every video has one label."""
    check_labels(dataset)
    if dataset.info.multi_label:
        raise InputError(
            f"{location} has videos with several labels or none, and only videos with one label"
            " are compared: train a probe and evaluate it with evaluate.py"
        )
