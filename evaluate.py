"""Evaluate a classifier.

    python evaluate.py CHECKPOINT SHARDS [section.key=value ...]
    torchrun --nproc-per-node 8 evaluate.py CHECKPOINT SHARDS

Averages probabilities over --clips × --crops views of every video in SHARDS. Each video counts
once, at any number of ranks; a video that does not decode ends the evaluation with an error that
names it. CHECKPOINT is a run directory (its best weights, or its newest), a checkpoint, or a file
of weights, also of the authors or of Hugging Face. How clips are sampled is taken from the run's
config.yaml, or from --config. Writes predictions.csv (a line per video, the most confident mistakes
first), confusion.png and results.json, with the scores of each class and each group, to --output.

    python evaluate.py hf://user/name SHARDS --knn TRAINING_SHARDS

With --knn, no classifier is needed: every video gets the class of its nearest neighbors by the
features of a clip of any encoder. compare.py measures features of whole videos.
"""

import argparse
import sys
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.locations import is_remote, local_path

OVERRIDES = (
    "data.frame_stride",
    "data.fps",
    "data.sampling",
    "data.decoder",
    "data.num_workers",
    "data.prefetch",
    "data.prefetch_mib",
    "data.cache_dir",
    "data.cache_gib",
    "data.decode_timeout_s",
    "device",
    "precision",
)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("checkpoint", help="run directory (or its URL), checkpoint directory, or file of weights")
    add("shards", help="labeled dataset folder")
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="such as data.frame_stride=2",
    )
    add(
        "--config",
        type=local_path,
        help="how clips are sampled, if CHECKPOINT is not in a run directory",
    )
    add("--knn", metavar="SHARDS", help="labeled videos, which are the neighbors")
    add(
        "--neighbors",
        type=between(1),
        metavar="K",
        help="of --knn; default: 20, or the size of the smallest class",
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
        type=local_path,
        help="folder of the results (default: evaluation/ in the run directory)",
    )
    # Intermixed: overrides may also follow options.
    options = parser.parse_intermixed_args(arguments)
    if options.knn and (options.clips, options.crops) != (1, 1):
        raise InputError("--knn compares the features of one clip: leave out --clips and --crops")
    if options.neighbors and not options.knn:
        raise InputError("--neighbors is of k-NN: name the training videos with --knn SHARDS")
    for override in options.overrides:
        key = override.partition("=")[0]
        if key not in OVERRIDES:
            choices = ", ".join(OVERRIDES)
            raise InputError(f"{key} changes nothing in an evaluation: it takes {choices}")
    return options


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import time
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Int

from adamae.common.atomic_io import atomic_write, make_output_folder, write_json
from adamae.common.commands import command_line, log_next
from adamae.common.csv_files import write_csv
from adamae.common.devices import explain_out_of_memory
from adamae.common.logging import format_count, format_duration, log
from adamae.figures.confusion import plot_confusion
from adamae.model.classifier import ProbeHead, VideoClassifier, load_classifier
from adamae.model.encoders.open_encoder import open_encoder
from adamae.model.encoders.own import OwnEncoder
from adamae.model.encoders.probe import load_head, load_probe
from adamae.model.weights import pretrained
from adamae.model.weights.find_weights import find_file, run_of
from adamae.model.weights.pretrained import Weights
from adamae.model.weights.read_config import run_config
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import TrainConfig, parse
from adamae.training.distributed import Distributed
from adamae.training.evaluation import Evaluator, Predictions, check_classes
from adamae.training.held_out import HeldOut
from adamae.training.remote_run import local_run
from adamae.training.startup_warnings import count_shared_videos
from adamae.training.summary import describe_scores, interpret_scores


@explain_out_of_memory("lower --batch-size")
def evaluate(options: argparse.Namespace) -> None:
    if options.knn:
        evaluate_neighbors(options)
    else:
        evaluate_classifier(options)


