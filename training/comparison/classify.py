"""Classify the validation videos by the features of each row."""

import sys
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from adamae.common.errors import InputError
from adamae.common.logging import log
from adamae.common.progress import progress_bar
from adamae.model.channels import takes_channels
from adamae.model.encoders.encoder import Encoder
from adamae.model.encoders.open_encoder import open_encoder
from adamae.training.comparison.candidates import Candidate, CompareOptions, Extractor
from adamae.training.comparison.entries import Comparison, Entry
from adamae.training.comparison.splits import Splits
from adamae.training.frozen_classifiers import Fitted, fit_attentive, fit_linear
from adamae.training.measures import (
    Videos,
    choose_neighbors,
    find_majority,
    find_neighbors,
    identify_videos,
    predict_by_nearest,
    predict_by_neighbors,
)
from adamae.training.remote_run import local_run
from adamae.training.startup_warnings import count_shared_videos
from adamae.training.video_features import HAND_MADE, Vectors, read_tokens

# Training videos for a point of the curve over labels are chosen so many times.
NUM_CHOICES = 5
# Of a validation video, on the page.
NUM_SHOWN_NEIGHBORS = 5


def compare(splits: Splits, options: CompareOptions) -> Comparison:
    """Extract the features of all rows, and classify the validation videos by each.

    Raise InputError if an option does not fit the videos, or a model cannot be opened.
    """
    check_options(splits, options)
    warn_of_shared(splits)
    # All models are opened first, so that a wrong name is said before hours of encoding.
    encoders = [open_encoder(local_run(model)) for model in options.models]
    check_channels(splits, encoders)
    extractor = Extractor(splits, options)
    hand_made = extractor.describe_by_hand()
    candidates = [extractor.encode_untrained()]
    for model in options.models:
        # Each is freed when its videos are encoded.
        candidates += extractor.encode(model, encoders.pop(0))
    all_vectors = [hand_made, *(candidate.vectors for candidate in candidates)]
    splits = leave_out_unreadable(splits, all_vectors)
    classifier = Classifier(splits, options)
    classifier.add_baselines(hand_made)
    with progress_bar(unit="model", desc="classify", total=len(candidates)) as progress:
        for candidate in candidates:
            classifier.add_candidate(candidate)
            progress.update()
    classifier.find_nearest(candidates)
    return classifier.comparison


def check_options(splits: Splits, options: CompareOptions) -> None:
    """Raise InputError if there are fewer training videos than options ask for."""
    counts = splits.training.count_labels()
    if max(options.labels, default=0) > min(counts.values()):
        raise InputError(
            f"--labels {max(options.labels)} is more than the {min(counts.values())} training"
            " videos of the smallest class: lower it"
        )
    choose_neighbors(torch.tensor(list(counts.elements())), options.neighbors)


def check_channels(splits: Splits, encoders: Sequence[Encoder]) -> None:
    """Raise InputError if an encoder does not take the channels of the videos."""
    channels = splits.training.dataset.channels
    for encoder in encoders:
        if not takes_channels(encoder.channels, channels):
            raise InputError(
                f"{encoder.name} takes {encoder.channels} channels, and the videos of"
                f" {splits.training.location} have {channels}: leave it out of --models"
            )


def warn_of_shared(splits: Splits) -> None:
    validation = splits.validation.dataset
    num_shared = count_shared_videos(validation, splits.training.dataset)
    if num_shared:
        log(
            f"WARNING: {num_shared} of {len(validation.samples)} validation videos are training"
            " videos, too (the same bytes or source): accuracies are optimistically biased",
            sys.stderr,
        )


def leave_out_unreadable(splits: Splits, all_vectors: Sequence[tuple[Vectors, Vectors]]) -> Splits:
    """Return the splits with the videos that every row has features of.

    Raise InputError if a class has no training video any more.
    """
    readable = []
    for index, split in enumerate(splits):
        keys = set.intersection(*(set(vectors[index]) for vectors in all_vectors))
        numbers = [
            number for number, sample in enumerate(split.dataset.samples) if sample.key in keys
        ]
        samples = [split.dataset.samples[number] for number in numbers]
        readable.append(split._replace(numbers=numbers, samples=samples))
    remaining = Splits(*readable)
    remaining.check_classes()
    return remaining


