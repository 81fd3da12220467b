"""The rows of a comparison, and what is measured of them."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from adamae.training.comparison.splits import Splits
from adamae.training.measures import Videos
from adamae.training.uncertainty import Estimate, estimate_accuracy, estimate_difference

Kind = Literal["without an encoder", "untrained", "published", "own"]


class Speed(NamedTuple):
    """What encoding costs on a device: the memory is a GPU's or, on a CPU, the process's."""

    frames_per_second: float
    gib: float


@dataclass
class Entry:
    """A row: what it predicts for every validation video, by measure."""

    name: str
    kind: Kind
    predicted: dict[str, Int[np.ndarray, " Q"]] = field(default_factory=dict)
    # The path or name by which commands open the encoder.
    model: str = ""
    speed: Speed | None = None
    # Of the classifiers that have one.
    penalties: dict[str, float] = field(default_factory=dict)
    # Accuracies of the linear classifier by the number of labels per class, one for each choice.
    curve: dict[int, list[float]] = field(default_factory=dict)


@dataclass
class Comparison:
    """All rows, and the videos on which they are measured."""

    splits: Splits
    # The field that names the groups of videos.
    group_field: str
    training: Videos
    queries: Videos
    num_neighbors: int
    entries: list[Entry] = field(default_factory=list)
    # The nearest training videos of each validation video, by the best encoder's features.
    nearest: Int[np.ndarray, "Q k"] | None = None

    @property
    def chance(self) -> float:
        return 1 / len(self.splits.training.count_labels())

    @property
    def labels(self) -> Int[np.ndarray, " Q"]:
        return self.queries.labels.numpy()

    @property
    def groups(self) -> Int[np.ndarray, " Q"]:
        return self.queries.groups.numpy()

    @property
    def num_groups(self) -> int:
        """Return of how many groups the validation videos are."""
        return len(np.unique(self.groups))

    @property
    def group_names(self) -> list[str]:
        """Return the name of the group of each validation video, or else its source."""
        samples = self.splits.validation.samples
        return [str(sample.fields.get(self.group_field) or sample.source) for sample in samples]

    def find_right(self, entry: Entry, measure: str) -> Bool[np.ndarray, " Q"]:
        """Return which validation videos a row classifies rightly."""
        return entry.predicted[measure] == self.labels

    def estimate(self, entry: Entry, measure: str) -> Estimate:
        """Return an accuracy of a row, with its standard error."""
        return estimate_accuracy(self.find_right(entry, measure), self.groups)

    def find_best_measure(self, entry: Entry) -> str:
        """Return the measure by which a row has its highest accuracy."""

        def count_right(measure: str) -> int:
            return int(self.find_right(entry, measure).sum())

        return max(entry.predicted, key=count_right)

    def find_best(self, *kinds: Kind) -> Entry | None:
        """Return the row of some kinds with the highest accuracy; None if there is no such row."""

        def count_right(entry: Entry) -> int:
            return int(self.find_right(entry, self.find_best_measure(entry)).sum())

        entries = [entry for entry in self.entries if entry.kind in kinds and entry.predicted]
        return max(entries, key=count_right, default=None)

    @property
    def best_encoder(self) -> Entry:
        """Return the best of the models or, if none was named, the encoder that is not trained."""
        best = self.find_best("published", "own") or self.find_best("untrained")
        assert best is not None
        return best

    @property
    def baseline(self) -> Entry:
        """Return the best row without an encoder; there is always the most common class."""
        baseline = self.find_best("without an encoder")
        assert baseline is not None
        return baseline

    def find_entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    def subtract(self, entry: Entry, baseline: Entry) -> Estimate:
        """Return by how much a row exceeds another one, each by its best measure."""
        return estimate_difference(
            self.find_right(entry, self.find_best_measure(entry)),
            self.find_right(baseline, self.find_best_measure(baseline)),
            self.groups,
        )