def evaluate_classifier(options: argparse.Namespace) -> None:
    """Log the scores of a classifier and write its results and predictions to --output."""
    started = time.perf_counter()
    file = find_best_weights(options.checkpoint)
    run = run_of(file)
    config = read_config(options, run, f"data.shards={options.shards}")
    with Distributed(config.device) as dist:
        dataset = ShardDataset.open(config.data)
        # Weights of other projects do not say how many frames a clip has.
        head = load_head(file)
        weights = head or pretrained.load(file, config.model.num_frames)
        shape = weights.config
        if options.config is not None:
            num_frames = config.model.num_frames
            shape = replace(shape, num_frames=num_frames, image_size=config.model.image_size)
        model: VideoClassifier | ProbeHead
        if head is None:
            model = load_classifier(weights.state, shape)
        else:
            model = load_probe(file, head, shape, config.precision)
        model.to(dist.device)
        multi_label = match_classes(weights, model, dataset)
        trained_on = None
        if run is not None:
            if dist.is_main:
                warn_of_overlap(run, file.parent.name == "best", config, dataset)
            # The baselines know one class per video.
            if not multi_label:
                trained_on = open_section(run, "data", config)
        evaluation = replace(config.evaluation, shards=options.shards)
        config = replace(config, model=shape, evaluation=evaluation, batch_size=options.batch_size)
        baselines = {}
        if trained_on is not None:
            baselines = HeldOut(config, trained_on).evaluate(None, dist)
        evaluator = Evaluator(config, dataset, dist)
        predictions = evaluator.predict(model, multi_label, options.clips, options.crops)
        if dist.is_main:
            results = make_results(predictions, dataset, options)
            results |= score_groups(predictions, dataset, config.evaluation.group)
            # k-NN's baselines have up to 1,024 videos, and the classifier all of them.
            results |= baselines | {"num_videos": results["num_videos"]}
            folder = options.output or (run or file.parent) / "evaluation"
            write_results(folder, results, predictions, dataset)
            log_scores(results, f", in {format_duration(time.perf_counter() - started)}")
            if "per_group" in results:
                log(describe_groups(results["per_group"]))
            # Of a probe whose encoder is in files of its own, there is nothing to export.
            if run is not None and head is None:
                log_next(command_line("export", "export", run, run / "export"))


def find_best_weights(checkpoint: str) -> Path:
    """Return the best weights of a run that has selected some, else the newest or the named."""
    path = local_run(checkpoint)
    best = path / "checkpoints" / "best"
    # Empty if the run was ended while its first best weights were written.
    if best.is_dir() and any(best.iterdir()):
        return find_file(best)
    return find_file(path)


def match_classes(weights: Weights, model: torch.nn.Module, dataset: ShardDataset) -> bool:
    """Return whether videos may have several classes; raise InputError if the dataset has others.

    Weights of other projects do not name their classes: of those, only the number has to match.
    """
    if weights.classes:
        check_classes(weights.classes, weights.multi_label, dataset)
        return weights.multi_label
    num_classes = model.get_parameter("head.weight").shape[0]
    classes = dataset.info.classes
    if len(classes) != num_classes:
        classes = [""] * num_classes
    check_classes(classes, dataset.info.multi_label, dataset)
    return dataset.info.multi_label


def read_config(options: argparse.Namespace, run: Path | None, *overrides: str) -> TrainConfig:
    """Read the configuration of --config, or else of the run, with all videos of its datasets."""
    arguments = []
    if options.config is not None:
        arguments = ["--config", str(options.config)]
    elif run is not None:
        arguments = ["--config", str(run / "config.yaml")]
    # A run may train on weighted or fewer videos, but all of them are evaluated.
    arguments += [*overrides, "data.weights=null", "data.subset=null"]
    return parse([*arguments, *options.overrides])


def log_scores(results: dict[str, Any], end: str = "") -> None:
    log(describe_scores(results) + end)
    for sentence in interpret_scores(results):
        log(sentence, sys.stderr)


def evaluate_neighbors(options: argparse.Namespace) -> None:
    """Log the accuracy of k-NN and of baselines without a model; write them to --output, if set."""
    path = local_run(options.checkpoint)
    encoder = open_encoder(path)
    run = None
    if isinstance(encoder, OwnEncoder):
        run = run_of(find_file(path))
    sampling = []
    if run is None:
        sampling = [f"data.{name}={value}" for name, value in (encoder.frame_rate or {}).items()]
    config = read_config(
        options, run, f"data.shards={options.knn}", f"evaluation.shards={options.shards}", *sampling
    )
    config = replace(config, task="pretrain", batch_size=options.batch_size)
    with Distributed(config.device) as dist:
        reference = ShardDataset.open(config.data)
        dataset = ShardDataset.open(options.shards, config.data)
        check_classes(reference.info.classes, False, dataset)
        # A run evaluates a sample of the videos, this command all of them.
        held_out = HeldOut(config, reference, sys.maxsize, options.neighbors)
        results: dict[str, Any] = held_out.evaluate(encoder.to(dist.device), dist)
        if "knn_top1" not in results:
            raise InputError(
                f"{options.shards} and {options.knn} have fewer than two classes, or the same files"
            )
        # The effective rank is about pre-training, not about classes.
        results.pop("rankme")
        if not dist.is_main:
            return
        log_scores(results)
        if options.output:
            make_output_folder(options.output)
            results |= {"checkpoint": options.checkpoint, "knn": options.knn}
            write_json(options.output / "results.json", results)


def open_section(run: Path, section: str, config: TrainConfig) -> ShardDataset | None:
    """Open the shards that a section of a run's configuration names; None if they are not there."""
    shards = run_config(run).get(section, {}).get("shards") or []
    locations = [shards] if isinstance(shards, str) else shards
    for location in locations:
        if not is_remote(location) and not Path(location).is_dir():
            return None
    return ShardDataset.open(locations, config.data) if locations else None