class Classifier:
    """Fills a comparison with its rows, one after the other."""

    def __init__(self, splits: Splits, options: CompareOptions) -> None:
        self._splits = splits
        self._options = options
        videos = []
        identities = identify_videos([split.samples for split in splits], options.group)
        for split, numbers in zip(splits, identities, strict=True):
            labels = torch.tensor([sample.label for sample in split.samples])
            videos.append(Videos(torch.empty(len(labels), 0), labels, numbers))
        num_neighbors = choose_neighbors(videos[0].labels, options.neighbors)
        self.comparison = Comparison(splits, options.group, videos[0], videos[1], num_neighbors)

    def add_baselines(self, hand_made: tuple[Vectors, Vectors]) -> None:
        """Add what needs no encoder."""
        comparison = self.comparison
        entries = comparison.entries
        entries.append(Entry("chance", "without an encoder"))
        majority = np.full(len(comparison.labels), find_majority(comparison.training.labels))
        predicted = {"constant": majority}
        entries.append(Entry("most common class", "without an encoder", predicted))
        queries, training = self._stack(hand_made)
        for name, part in HAND_MADE.items():
            queries_of_part = queries._replace(features=queries.features[:, part])
            training_of_part = training._replace(features=training.features[:, part])
            entry = Entry(name, "without an encoder")
            entries.append(entry)
            if name == "1-NN of pixels":
                nearest = predict_by_nearest(queries_of_part, training_of_part)
                entry.predicted["nearest"] = nearest.numpy()
            else:
                self._classify(entry, queries_of_part, training_of_part)

    def add_candidate(self, candidate: Candidate) -> None:
        """Add the row of an encoder."""
        entry = Entry(candidate.name, candidate.kind, model=candidate.model, speed=candidate.speed)
        self.comparison.entries.append(entry)
        queries, training = self._stack(candidate.vectors)
        self._classify(entry, queries, training)
        if "attentive" in self._options.measures and candidate.folders:
            tokens = []
            for split, folder in zip(self._splits, candidate.folders, strict=True):
                tokens.append(read_tokens(folder, [sample.key for sample in split.samples]))
            fitted = fit_attentive(queries, tokens[1], training, tokens[0])
            self._add(entry, "attentive", fitted)

    def find_nearest(self, candidates: Sequence[Candidate]) -> None:
        """Find the training videos that are most alike to the best encoder."""
        best = self.comparison.best_encoder
        for candidate in candidates:
            if candidate.name == best.name:
                queries, training = self._stack(candidate.vectors)
                neighbors = find_neighbors(queries, training, NUM_SHOWN_NEIGHBORS)
                self.comparison.nearest = neighbors.references.numpy()

    def _stack(self, vectors: tuple[Vectors, Vectors]) -> tuple[Videos, Videos]:
        """Return the queries and the training videos with their features."""
        stacked = []
        videos = (self.comparison.training, self.comparison.queries)
        for split, vectors_of_split, of_split in zip(self._splits, vectors, videos, strict=True):
            features = [vectors_of_split[sample.key] for sample in split.samples]
            stacked.append(of_split._replace(features=torch.stack(features)))
        return stacked[1], stacked[0]

    def _classify(self, entry: Entry, queries: Videos, training: Videos) -> None:
        measures = self._options.measures
        if "knn" in measures:
            num_neighbors = self.comparison.num_neighbors
            predicted = predict_by_neighbors(queries, training, num_neighbors)
            entry.predicted["knn"] = predicted.numpy()
        if "linear" in measures:
            self._add(entry, "linear", fit_linear(queries, training))
        for num_labels in self._options.labels:
            entry.curve[num_labels] = []
            for seed in range(NUM_CHOICES):
                chosen = choose_labeled(training.labels, num_labels, seed)
                predicted = fit_linear(queries, training.select(chosen)).predicted
                is_right = predicted == queries.labels
                entry.curve[num_labels].append(is_right.double().mean().item())

    def _add(self, entry: Entry, measure: str, fitted: Fitted) -> None:
        entry.predicted[measure] = fitted.predicted.numpy()
        entry.penalties[measure] = fitted.penalty


def choose_labeled(labels: Int[Tensor, " V"], per_class: int, seed: int) -> Int[Tensor, " W"]:
    """Choose so many videos of each class at random, the same ones for all rows."""
    order = np.random.default_rng(seed).permutation(len(labels))
    chosen = []
    for label in labels.unique():
        of_class = order[labels[order].numpy() == int(label)]
        chosen.append(torch.from_numpy(of_class[:per_class]))
    return torch.cat(chosen)
