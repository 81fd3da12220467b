"""Write what a comparison has found: a page, all numbers, and a line per video."""

import base64
import io
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import jinja2
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from adamae.common.atomic_io import make_output_folder, write_json, write_text
from adamae.common.csv_files import write_csv
from adamae.common.logging import printable
from adamae.figures.clips import resize_and_crop
from adamae.figures.confusion import plot_confusion
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.planning.crops import FrameSize
from adamae.pipeline.shards.arrays import to_rgb
from adamae.pipeline.video_error import VideoError
from adamae.training.comparison.entries import Comparison, Entry
from adamae.training.comparison.splits import Split
from adamae.training.comparison.text import COLUMNS, TITLES, format_gain, shorten
from adamae.training.measures import NO_CLASS

TEMPLATE = Path(__file__).with_name("page.html.jinja")
# Validation videos whose neighbors are shown, and the height and width of a picture.
NUM_SHOWN = 8
PICTURE_SIZE = (90, 120)
# With more groups, their accuracies are in compare.json alone.
MAX_GROUPS = 60


def write_results(comparison: Comparison, conclusions: list[str], file: Path) -> None:
    """Write compare.json: a row of accuracies, gain and cost each, and what they are by class."""
    splits = comparison.splits
    results: dict[str, Any] = {
        "training": splits.training.location,
        "validation": splits.validation.location,
        "training_videos": len(splits.training.samples),
        "validation_videos": len(splits.validation.samples),
        "left_out": [split.num_left_out for split in splits],
        "groups": comparison.num_groups,
        "neighbors": comparison.num_neighbors,
        "gain_over": comparison.baseline.name,
        "conclusions": conclusions,
        "rows": [describe_entry(comparison, entry) for entry in comparison.entries],
        "per_class": {},
        "per_group": {},
    }
    for entry in comparison.entries:
        for measure in entry.predicted:
            name = f"{entry.name}: {TITLES[measure]}"
            results["per_class"][name] = list_by_class(comparison, entry, measure)
            results["per_group"][name] = list_by_group(comparison, entry, measure)
    write_json(file, results)


def describe_entry(comparison: Comparison, entry: Entry) -> dict[str, Any]:
    """Return the numbers of a row; the accuracy of one without features is its `top1`."""
    row: dict[str, Any] = {"name": entry.name, "kind": entry.kind, "model": entry.model}
    if entry.name == "chance":
        return row | {"top1": comparison.chance}
    for measure in entry.predicted:
        estimate = comparison.estimate(entry, measure)
        prefix = f"{measure}_" if measure in COLUMNS else ""
        row[f"{prefix}top1"] = estimate.value
        row[f"{prefix}error"] = estimate.error
        if measure in entry.penalties:
            row[f"{measure}_penalty"] = entry.penalties[measure]
    if entry.name != comparison.baseline.name:
        gain = comparison.subtract(entry, comparison.baseline)
        row |= {"gain": gain.value, "gain_error": gain.error}
    if entry.curve:
        row["linear_top1_by_labels"] = entry.curve
    if entry.speed is not None:
        row |= entry.speed._asdict()
    return row


def list_by_class(comparison: Comparison, entry: Entry, measure: str) -> dict[str, Any]:
    """Return the number of videos and the accuracy of each class that has validation videos."""
    is_right = comparison.find_right(entry, measure)
    rows = {}
    for label, name in enumerate(comparison.splits.classes):
        is_of_class = comparison.labels == label
        if is_of_class.any():
            top1 = float(is_right[is_of_class].mean())
            rows[name] = {"videos": int(is_of_class.sum()), "top1": top1}
    return rows


def list_by_group(comparison: Comparison, entry: Entry, measure: str) -> dict[str, Any]:
    """Return the number of videos and the accuracy of each group of validation videos.

    Without a field that names groups, every file would be one, which says nothing.
    """
    is_right = comparison.find_right(entry, measure)
    names = comparison.group_names
    rows: dict[str, Any] = {}
    if len(set(names)) == len(names):
        return rows
    for name in dict.fromkeys(names):
        is_of_group = np.array([other == name for other in names])
        top1 = float(is_right[is_of_group].mean())
        rows[name] = {"videos": int(is_of_group.sum()), "top1": top1}
    return rows


def write_predictions(comparison: Comparison, file: Path) -> None:
    """Write a line per validation video: its key, source, group, class and what each row says."""
    columns = {}
    for entry in comparison.entries:
        for measure, predicted in entry.predicted.items():
            columns[f"{entry.name}: {TITLES[measure]}"] = predicted
    classes = comparison.splits.classes
    groups = comparison.group_names
    rows = []
    for index, sample in enumerate(comparison.splits.validation.samples):
        labels = [comparison.labels[index], *(predicted[index] for predicted in columns.values())]
        # NO_CLASS is of a video which shares its group with all training videos.
        names = [classes[label] if label != NO_CLASS else "" for label in labels]
        rows.append((sample.key, sample.source, groups[index], *names))
    make_output_folder(file.parent)
    write_csv(file, ("key", "source", "group", "label", *columns), rows)


