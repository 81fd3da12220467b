"""Fill in the numbers of README, docs/results.md and docs/experiments.md that result files hold, and redraw the plots:
`python benchmarks/results_page.py`.

A table stands between two comments. The first names the JSON file in benchmarks/results/, the columns (`name: heading`,
or `name ± deviation: heading`) and optionally which rows: `key=value|other value, ...`, all of which must hold. A
number in a sentence stands between `<!-- = its name -->` and `<!-- end -->`; benchmarks/results_page.yaml defines it.
All other text is left as it is.
"""

import json
import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from matplotlib.figure import Figure

from benchmarks.harness import RESULTS, ROOT, Row, format_cell, format_table
from common.atomic_io import atomic_write, write_text
from common.errors import InputError, run_command
from common.yaml_io import read_yaml

PAGES = (ROOT / "README.md", ROOT / "docs/results.md", ROOT / "docs/experiments.md")
NUMBERS: dict[str, dict[str, Any]] = {
    name: {"file": group["file"], "column": group["column"], "over": "", "as": "{value}", **number}
    for group in read_yaml(ROOT / "benchmarks/results_page.yaml")
    for name, number in group["numbers"].items()
}
LOADING = "cpu/pipeline_throughput.json"
MEMORY = "nvidia-h200/memory_vs_ratio.json"
FEW_CLIPS, NUM_TEST_CLIPS = "cpu/few_clips", 212
MEASURES = {"finetune_top1": "fine-tuned", "attentive_probe_top1": "attentive probe", "linear_top1": "linear"}
FILES = {"original": "original files", "h264": "h264 shards", "h264-size": "h264 shards, --tune size"}
PLOTTED = ("adamae", "spdl", "torchcodec", "decord")
BLUE, GRAY, RED = "#2471a3", "#95a5a6", "#c0392b"
SERIES = (  # of memory: column, whether with activation checkpointing, label, Matplotlib's marker, line and color
    ("paper_gb", False, "the paper's code on its GPUs (converted from GB)", "s--C7"),
    ("predicted_peak_gib", False, "predicted", "-C0"),
    ("measured_peak_gib", False, "measured", "oC0"),
    ("compiled_measured_peak_gib", False, "measured, compiled", "DC3"),
    ("predicted_peak_gib", True, "predicted, with activation checkpointing", ":C0"),
    ("measured_peak_gib", True, "measured, with activation checkpointing", "^C0"),
)
TABLE = re.compile(
    r"(<!-- table (?P<file>\S+) \|(?P<columns>[^|]*?)(?:\|(?P<filters>.*?))?-->\n).*?(<!-- end -->)", re.S
)
NUMBER = re.compile(r"(<!-- = (?P<name>[^|>]+?) -->).*?(<!-- end -->)", re.S)


class Cell(float):
    """A number that is formatted as in tables, unless a format is given."""

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else format_cell(float(self))


def main() -> None:
    for page in PAGES:
        write_text(page, regenerate(page.read_text(encoding="utf-8")))
        print(f"wrote {page}")
    plots = {
        "loading": plot_loading(read_rows(LOADING)),
        "memory": plot_memory(choose_rows(MEMORY, "masking=adaptive, target=pixels")),
        "few_clips": plot_few_clips(),
    }
    for name, figure in plots.items():
        plot = ROOT / "docs" / f"{name}.png"
        with atomic_write(plot) as partial:
            figure.savefig(partial, format="png", dpi=90)
        print(f"wrote {plot}")


def regenerate(text: str) -> str:
    """Return a page with all its tables and numbers as the results say; raise InputError for what they do not hold."""
    text = TABLE.sub(
        lambda found: found[1] + make_table(found["file"], found["columns"], found["filters"] or "") + found[5], text
    )
    return NUMBER.sub(lambda found: found[1] + make_number(found["name"]) + found[3], text)


def read_rows(file: str) -> list[Row]:
    path = RESULTS / file
    if not path.is_file():
        raise InputError(f"a page names {file}, which is not in {RESULTS}")
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def make_number(name: str) -> str:
    """Format the largest value of a column among chosen rows, as results_page.yaml says."""
    if name not in NUMBERS:
        raise InputError(f"a page names the number {name}, which benchmarks/results_page.yaml does not define")
    number = NUMBERS[name]
    file, by_column, where = number["file"], itemgetter(number["column"]), number["where"]
    rows = choose_rows(file, where)
    best = max(rows, key=by_column)
    values = {**best, "value": by_column(best), "low": min(map(by_column, rows))}
    if number["over"]:
        values["ratio"] = values["value"] / max(map(by_column, choose_rows(file, f"{where}, {number['over']}")))
    cells = {key: Cell(value) if isinstance(value, float) else value for key, value in values.items()}
    return str(number["as"]).format(**cells)