def warn_of_overlap(run: Path, is_best: bool, config: TrainConfig, dataset: ShardDataset) -> None:
    """Warn if the run was trained on videos of `dataset`, or its best weights selected on them.

    Only shards that are still there can be compared.
    """
    uses = {"data": "the run was trained on"}
    if is_best:
        uses["evaluation"] = "the run's best weights were selected on"
    for section, use in uses.items():
        earlier = open_section(run, section, config)
        num_shared = 0 if earlier is None else count_shared_videos(dataset, earlier)
        if num_shared > 0:
            overlap = f"{use} {num_shared} of these {len(dataset.samples)} videos"
            log(f"WARNING: {overlap}: accuracy is optimistically biased", sys.stderr)


def make_results(
    predictions: Predictions, dataset: ShardDataset, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the content of results.json: the options, the scores, and the scores of each class."""
    results: dict[str, Any] = {
        "checkpoint": options.checkpoint,
        "shards": options.shards,
        "clips": options.clips,
        "crops": options.crops,
    }
    results |= predictions.scores()
    names = dataset.info.classes
    if predictions.is_multi_label:
        score_name = "AP"
        counts = predictions.labels.sum(dim=0).tolist()
        scores = predictions.average_precisions()
    else:
        score_name = "top1"
        confusion = count_confusions(predictions, len(names))
        counts = confusion.sum(dim=1).tolist()
        scores = []
        for num_correct, count in zip(confusion.diagonal().tolist(), counts, strict=True):
            scores.append(num_correct / count if count else None)
        results["confusion"] = confusion.tolist()
    results["per_class"] = {}
    for name, count, score in zip(names, counts, scores, strict=True):
        results["per_class"][name] = {"videos": count, score_name: score}
    return results


def score_groups(
    predictions: Predictions, dataset: ShardDataset, field: str
) -> dict[str, dict[str, Any]]:
    """Return the number of videos and the accuracy of each group of videos, as `per_group`.

    Return {} if a video may have several classes, or none has the field that names its group.
    """
    if predictions.is_multi_label:
        return {}
    hits: dict[str, list[bool]] = {}
    is_right = predictions.probabilities.argmax(dim=1) == predictions.labels
    for sample, is_hit in zip(dataset.samples, is_right.tolist(), strict=True):
        if sample.fields.get(field) is not None:
            hits.setdefault(str(sample.fields[field]), []).append(is_hit)
    per_group = {}
    for name, of_group in sorted(hits.items()):
        per_group[name] = {"videos": len(of_group), "top1": fmean(of_group)}
    return {"per_group": per_group} if per_group else {}


def describe_groups(per_group: dict[str, dict[str, Any]]) -> str:
    """Return the range of accuracies over groups: `3 groups: top-1 0.250 (a) to 1.000 (b)`."""
    order = sorted(per_group, key=lambda name: per_group[name]["top1"])
    ends = [f"{per_group[name]['top1']:.3f} ({name})" for name in (order[0], order[-1])]
    return f"{format_count(len(per_group), 'group')}: top-1 {ends[0]} to {ends[1]}"


def count_confusions(
    predictions: Predictions, num_classes: int
) -> Int[torch.Tensor, "classes classes"]:
    """Count the videos of each true class (row) by their predicted class (column)."""
    # With 3 classes, videos of class 1 that are predicted as class 2 are those of cell 1 * 3 + 2.
    cells = predictions.labels * num_classes + predictions.probabilities.argmax(dim=1)
    return torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)


def list_predictions(
    predictions: Predictions, dataset: ShardDataset
) -> list[tuple[str, str, str, str, float]]:
    """Return key, source, label or labels, predicted class and its probability of every video.

    The most confident mistakes come first.
    """
    names = dataset.info.classes
    best_probabilities, best_classes = predictions.probabilities.max(dim=1)
    rows = []
    for sample, probability, class_id in zip(
        dataset.samples, best_probabilities.tolist(), best_classes.tolist(), strict=True
    ):
        labels = ";".join(names[label] for label in sample.labels or ())
        predicted = names[class_id]
        rows.append((sample.key, sample.source, labels, predicted, round(probability, 6)))

    def rank(row: tuple[str, str, str, str, float]) -> tuple[bool, float]:
        _, _, labels, predicted, probability = row
        return labels == predicted, -probability

    return sorted(rows, key=rank)


def write_results(
    folder: Path, results: dict[str, Any], predictions: Predictions, dataset: ShardDataset
) -> None:
    make_output_folder(folder)
    header = ("key", "source", "label", "predicted", "probability")
    write_csv(folder / "predictions.csv", header, list_predictions(predictions, dataset))
    if "confusion" in results:
        figure = plot_confusion(results, dataset.info.classes)
        with atomic_write(folder / "confusion.png") as partial:
            figure.savefig(partial, format="png", dpi=110, bbox_inches="tight")
    write_json(folder / "results.json", results)
    log(f"wrote {folder}", sys.stderr)


if __name__ == "__main__":
    run_command(lambda: evaluate(OPTIONS))
