"""Evaluate a classifier: `python evaluate.py CHECKPOINT SHARDS [section.key=value ...]`, or under torchrun.

Averages probabilities over --clips × --crops views of every video in SHARDS. Each video counts once, at any number of
ranks; one that does not decode ends the evaluation with its name. CHECKPOINT is a run directory (its best weights, or
its newest), a checkpoint, or a file of weights, also of the authors or of Hugging Face. How clips are sampled is taken
from the run's config.yaml, or from --config. Writes results.json, predictions.csv (a line per video), confusion.png,
and mistakes.png to --output; of a multi-label classifier, no plots. With --keep, also the scores where only a fraction
of the tokens is encoded, chosen at random, by motion or by the sampler of a pre-training, and kept.png.
"""

import argparse
import sys
from pathlib import Path

from common.arguments import ArgumentParser
from common.errors import InputError, parse_early, require_positive, run_command

OVERRIDES = (
    *("data.frame_stride", "data.fps", "data.sampling", "data.decoder", "data.num_workers", "data.prefetch"),
    *("data.prefetch_mib", "data.cache_dir", "data.cache_gib", "data.decode_timeout_s", "device", "precision"),
)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("checkpoint", help="run directory (or its URL), checkpoint directory, or file of weights")
    parser.add_argument("shards", help="labeled dataset folder")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="such as data.frame_stride=2"
    )
    parser.add_argument("--config", type=Path, help="how clips are sampled, if CHECKPOINT is not in a run directory")
    parser.add_argument("--clips", type=int, default=1, help="clips per video: 5 for Kinetics, 2 for SSv2 in the paper")
    parser.add_argument("--crops", type=int, default=1, help="crops along the longer side: 3 in the paper")
    parser.add_argument("--batch-size", type=int, default=8, help="views per rank and forward pass")
    parser.add_argument(
        "--keep", type=float, nargs="+", default=[], help="fractions of the tokens: 0.05 0.1 0.25 0.5 1"
    )
    parser.add_argument("--sampler", type=Path, metavar="RUN", help="pre-training whose token sampler --keep tries too")
    parser.add_argument("--output", type=Path, help="folder of the results (default: evaluation/ in the run directory)")
    options = parser.parse_args(arguments)
    require_positive(options, "clips", "crops", "batch_size")
    for key in (override.partition("=")[0] for override in options.overrides):
        if key not in OVERRIDES:
            raise InputError(f"{key} changes nothing in an evaluation: it takes {', '.join(OVERRIDES)}")
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import csv
import io
import time
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8

from common.atomic_io import write_json, write_text
from common.devices import explain_out_of_memory
from common.logging import format_duration, log
from figures.classification import plot_confusion, plot_kept, plot_mistakes, save_figure
from model.classifier import load_classifier
from model.encoder import SELECTIONS
from model.weights import pretrained
from model.weights.models import load_encoder
from pipeline.decoding.sources import decode_frames
from pipeline.reading.reader import Reader
from pipeline.reading.storage import is_remote
from pipeline.shards import arrays
from pipeline.shards.dataset import ShardDataset
from training.config import TrainConfig, parse
from training.distributed import Distributed
from training.evaluation import Evaluator, Predictions, Views, check_classes
from training.remote_run import local_run
from training.startup_warnings import count_shared_videos
from training.summary import describe_scores, interpret_scores

NUM_MISTAKES = 16
NUM_FRAMES = 6  # of each mistake