def choose_rows(file: str, filters: str) -> list[Row]:
    """Return the rows that fit all filters, `key=value|other value, ...`; of two for one key the last one counts."""
    pairs = (pair.strip().partition("=") for pair in re.split(r",(?=\s*\w+=)", filters) if pair.strip())
    wanted = {key: values.split("|") for key, _, values in pairs}
    rows = [row for row in read_rows(file) if all(str(row.get(key)) in values for key, values in wanted.items())]
    if not rows:
        raise InputError(f"{RESULTS / file} has no row with {filters}")
    return rows


def make_table(file: str, columns: str, filters: str) -> str:
    known = {key for row in read_rows(file) for key in row}
    rows = choose_rows(file, filters)
    heads, cells = [], []
    for column in columns.split(","):
        name, _, heading = (part.strip() for part in column.partition(":"))
        mean, _, deviation = (part.strip() for part in name.partition("±"))
        if mean not in known:
            raise InputError(f"a page names the column {mean}, which {RESULTS / file} does not have")
        heads.append(heading or name)
        spreads = ("" if row.get(deviation) is None else f" ± {format_cell(row[deviation])}" for row in rows)
        cells.append([format_cell(row.get(mean)) + spread for row, spread in zip(rows, spreads, strict=True)])
    return format_table(heads, zip(*cells, strict=True))


def plot_memory(rows: Sequence[Row]) -> Figure:
    """Plot the memory of a step over the mask ratio: predicted, measured, compiled, and the paper's."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for column, checkpointing, label, style in SERIES:
        gib = 1e9 / 2**30 if column == "paper_gb" else 1
        points = sorted(
            (row["mask_ratio"], row[column] * gib)
            for row in rows
            if row["activation_checkpointing"] == checkpointing and row.get(column) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(
        xlabel="mask ratio",
        ylabel="peak GPU memory of a step (GiB)",
        xticks=sorted({row["mask_ratio"] for row in rows}),
    )
    axes.set_title(f"pre-training, {rows[0]['batch_size']} clips per step", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    return figure


def plot_few_clips() -> Figure:
    """Plot the accuracy on clips of unseen people and places, with its standard error over clips."""
    features = [row for row in read_rows(f"{FEW_CLIPS}/linear_baseline.json") if "knn_top1" in row]
    top1 = {f"{row['features']}, linear": row["linear_top1"] for row in features}
    for row in read_rows(f"{FEW_CLIPS}/masking_study.json"):
        masking, _, settings = row["strategy"].partition(":")
        name = "from scratch" if masking == "scratch" else f"pre-trained, {masking} masks"
        name += f", {settings}" if settings else ""
        top1 |= {f"{name}, {title}": row[key] for key, title in MEASURES.items() if key in row}
    top1 = dict(sorted(top1.items(), key=itemgetter(1)))
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    errors = [(p * (1 - p) / NUM_TEST_CLIPS) ** 0.5 for p in top1.values()]
    colors = [BLUE if "fine-tuned" in name else GRAY for name in top1]
    axes.barh(list(top1), list(top1.values()), xerr=errors, color=colors)
    axes.axvline(0.1, color=RED, linestyle="--", label="chance")
    axes.legend(loc="lower right", fontsize=8)
    axes.set_xlabel(f"top-1 on {NUM_TEST_CLIPS} clips")
    return figure


def plot_loading(rows: Sequence[Row]) -> Figure:
    """Plot the clips per CPU-second of every loader, by the files that it reads, and the bound of decoding alone."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    speed = itemgetter("clips_per_cpu_second")
    for axes, (encode, title) in zip(figure.subplots(1, len(FILES)), FILES.items(), strict=True):
        own = "copy" if encode == "original" else encode  # copied files are the originals
        shown = [row for row in rows if row["encode"] == (own if row["loader"] in ("adamae", "decoding") else encode)]
        bound = next(speed(row) for row in shown if row["loader"] == "decoding")
        shown = sorted((row for row in shown if row["loader"] in PLOTTED), key=speed)
        names = [row["loader"] + ",\n2 clips per decode" * (row["repeats"] == 2) for row in shown]
        bars = axes.barh(
            names, list(map(speed, shown)), color=[BLUE if row["loader"] == "adamae" else GRAY for row in shown]
        )
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.axvline(bound, color=RED, linestyle="--", label=f"decoding alone: {bound:.3g}")
        axes.margins(x=0.25)
        axes.legend(loc="lower right", fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("clips per CPU-second")
    return figure


if __name__ == "__main__":
    run_command(main)
