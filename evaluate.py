"""Judge a classifier: `python evaluate.py CHECKPOINT SHARDS [section.key=value ...]`, or under torchrun.

Every video of SHARDS is shown in --clips × --crops views whose probabilities are averaged; each counts once, at any
number of processes, and one that does not decode ends the evaluation with its name. CHECKPOINT is a run folder (its
best weights, or its newest), a checkpoint, or a file of weights: ours, the authors' or Hugging Face's. How clips are
cut is taken from the run's config.yaml, or from --config. Writes results.json, confusion.png, calibration.png and
mistakes.png to --output.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import common.openmp  # noqa: F401

import numpy as np
from jaxtyping import UInt8
from matplotlib.figure import Figure
from torch import nn

from common.atomic_io import atomic_write, write_json
from common.devices import explain_out_of_memory
from common.errors import InputError, run_command
from common.logging import escape, log
from model.config import ModelConfig
from model.probe import classifier_of
from model.weights import pretrained
from pipeline.reading.reader import Reader
from pipeline.reading.storage import is_remote
from pipeline.shards import arrays
from pipeline.shards.dataset import ShardDataset
from training import distributed
from training.config import TrainConfig, parse
from training.evaluation import (
    Predictions,
    Views,
    calibration,
    calibration_error,
    check_classes,
    confusion,
    predict,
    scores,
)
from training.remote_run import local_run
from training.startup_warnings import count_shared_videos
from training.tasks.classification import BEST

NUM_MISTAKES = 16
FRAMES_SHOWN = 6
MOST_TICKS = 40  # class names beside the confusion matrix
MOST_COUNTS = 25  # classes whose numbers of videos can be read in it
OVERRIDES = (
    *("data.frame_stride", "data.sampling", "data.decoder", "data.num_threads", "data.prefetch", "data.prefetch_mib"),
    *("data.cache_dir", "data.cache_gib", "data.decode_timeout_s", "device", "precision"),
)


@explain_out_of_memory("lower --batch-size")
def evaluate(arguments: argparse.Namespace) -> None:
    weights = _weights(arguments.checkpoint)
    config = _config(weights, arguments)
    process = distributed.join(config.device)
    dataset = ShardDataset.open(config.data)
    model, shape, classes = _model(weights, config, arguments.config is not None)
    check_classes(classes or _same_number(model, dataset), dataset)
    if process.is_main and (caution := _caution(weights, config, dataset)):
        log(caution, sys.stderr)
    views = Views(arguments.clips, arguments.crops, arguments.batch_size)
    started = time.perf_counter()
    found = predict(model.to(process.device), dataset, config.data, shape, views, process, config.precision)
    if process.is_main:
        results = describe(found, dataset, arguments)
        _write(arguments.output or _folder_for(weights), results, found, dataset)
        seconds = time.perf_counter() - started
        top5 = f", top-5 {results['top5']:.4f}" if len(dataset.info.classes) > 5 else ""
        log(f"top-1 {results['top1']:.4f}{top5} on {results['num_videos']} videos in {seconds:.0f} s")
    distributed.leave()


def _weights(checkpoint: Path) -> Path:
    best = checkpoint / "checkpoints" / BEST
    return pretrained.find_file(best if best.is_dir() and any(best.iterdir()) else checkpoint)


def _caution(weights: Path, config: TrainConfig, dataset: ShardDataset) -> str:
    """A warning where the best weights of a run were chosen on what they are judged by."""
    chosen_on = config.evaluation.shards
    if weights.parent.name != BEST or not chosen_on or not (is_remote(chosen_on) or Path(chosen_on).exists()):
        return ""
    both = count_shared_videos(dataset, ShardDataset.open(chosen_on, config.data))
    judged = f"warning: on {both} of these {len(dataset.samples)} videos, the run chose its best weights"
    return f"{judged} (evaluation.shards): the accuracy is on the kind side" if both else ""


def _config(weights: Path, arguments: argparse.Namespace) -> TrainConfig:
    """As the run had it, or as --config says, with the overrides of the command line."""
    for key in (override.partition("=")[0] for override in arguments.overrides):
        if key not in OVERRIDES:
            raise InputError(f"{key} changes nothing in an evaluation: it takes {', '.join(OVERRIDES)}")
    run = pretrained.run_of(weights)
    file = arguments.config or (run and run / "config.yaml")
    data = [f"data.shards={arguments.shards}", "data.weights=null", "data.subset=null"]
    return parse([*(["--config", str(file)] if file else []), *data, *arguments.overrides])


def _model(weights: Path, config: TrainConfig, config_counts: bool) -> tuple[nn.Module, ModelConfig, list[str]]:
    """The classifier, the clips it takes and the names of its classes ([] where the file does not say them)."""
    state_dict, shape, classes = pretrained.load(weights, config.model.num_frames)
    if config_counts:
        shape = replace(shape, num_frames=config.model.num_frames, image_size=config.model.image_size)
    return classifier_of(state_dict, shape), shape, classes


def _same_number(model: nn.Module, dataset: ShardDataset) -> list[str]:
    """The dataset's class names, for a model that has none; raises InputError if it has another number of classes."""
    known = model.get_parameter("head.weight").shape[0]
    return dataset.info.classes if known == len(dataset.info.classes) else [""] * known


def describe(found: Predictions, dataset: ShardDataset, arguments: argparse.Namespace) -> dict[str, Any]:
    """What results.json says."""
    table = confusion(found)
    counts = table.sum(dim=1)
    return {
        "checkpoint": str(arguments.checkpoint),
        "shards": str(arguments.shards),
        "clips": arguments.clips,
        "crops": arguments.crops,
        "num_videos": len(found.labels),
        **scores(found),
        "calibration_error": calibration_error(found),
        "per_class": {
            name: {"videos": int(counts[i]), "top1": int(table[i, i]) / int(counts[i]) if counts[i] else None}
            for i, name in enumerate(dataset.info.classes)
        },
        "confusion": table.tolist(),
        "calibration": calibration(found),
        "mistakes": worst_mistakes(found, dataset),
    }


