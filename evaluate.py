"""Evaluate a classifier: `python evaluate.py CHECKPOINT SHARDS [section.key=value ...]`, or under torchrun.

Averages probabilities over --clips × --crops views of every video in SHARDS. Each video counts once, at any number of
ranks; one that does not decode ends the evaluation with its name. CHECKPOINT is a run directory (its best weights, or
its newest), a checkpoint, or a file of weights, also of the authors or of Hugging Face. How clips are sampled is taken
from the run's config.yaml, or from --config. Writes predictions.csv (a line per video, the most confident mistakes
first), confusion.png and results.json, with the scores of each class, to --output.

    python evaluate.py hf://user/name SHARDS --knn TRAINING_SHARDS
    python evaluate.py FEATURES --knn TRAINING_FEATURES

With --knn, no classifier is needed: every video gets the class of its 20 nearest neighbors by the features of a clip,
or of all that extract_features.py has written of it.
"""

import argparse
import sys
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between
from adamae.common.errors import InputError, parse_early, run_command

OVERRIDES = (
    *(
        "data.frame_stride",
        "data.fps",
        "data.sampling",
        "data.decoder",
        "data.num_workers",
        "data.prefetch",
    ),
    *(
        "data.prefetch_mib",
        "data.cache_dir",
        "data.cache_gib",
        "data.decode_timeout_s",
        "device",
        "precision",
    ),
)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("checkpoint", help="run directory (or its URL), checkpoint directory, or file of weights")
    add(
        "shards",
        nargs="?",
        help="labeled dataset folder; none if CHECKPOINT is a folder of features",
    )
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="such as data.frame_stride=2",
    )
    add(
        "--config", type=Path, help="how clips are sampled, if CHECKPOINT is not in a run directory"
    )
    add(
        "--knn", metavar="SHARDS", help="labeled videos, or their features, which are the neighbors"
    )
    add(
        "--clips",
        type=between(1),
        default=1,
        help="clips per video: 5 for Kinetics, 2 for SSv2 in the paper",
    )
    add("--crops", type=between(1), default=1, help="crops along the longer side: 3 in the paper")
    add("--batch-size", type=between(1), default=8, help="views per rank and forward pass")
    add(
        "--output",
        type=Path,
        help="folder of the results (default: evaluation/ in the run directory)",
    )
    options = parser.parse_intermixed_args(arguments)  # overrides may also follow options
    if options.knn and (options.clips, options.crops) != (1, 1):
        raise InputError("--knn compares the features of one clip: leave out --clips and --crops")
    if options.shards is None and not options.knn:
        raise InputError(
            f"what is {options.checkpoint} to be evaluated on? give a labeled dataset folder as SHARDS"
        )
    for key in (override.partition("=")[0] for override in options.overrides):
        if key not in OVERRIDES:
            raise InputError(
                f"{key} changes nothing in an evaluation: it takes {', '.join(OVERRIDES)}"
            )
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import csv
import io
import time
from dataclasses import replace
from typing import Any

import torch

from adamae.common.atomic_io import atomic_write, write_json, write_text
from adamae.common.devices import explain_out_of_memory
from adamae.common.logging import format_duration, log
from adamae.figures.confusion import plot_confusion
from adamae.model.classifier import load_classifier
from adamae.model.weights import pretrained
from adamae.model.weights.find_weights import find_file, run_of
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.read_config import run_config
from adamae.pipeline.reading.storage import is_remote
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import TrainConfig, parse
from adamae.training.distributed import Distributed
from adamae.training.evaluation import Evaluator, Predictions, check_classes, majority_top1
from adamae.training.held_out import HeldOut, knn_top1, read_features
from adamae.training.remote_run import local_run
from adamae.training.startup_warnings import count_shared_videos
from adamae.training.summary import describe_scores, interpret_scores