def write_page(comparison: Comparison, conclusions: list[str], file: Path) -> None:
    """Write compare.html, complete in itself."""
    best = comparison.best_encoder
    baseline = comparison.baseline
    figures = {}
    if any(entry.curve for entry in comparison.entries):
        figures["Accuracy by labels per class (linear)"] = plot_curves(comparison)
    for entry in (best, baseline):
        figures[f"Confusions of {printable(entry.name)}"] = plot_entry(comparison, entry)
    rows = [describe_page_row(comparison, entry) for entry in comparison.entries]
    shown = (best, baseline)
    measures = [comparison.find_best_measure(entry) for entry in shown]
    by_class = [list_by_class(comparison, *pair) for pair in zip(shown, measures, strict=True)]
    by_group = [list_by_group(comparison, *pair) for pair in zip(shown, measures, strict=True)]
    titles = []
    for entry, measure in zip(shown, measures, strict=True):
        titles.append(f"{printable(entry.name)} ({TITLES[measure]})")
    # Names of videos and classes are not trusted: they may hold HTML.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    html = environment.from_string(TEMPLATE.read_text()).render(
        splits=comparison.splits,
        num_groups=comparison.num_groups,
        num_neighbors=comparison.num_neighbors,
        updated=time.strftime("%Y-%m-%d %H:%M"),
        conclusions=conclusions,
        rows=rows,
        baseline=baseline.name,
        titles=titles,
        by_class=merge_tables(*by_class),
        by_group=merge_tables(*by_group),
        max_groups=MAX_GROUPS,
        figures={name: encode_figure(figure) for name, figure in figures.items()},
        best=printable(best.name),
        neighbors=show_neighbors(comparison),
    )
    write_text(file, html)


def describe_page_row(comparison: Comparison, entry: Entry) -> dict[str, Any]:
    """Return the cells of a row of the page's table."""
    cells = {}
    for measure in entry.predicted:
        column = measure if measure in COLUMNS else "knn"
        cells[column] = str(comparison.estimate(entry, measure))
    if entry.name == "chance":
        cells["knn"] = f"{comparison.chance:.3f}"
    if entry.speed is not None:
        cells["gain"] = format_gain(comparison.subtract(entry, comparison.baseline))
        cells["frames"] = f"{entry.speed.frames_per_second:,.0f}"
        cells["gib"] = f"{entry.speed.gib:.1f}"
    return {"name": printable(entry.name), "cells": cells}


def merge_tables(best: dict[str, Any], baseline: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return rows of a name, a number of videos and two accuracies, the worst of the best first."""
    rows = []
    for name, row in best.items():
        accuracies = (f"{row['top1']:.2f}", f"{baseline[name]['top1']:.2f}")
        rows.append((printable(name), row["videos"], *accuracies))
    return sorted(rows, key=lambda row: row[2])


def plot_curves(comparison: Comparison) -> Figure:
    """Plot linear accuracy over the number of labels, with standard errors over the choices."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    all_numbers: set[float] = set()
    all_labels = round(len(comparison.training.labels) / len(comparison.splits.classes))
    for entry in comparison.entries:
        if not entry.curve:
            continue
        points: list[tuple[float, float, float]] = []
        for num_labels, values in sorted(entry.curve.items()):
            points.append((num_labels, mean(values), stdev(values) / len(values) ** 0.5))
        if "linear" in entry.predicted:
            points.append((all_labels, *comparison.estimate(entry, "linear")))
        numbers, accuracies, errors = zip(*points, strict=True)
        all_numbers.update(numbers)
        name = escape(shorten(entry.name))
        axes.errorbar(numbers, accuracies, errors, marker=".", capsize=2, label=name)
    axes.axhline(comparison.chance, color="gray", linestyle=":", label="chance")
    axes.set(
        xlabel="labeled training videos per class; the last point: all",
        ylabel="linear top-1",
        xscale="log",
    )
    axes.set_xticks(sorted(all_numbers), [f"{number:g}" for number in sorted(all_numbers)])
    axes.minorticks_off()
    # Outside: with several models, it would hide lines.
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def escape(name: str) -> str:
    """Return a name as matplotlib shows it: text between two dollars would be a formula."""
    return printable(name).replace("$", r"\$")


def plot_entry(comparison: Comparison, entry: Entry) -> Figure:
    """Plot the confusions of a row's best measure."""
    measure = comparison.find_best_measure(entry)
    num_classes = len(comparison.splits.classes)
    confusion = np.zeros((num_classes, num_classes), int)
    predicted = entry.predicted[measure]
    has_class = predicted >= 0
    np.add.at(confusion, (comparison.labels[has_class], predicted[has_class]), 1)
    top1 = comparison.estimate(entry, measure).value
    return plot_confusion({"confusion": confusion, "top1": top1}, comparison.splits.classes)


def encode_figure(figure: Figure) -> str:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100)
    return base64.b64encode(png.getvalue()).decode()


def show_neighbors(comparison: Comparison) -> list[list[dict[str, Any]]]:
    """Return pictures of some validation videos, spread evenly, each with its neighbors."""
    assert comparison.nearest is not None
    splits = comparison.splits
    num_queries = len(splits.validation.samples)
    rows = []
    for index in np.linspace(0, num_queries - 1, min(NUM_SHOWN, num_queries)).astype(int):
        label = int(comparison.labels[index])
        neighbors = comparison.nearest[index].tolist()
        pictures = [make_picture(splits.training, neighbor, label) for neighbor in neighbors]
        rows.append([make_picture(splits.validation, index, label), *pictures])
    return rows


def make_picture(split: Split, index: int, label: int) -> dict[str, Any]:
    """Return the middle frame of a video as JPEG, its class, and whether that is `label`."""
    sample = split.samples[index]
    size = FrameSize(*PICTURE_SIZE)
    jpeg = io.BytesIO()
    # A video whose middle is damaged has a place without a picture.
    with suppress(VideoError):
        content = split.dataset.read_video(split.numbers[index])
        frames = decode_frames(content, [sample.num_frames // 2], sample.num_frames)
        frame = to_rgb(resize_and_crop(frames, size).numpy())[0]
        Image.fromarray(frame).save(jpeg, "JPEG")
    return {
        "class": printable(split.dataset.info.classes[sample.label or 0]),
        "name": printable(Path(sample.source).name),
        "is_same": sample.label == label,
        "jpeg": base64.b64encode(jpeg.getvalue()).decode(),
    }