def worst_mistakes(found: Predictions, dataset: ShardDataset) -> list[dict[str, Any]]:
    """Videos that were taken for something else with the greatest confidence, the worst first."""
    confidence, guess = found.probabilities.max(dim=1)
    wrong = (guess != found.labels).nonzero().flatten().tolist()
    worst = sorted(wrong, key=lambda i: -float(confidence[i]))[:NUM_MISTAKES]
    names = dataset.info.classes
    return [
        {
            "sample": i,
            "key": dataset.samples[i].key,
            "source": dataset.samples[i].source,
            "class": names[int(found.labels[i])],
            "taken_for": names[int(guess[i])],
            "probability": float(confidence[i]),
            "probability_of_class": float(found.probabilities[i, found.labels[i]]),
        }
        for i in worst
    ]


def _folder_for(weights: Path) -> Path:
    """RUN/evaluation for a run's checkpoints, else a folder beside the file."""
    return (pretrained.run_of(weights) or weights.parent) / "evaluation"


def _write(folder: Path, results: dict[str, Any], found: Predictions, dataset: ShardDataset) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _save(_confusion_figure(results, dataset.info.classes), folder / "confusion.png")
    _save(_calibration_figure(results), folder / "calibration.png")
    if results["mistakes"]:
        _save(_mistakes_figure(results, dataset), folder / "mistakes.png")
    write_json(folder / "results.json", results)
    log(f"written to {folder}", sys.stderr)


def _plain(text: str) -> str:
    """The text for Matplotlib, which would take what stands between two dollars for a formula, or fail at it."""
    return escape(text).replace("$", r"\$")


def _save(figure: Figure, path: Path) -> None:
    with atomic_write(path) as aside:
        figure.savefig(aside, format="png", dpi=110, bbox_inches="tight")


def _confusion_figure(results: dict[str, Any], names: list[str]) -> Figure:
    table = np.array(results["confusion"], dtype=float)
    side = min(14.0, 3 + 0.35 * len(names))
    figure = Figure(figsize=(side, side))
    axes = figure.subplots()
    shares = table / np.maximum(1, table.sum(1, keepdims=True))
    picture = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    title = f"top-1 {results['top1']:.3f} of {table.sum():.0f} videos, share of each class"
    axes.set(xlabel="taken for", ylabel="class", title=title)
    if len(names) <= MOST_COUNTS:
        for (row, column), count in np.ndenumerate(table):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count:.0f}", ha="center", va="center", color=colour, fontsize=8)
    if len(names) <= MOST_TICKS:
        ticks = list(map(_plain, names))
        axes.set_xticks(range(len(names)), ticks, rotation=90)
        axes.set_yticks(range(len(names)), ticks)
    figure.colorbar(picture, ax=axes, fraction=0.046)
    return figure


def _calibration_figure(results: dict[str, Any]) -> Figure:
    rows = results["calibration"]
    figure = Figure(figsize=(4.5, 4.5))
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    sizes = [10 + 300 * row["videos"] / results["num_videos"] for row in rows]
    axes.scatter([row["confidence"] for row in rows], [row["accuracy"] for row in rows], s=sizes)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal")
    axes.set_title(f"expected calibration error {results['calibration_error']:.3f}")
    return figure


def _mistakes_figure(results: dict[str, Any], dataset: ShardDataset) -> Figure:
    mistakes = results["mistakes"]
    figure = Figure(figsize=(10, 1.8 * len(mistakes)), layout="constrained")
    for place, mistake in zip(figure.subplots(len(mistakes), squeeze=False).flat, mistakes, strict=True):
        place.axis("off")
        place.imshow(_strip(dataset, mistake["sample"]))
        place.set_title(
            _plain(
                f"{mistake['key']}: {mistake['class']} taken for {mistake['taken_for']} ({mistake['probability']:.2f})"
            ),
            fontsize=8,
        )
    return figure


def _strip(dataset: ShardDataset, sample: int) -> UInt8[np.ndarray, "H W 3"]:
    """Frames from all over a video, side by side."""
    from pipeline.decoding.video import decode_frames  # PyAV, which may be missing where DALI decodes all

    numbers = np.linspace(0, dataset.samples[sample].num_frames - 1, FRAMES_SHOWN).round().astype(int).tolist()
    frames = decode_frames(Reader(dataset).read(sample), numbers)
    return np.concatenate(arrays.to_rgb(frames), axis=1)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=local_run, help="run folder, checkpoint folder, or file of weights")
    parser.add_argument("shards", help="labelled dataset folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as data.frame_stride=2")
    parser.add_argument("--config", type=Path, help="how clips are cut, where CHECKPOINT is not in a run folder")
    parser.add_argument("--clips", type=int, default=1, help="clips of a video along time: 5 for Kinetics, 2 for SSv2")
    parser.add_argument("--crops", type=int, default=1, help="squares along the longer side: 3 in the paper")
    parser.add_argument("--batch-size", type=int, default=8, help="views per process and forward pass")
    parser.add_argument("--output", type=Path, help="folder of the results (default: evaluation/ in the run folder)")
    parsed = parser.parse_args(arguments)
    for name in ("clips", "crops", "batch_size"):
        if getattr(parsed, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1")
    return parsed


if __name__ == "__main__":
    run_command(lambda: evaluate(parse_arguments()))