@explain_out_of_memory("lower --batch-size")
def evaluate(options: argparse.Namespace) -> None:
    if options.knn:
        evaluate_neighbors(options)
        return
    started = time.perf_counter()
    checkpoint = local_run(options.checkpoint)
    best = checkpoint / "checkpoints" / "best"
    weights = find_file(best if best.is_dir() and any(best.iterdir()) else checkpoint)
    run = run_of(weights)
    config = read_config(options, run, f"data.shards={options.shards}")
    with Distributed(config.device) as dist:
        dataset = ShardDataset.open(config.data)
        state_dict, shape, classes, multi_label, _ = pretrained.load(
            weights, config.model.num_frames
        )
        if options.config is not None:
            shape = replace(
                shape, num_frames=config.model.num_frames, image_size=config.model.image_size
            )
        model = load_classifier(state_dict, shape).to(dist.device)
        if not classes:  # weights of others name none: then their number must do
            num_classes = model.get_parameter("head.weight").shape[0]
            classes = (
                dataset.info.classes
                if num_classes == len(dataset.info.classes)
                else [""] * num_classes
            )
            multi_label = dataset.info.multi_label
        check_classes(classes, multi_label, dataset)
        if dist.is_main and run is not None:
            warn_of_overlap(run, weights.parent.name == "best", config, dataset)
        trained = open_used(run, "data", config) if run and not multi_label else None
        evaluation = replace(config.evaluation, shards=options.shards)
        config = replace(config, model=shape, evaluation=evaluation, batch_size=options.batch_size)
        baselines = HeldOut(config, trained).evaluate(None, dist) if trained else {}
        found = Evaluator(config, dataset, dist).predict(
            model, multi_label, options.clips, options.crops
        )
        if dist.is_main:
            results = baselines | make_results(found, dataset, options)
            write_results(
                options.output or (run or weights.parent) / "evaluation", results, found, dataset
            )
            say(results, f", in {format_duration(time.perf_counter() - started)}")


def read_config(options: argparse.Namespace, run: Path | None, *places: str) -> TrainConfig:
    """Read the configuration of the run, or that of --config, for all videos at `places`."""
    file = options.config or (run and run / "config.yaml")
    given = ["--config", str(file)] if file else []
    return parse([*given, *places, "data.weights=null", "data.subset=null", *options.overrides])


def say(results: dict[str, Any], end: str = "") -> None:
    log(describe_scores(results) + end)
    for sentence in interpret_scores(results):
        log(sentence, sys.stderr)


def evaluate_neighbors(options: argparse.Namespace) -> None:
    """Say the accuracy of k-NN, beside what needs no model; write it to --output, if that is given."""
    results = compare_clips(options) if options.shards else compare_features(options)
    if results:
        say(results)
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            about = {"checkpoint": options.checkpoint, "knn": options.knn}
            write_json(options.output / "results.json", results | about)


def compare_clips(options: argparse.Namespace) -> dict[str, Any]:
    """Classify videos by the neighbors of the features that weights make of a clip each; {} but in the main rank."""
    weights = local_run(options.checkpoint)
    encoder, run = load_encoder(weights), run_of(find_file(weights))
    config = read_config(
        options, run, f"data.shards={options.knn}", f"evaluation.shards={options.shards}"
    )
    config = replace(config, task="pretrain", model=encoder.config, batch_size=options.batch_size)
    with Distributed(config.device) as dist:
        reference, dataset = (
            ShardDataset.open(config.data),
            ShardDataset.open(options.shards, config.data),
        )
        check_classes(reference.info.classes, False, dataset)
        scores = HeldOut(config, reference, max_videos=sys.maxsize).evaluate(
            encoder.to(dist.device), dist
        )
        if "knn_top1" not in scores:
            raise InputError(
                f"{options.shards} and {options.knn} have fewer than two classes, or the same files"
            )
        return (
            {name: score for name, score in scores.items() if name != "rankme"}
            if dist.is_main
            else {}
        )


