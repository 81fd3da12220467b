"""Describe the results of a run in words, for train.py, evaluate.py and the report."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from adamae.common.commands import command_line
from adamae.common.logging import format_count, format_duration
from adamae.model.config import ModelConfig
from adamae.training.config import TrainConfig

# Accuracies that need no model: their titles, and what a warning calls them.
BASELINES = {
    "majority_top1": ("most common class", "always predicting the most common class"),
    "pixel_top1": ("1-NN of pixels", "the class of the video with the nearest mean gray thumbnail"),
    "difference_top1": ("frame differences", "k-NN of the differences between frames"),
}
# Accuracies of a model: their titles, and the metrics that have their standard errors. Of a
# fine-tuned model, k-NN stands beside top-1, which comes first.
ACCURACIES = {
    "top1": ("top-1", "top1_error"),
    "top5": ("top-5", "top5_error"),
    "knn_top1": ("k-NN", "knn_error"),
}
# A loss relative to that of predicting each patch's mean (1) is near 1 from this on.
NOTHING_LEARNED = 0.98
# RankMe is 1 if the features of all videos are alike, or if there are two videos.
COLLAPSED = 2
MIN_VIDEOS_OF_RANK = 10
PREFIX = "evaluation/"
Metrics = Mapping[str, float]


def describe_scores(metrics: Metrics) -> str:
    """Return an evaluation as one line, with standard errors, such as `held-out loss 0.960,
    k-NN 0.651 ± 0.060 (± standard error; k = 20, one clip; most common class 0.508), 63 videos`."""
    parts = []
    if "reconstruction_loss" in metrics:
        parts.append(f"held-out loss {metrics['reconstruction_loss']:.3f}")
    accuracies = [describe_accuracy(metrics, name) for name in ACCURACIES if name in metrics]
    if accuracies:
        baselines = []
        for name, (title, _) in BASELINES.items():
            if name in metrics:
                baselines.append(f"{title} {metrics[name]:.3f}")
        # compare.py may give another accuracy of the same weights, as it has all windows.
        how = f"k = {metrics['knn_neighbors']:.0f}, one clip; " if "knn_top1" in metrics else ""
        parts.append(f"{', '.join(accuracies)} (± standard error; {how}{', '.join(baselines)})")
    if "mAP" in metrics:
        parts.append(f"mAP {metrics['mAP']:.3f} (chance {metrics['chance_mAP']:.3f})")
    if "rankme" in metrics:
        parts.append(f"RankMe {metrics['rankme']:.1f}")
    parts.append(format_count(int(metrics["num_videos"]), "video"))
    return ", ".join(parts)


def describe_accuracy(metrics: Metrics, name: str) -> str:
    """Return an accuracy with its standard error, such as `k-NN 0.651 ± 0.060`."""
    title, error_name = ACCURACIES[name]
    return f"{title} {metrics[name]:.3f} ± {metrics[error_name]:.3f}"


def interpret_scores(metrics: Metrics, model: ModelConfig | None = None) -> list[str]:
    """Return a warning for each score of a model that has learned hardly anything."""
    warnings = []
    name = next((name for name in ACCURACIES if name in metrics), None)
    if name is not None:
        baselines = [baseline for baseline in BASELINES if baseline in metrics]
        best = max(baselines, key=lambda baseline: metrics[baseline])
        error = metrics[ACCURACIES[name][1]]
        if metrics[name] - 2 * error <= metrics[best]:
            how = "below" if metrics[name] < metrics[best] else "not clearly above"
            warnings.append(
                f"WARNING: {describe_accuracy(metrics, name)} is {how} {BASELINES[best][1]}"
                f" ({metrics[best]:.3f}): train longer, or train and evaluate on more videos"
            )
    # Only a mean squared error of normalized patches is 1 for a model that predicts their mean.
    is_relative = model is not None and model.normalize_target and model.loss == "mse"
    if is_relative and metrics.get("reconstruction_loss", 0) > NOTHING_LEARNED:
        warnings.append(
            "WARNING: the held-out loss is that of predicting the mean of each patch (1), so"
            " hardly anything has been learned: train longer, or with a higher optimizer.base_lr"
        )
    has_videos = metrics.get("num_videos", 0) >= MIN_VIDEOS_OF_RANK
    if has_videos and metrics.get("rankme", math.inf) < COLLAPSED:
        warnings.append(
            f"WARNING: RankMe is {metrics['rankme']:.1f}: the features of all videos are nearly"
            " alike: lower optimizer.base_lr, or train on more videos"
        )
    return warnings


def find_result(rows: Iterable[Mapping[str, Any]]) -> tuple[str, dict[str, float]]:
    """Return the title and the metrics of the evaluation by which a run is described.

    It is the best one of a classifier, whose weights are kept, and the last one of other models.
    Without evaluations, the metrics are empty.
    """
    steps = []
    evaluations = []
    for row in rows:
        metrics = {
            name.removeprefix(PREFIX): value
            for name, value in row.items()
            if name.startswith(PREFIX)
        }
        if metrics:
            steps.append(row["step"])
            evaluations.append(metrics)
    for name in ("mAP", "top1"):
        scored = [index for index, metrics in enumerate(evaluations) if name in metrics]
        if scored:
            # The first of equal ones, as checkpoints/best is only replaced by a better one.
            best = max(scored, key=lambda index: evaluations[index][name])
            return f"best step {steps[best]:,}", evaluations[best]
    if not evaluations:
        return "", {}
    return f"step {steps[-1]:,}", evaluations[-1]


def describe_end(
    rows: list[dict[str, Any]],
    config: TrainConfig,
    first_step: int,
    total_steps: int,
    seconds: float,
) -> list[str]:
    """Return the lines that train.py ends with: the result, what it means, and the report.

    rows: those of metrics.jsonl. first_step: the step that the run has resumed from.
    """
    run = config.run.rstrip("/")
    ended = f"finished in {format_duration(seconds)}"
    if first_step >= total_steps:
        longer = (f"run={run}-longer", f"init_from={run}", "init_keep=optimizer")
        command = command_line("train", *longer, f"steps={2 * total_steps}")
        steps = format_count(total_steps, "step")
        ended = f"{run} was finished before, after {steps}; train longer: {command}"
    title, metrics = find_result(rows)
    if metrics:
        result = f"{title}: {describe_scores(metrics)}"
    elif config.evaluation.shards:
        result = "not evaluated while it trained (evaluation.every=null)"
    else:
        result = "not evaluated while it trained (no evaluation.shards)"
    report = f"report: {run}/report.html"
    return [f"{ended}; {result}", *interpret_scores(metrics, config.model), report]


def advise_on_run(config: TrainConfig) -> str:
    """Return the command that uses a run: features of its shards, or a classifier's accuracy."""
    run = config.run.rstrip("/")
    held_out = config.evaluation.shards
    if config.task != "pretrain":
        if held_out:
            return command_line("evaluate", run, held_out)
        return command_line("export", "export", run, f"{run}/export")
    shards = config.data.shards
    # The two halves of a folder that make_shards.py has divided, which may be a URL.
    folder, _, name = held_out.rpartition("/")
    if name == "validation" and shards == f"{folder}/train":
        return command_line("compare", folder, "--models", run)
    shards = held_out or shards
    if isinstance(shards, list):
        shards = shards[0]
    return command_line("features", shards, f"{run}/features", "--model", run)
