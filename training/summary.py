"""What a run has found, in words: for the screen of train.py and evaluate.py, and for the report."""

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

from adamae.common.logging import format_duration
from adamae.model.config import ModelConfig
from adamae.training.config import TrainConfig

# Accuracies that need no model, and what a warning calls them.
BASELINES = {
    "majority_top1": ("most common class", "always predicting the most common class"),
    "pixel_top1": ("1-NN of pixels", "the class of the video with the nearest mean gray thumbnail"),
}
# Accuracies by their titles, with the number of videos that each is of.
ACCURACIES = {
    "top1": ("top-1", "num_videos"),
    "top5": ("top-5", "num_videos"),
    "knn_top1": ("k-NN", "knn_videos"),
}
FEW_LEARNED = 0.02  # of the loss of predicting each patch's mean
PREFIX = "evaluation/"
Metrics = Mapping[str, float]


def describe_scores(metrics: Metrics) -> str:
    """Return an evaluation, with standard errors, as
    `held-out loss 0.960, k-NN 0.651 ± 0.060 (most common class 0.508, 1-NN of pixels 0.635), 63 videos`."""
    parts = (
        [f"held-out loss {metrics['reconstruction_loss']:.3f}"]
        if "reconstruction_loss" in metrics
        else []
    )
    if accuracies := [describe_accuracy(metrics, name) for name in ACCURACIES if name in metrics]:
        baselines = [
            f"{title} {metrics[name]:.3f}"
            for name, (title, _) in BASELINES.items()
            if name in metrics
        ]
        parts.append(f"{', '.join(accuracies)} ({', '.join(baselines)})")
    if "mAP" in metrics:
        parts.append(f"mAP {metrics['mAP']:.3f} (chance {metrics['chance_mAP']:.3f})")
    return ", ".join([*parts, f"{metrics['num_videos']:,.0f} videos"])


def describe_accuracy(metrics: Metrics, name: str) -> str:
    title, number = ACCURACIES[name]
    return f"{title} {metrics[name]:.3f} ± {standard_error(metrics[name], metrics[number]):.3f}"


def standard_error(accuracy: float, number: float) -> float:
    """Return that of an accuracy on so many videos; one right and one wrong one are added, so that it is never 0."""
    p = (accuracy * number + 1) / (number + 2)
    return sqrt(p * (1 - p) / number)


def interpret_scores(metrics: Metrics, model: ModelConfig | None = None) -> list[str]:
    """Return a sentence for each score that says that nothing, or hardly anything, has been learned."""
    found = []
    name = next(
        (name for name in ACCURACIES if name in metrics), None
    )  # of a fine-tuned model, k-NN stands beside it
    if name is not None:
        best = max(
            (baseline for baseline in BASELINES if baseline in metrics),
            key=lambda baseline: metrics[baseline],
        )
        if (
            metrics[name] - 2 * standard_error(metrics[name], metrics[ACCURACIES[name][1]])
            <= metrics[best]
        ):
            found.append(
                f"WARNING: {describe_accuracy(metrics, name)} is not clearly above {BASELINES[best][1]}"
                f" ({metrics[best]:.3f}): train longer, or train and evaluate on more videos"
            )
    is_relative = model is not None and model.normalize_target and model.loss == "mse"
    if is_relative and metrics.get("reconstruction_loss", 0) > 1 - FEW_LEARNED:
        found.append(
            "WARNING: the held-out loss is that of predicting the mean of each patch (1), so hardly anything has been"
            " learned: train longer, or with a higher optimizer.base_lr"
        )
    return found


def find_result(rows: Iterable[Mapping[str, Any]]) -> tuple[str, dict[str, float]]:
    """Return the evaluation that a run is described by, with its title: a classifier's best, which is kept, or else
    the last one. Without evaluations, the metrics are empty."""
    found = [
        (
            row["step"],
            {
                name.removeprefix(PREFIX): value
                for name, value in row.items()
                if name.startswith(PREFIX)
            },
        )
        for row in rows
        if any(name.startswith(PREFIX) for name in row)
    ]
    for name in ("mAP", "top1"):
        if scored := [(step, metrics) for step, metrics in found if name in metrics]:
            step, metrics = max(
                scored, key=lambda pair: pair[1][name]
            )  # the first of equals, as it is kept
            return f"best step {step:,}", metrics
    return (f"step {found[-1][0]:,}", found[-1][1]) if found else ("", {})


def describe_end(
    rows: list[dict[str, Any]],
    config: TrainConfig,
    first_step: int,
    total_steps: int,
    seconds: float,
) -> list[str]:
    """Return what train.py ends with: what was found, what that means, and what to do next."""
    run, shards = config.run, config.evaluation.shards or "SHARDS"
    ended, advice = f"finished in {format_duration(seconds)}", f"python evaluate.py {run} {shards}"
    if config.task == "pretrain":
        advice = f"python extract_features.py {shards} FEATURES --model {run}"
    if first_step >= total_steps:
        ended = f"{run} was finished before, after {total_steps:,} steps"
        advice = f"train longer with python train.py run=ANOTHER init_from={run} init_keep=optimizer steps=MORE"
    title, metrics = find_result(rows)
    result = (
        f"{title}: {describe_scores(metrics)}"
        if metrics
        else "no evaluation.shards, so nothing was evaluated"
    )
    report = f"report: {run.rstrip('/')}/report.html; next: {advice}"
    return [f"{ended}; {result}", *interpret_scores(metrics, config.model), report]