@explain_out_of_memory("lower --batch-size")
def evaluate(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    checkpoint = local_run(options.checkpoint)
    best = checkpoint / "checkpoints" / "best"
    weights = pretrained.find_file(best if best.is_dir() and any(best.iterdir()) else checkpoint)
    run = pretrained.run_of(weights)
    file = options.config or (run and run / "config.yaml")
    data = [f"data.shards={options.shards}", "data.weights=null", "data.subset=null"]
    config = parse([*(["--config", str(file)] if file else []), *data, *options.overrides])
    with Distributed(config.device) as dist:
        dataset = ShardDataset.open(config.data)
        state_dict, shape, classes, multi_label, _ = pretrained.load(weights, config.model.num_frames)
        if options.config is not None:
            shape = replace(shape, num_frames=config.model.num_frames, image_size=config.model.image_size)
        model = load_classifier(state_dict, shape).to(dist.device)
        if not classes:  # weights of others name none: then their number must do
            num_classes = model.get_parameter("head.weight").shape[0]
            classes = dataset.info.classes if num_classes == len(dataset.info.classes) else [""] * num_classes
            multi_label = dataset.info.multi_label
        check_classes(classes, multi_label, dataset)
        if dist.is_main and run is not None:
            warn_of_overlap(run, weights.parent.name == "best", config, dataset)
        views = Views(options.clips, options.crops, options.batch_size)
        evaluator = Evaluator(dataset, config.data, shape, dist, config.precision)
        found = evaluator.predict(model, views, multi_label)
        kept = []
        if options.keep:
            clips = {"num_frames": shape.num_frames, "image_size": shape.image_size}
            encoder = load_encoder(options.sampler or weights, **clips).to(dist.device)
            ways = [by for by in SELECTIONS if by != "adaptive" or options.sampler]
            for by, keep in product(ways, sorted(set(options.keep))):
                select = partial(encoder.select_tokens, keep=keep, by=by)
                kept.append({"by": by, "keep": keep, **evaluator.predict(model, views, multi_label, select).scores()})
        if dist.is_main:
            results = make_results(found, dataset, options) | {"kept": kept}
            write_results(options.output or (run or weights.parent) / "evaluation", results, found, dataset)
            log(f"{describe_scores(results)}, in {format_duration(time.perf_counter() - started)}")
            for sentence in interpret_scores(results):
                log(sentence, sys.stderr)


def warn_of_overlap(run: Path, is_best: bool, config: TrainConfig, dataset: ShardDataset) -> None:
    """Warn if videos of `dataset` were trained on, or the best weights selected on them, as far as those are there."""
    given = pretrained.run_config(run)
    used = {
        "the run was trained on": "data",
        "the run's best weights were selected on": "evaluation" if is_best else "",
    }
    for what, section in used.items():
        shards = given.get(section, {}).get("shards") or []
        places = [shards] if isinstance(shards, str) else shards
        if places and all(is_remote(place) or Path(place).is_dir() for place in places):
            shared, total = count_shared_videos(dataset, ShardDataset.open(places, config.data)), len(dataset.samples)
            if shared:
                log(f"WARNING: {what} {shared} of these {total} videos: accuracy is optimistically biased", sys.stderr)


def make_results(found: Predictions, dataset: ShardDataset, options: argparse.Namespace) -> dict[str, Any]:
    """Return the content of results.json."""
    names = dataset.info.classes
    results: dict[str, Any] = {name: getattr(options, name) for name in ("checkpoint", "shards", "clips", "crops")}
    results |= found.scores()
    if found.is_multi_label:
        counts, scores, score = found.labels.sum(dim=0).tolist(), found.average_precisions(), "AP"
    else:
        pairs = found.labels * len(names) + found.probabilities.argmax(dim=1)
        confusion = torch.bincount(pairs, minlength=len(names) ** 2).view(len(names), -1)  # rows: true classes
        counts, right, score = confusion.sum(dim=1).tolist(), confusion.diagonal().tolist(), "top1"
        scores = [correct / count if count else None for correct, count in zip(right, counts, strict=True)]
        results["confusion"] = confusion.tolist()
    rows = zip(names, counts, scores, strict=True)
    return results | {"per_class": {name: {"videos": count, score: value} for name, count, value in rows}}


def list_predictions(found: Predictions, dataset: ShardDataset) -> list[dict[str, Any]]:
    """List the label of every video, or its labels, and the most probable class."""
    names, rows = dataset.info.classes, zip(dataset.samples, *found.probabilities.max(dim=1), strict=True)
    return [
        {
            "key": sample.key,
            "source": sample.source,
            "label": ";".join(names[label] for label in sample.labels or ()),
            "predicted": names[int(predicted)],
            "probability": round(float(probability), 6),
        }
        for sample, probability, predicted in rows
    ]


def write_results(folder: Path, results: dict[str, Any], found: Predictions, dataset: ShardDataset) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    predictions = list_predictions(found, dataset)
    if results["kept"]:
        save_figure(plot_kept(results["kept"]), folder / "kept.png")
    if "confusion" in results:
        save_figure(plot_confusion(results, dataset.info.classes), folder / "confusion.png")
        if worst := find_worst_mistakes(predictions):
            strips = [read_strip(dataset, sample) for sample in worst]
            save_figure(plot_mistakes([predictions[sample] for sample in worst], strips), folder / "mistakes.png")
    table = io.StringIO()
    writer = csv.DictWriter(table, list(predictions[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(predictions)
    write_text(folder / "predictions.csv", table.getvalue())
    write_json(folder / "results.json", results)
    log(f"wrote {folder}", sys.stderr)


def find_worst_mistakes(predictions: list[dict[str, Any]]) -> list[int]:
    """Find the misclassified videos, the most confident first."""
    wrong = [i for i, row in enumerate(predictions) if row["label"] != row["predicted"]]
    return sorted(wrong, key=lambda i: -predictions[i]["probability"])[:NUM_MISTAKES]


def read_strip(dataset: ShardDataset, sample: int) -> UInt8[np.ndarray, "H W 3"]:
    """Decode frames from all over a video, side by side."""
    numbers = np.linspace(0, dataset.samples[sample].num_frames - 1, NUM_FRAMES).round().astype(int).tolist()
    return np.concatenate(arrays.to_rgb(decode_frames(Reader(dataset).read(sample), numbers)), axis=1)


if __name__ == "__main__":
    run_command(lambda: evaluate(OPTIONS))