def compare_features(options: argparse.Namespace) -> dict[str, Any]:
    """Classify videos by their neighbors' features over the windows that extract_features.py has encoded.

    Windows of one source file are no neighbors of each other: they would show the same scene.
    """
    videos, features = read_features(Path(options.checkpoint))
    neighbors, neighbor_features = read_features(Path(options.knn))

    class_names = sorted({video["label"] for video in [*videos, *neighbors]})
    class_ids = {name: class_id for class_id, name in enumerate(class_names)}
    labels = torch.tensor([class_ids[video["label"]] for video in videos])
    neighbor_labels = torch.tensor([class_ids[video["label"]] for video in neighbors])

    neighbor_sources = [video["source"] for video in neighbors]
    is_other_source = torch.empty(len(videos), len(neighbors), dtype=torch.bool)
    for index, video in enumerate(videos):
        is_other_source[index] = torch.tensor(
            [source != video["source"] for source in neighbor_sources]
        )

    return {
        "knn_top1": knn_top1(features, labels, neighbor_features, neighbor_labels, is_other_source),
        "majority_top1": majority_top1(labels),
        "num_videos": len(videos),
        "knn_videos": int(is_other_source.any(dim=1).sum()),
    }


def open_used(run: Path, section: str, config: TrainConfig) -> ShardDataset | None:
    """Open the shards of a section of a run's configuration, if they are there."""
    shards = run_config(run).get(section, {}).get("shards") or []
    places = [shards] if isinstance(shards, str) else shards
    is_there = places and all(is_remote(place) or Path(place).is_dir() for place in places)
    return ShardDataset.open(places, config.data) if is_there else None


def warn_of_overlap(run: Path, is_best: bool, config: TrainConfig, dataset: ShardDataset) -> None:
    """Warn if videos of `dataset` were trained on, or the best weights selected on them, as far as those are there."""
    used = {
        "data": "the run was trained on",
        "evaluation": "the run's best weights were selected on",
    }
    for section in used if is_best else ("data",):
        if (earlier := open_used(run, section, config)) and (
            shared := count_shared_videos(dataset, earlier)
        ):
            what = f"{used[section]} {shared} of these {len(dataset.samples)} videos"
            log(f"WARNING: {what}: accuracy is optimistically biased", sys.stderr)


def make_results(
    found: Predictions, dataset: ShardDataset, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the content of results.json."""
    names = dataset.info.classes
    results: dict[str, Any] = {
        name: getattr(options, name) for name in ("checkpoint", "shards", "clips", "crops")
    }
    results |= found.scores()
    if found.is_multi_label:
        counts, scores, score = found.labels.sum(dim=0).tolist(), found.average_precisions(), "AP"
    else:
        pairs = found.labels * len(names) + found.probabilities.argmax(dim=1)
        confusion = torch.bincount(pairs, minlength=len(names) ** 2).view(
            len(names), -1
        )  # rows: true classes
        counts, right, score = confusion.sum(dim=1).tolist(), confusion.diagonal().tolist(), "top1"
        scores = [
            correct / count if count else None for correct, count in zip(right, counts, strict=True)
        ]
        results["confusion"] = confusion.tolist()
    rows = zip(names, counts, scores, strict=True)
    return results | {
        "per_class": {name: {"videos": count, score: value} for name, count, value in rows}
    }


def list_predictions(
    found: Predictions, dataset: ShardDataset
) -> list[tuple[str, str, str, str, float]]:
    """List key, source, label or labels, most probable class and its probability of every video, the most confident
    mistakes first."""
    names = dataset.info.classes
    labels = [";".join(names[label] for label in sample.labels or ()) for sample in dataset.samples]
    rows = zip(dataset.samples, labels, *found.probabilities.max(dim=1), strict=True)
    listed = [
        (sample.key, sample.source, label, names[int(best)], round(float(p), 6))
        for sample, label, p, best in rows
    ]
    return sorted(listed, key=lambda row: (row[2] == row[3], -row[4]))


def write_results(
    folder: Path, results: dict[str, Any], found: Predictions, dataset: ShardDataset
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("key", "source", "label", "predicted", "probability"))
    writer.writerows(list_predictions(found, dataset))
    write_text(folder / "predictions.csv", table.getvalue())
    if "confusion" in results:
        with atomic_write(folder / "confusion.png") as partial:
            plot_confusion(results, dataset.info.classes).savefig(
                partial, format="png", dpi=110, bbox_inches="tight"
            )
    write_json(folder / "results.json", results)
    log(f"wrote {folder}", sys.stderr)


if __name__ == "__main__":
    run_command(lambda: evaluate(OPTIONS))
