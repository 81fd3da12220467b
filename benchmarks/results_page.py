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
from benchmarks.memory_vs_ratio import plot_memory
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
STEP = "nvidia-h200/step_budget.json"
FILES = {"original": "original files", "h264": "h264 shards", "h264-size": "h264 shards, --tune size"}
PLOTTED = ("adamae", "spdl", "torchcodec", "decord")
KINDS = {
    "products": "#2471a3",
    "attention": "#c0392b",
    "elementwise": "#d4ac0d",
    "other_kernels": "#95a5a6",
    "between_kernels": "#566573",
}
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
    memory = choose_rows(MEMORY, "masking=adaptive, target=pixels")
    plots = {
        "loading": plot_loading(read_rows(LOADING)),
        "memory": plot_memory(memory),
        "step": plot_step(read_rows(STEP)),
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
    file, column, where = number["file"], number["column"], number["where"]
    rows = choose_rows(file, where)
    best, worst = (choose(rows, key=lambda row: row[column]) for choose in (max, min))
    values = {key: Cell(value) if isinstance(value, float) else value for key, value in best.items()}
    values |= {"value": Cell(best[column]), "low": Cell(worst[column])}
    if number["over"]:
        others = choose_rows(file, f"{where}, {number['over']}")
        values["ratio"] = Cell(best[column] / max(row[column] for row in others))
    return str(number["as"]).format(**values)


def choose_rows(file: str, filters: str) -> list[Row]:
    """Return the rows that fit all filters, `key=value|other value, ...`; of two for one key the last one counts."""
    pairs = (pair.strip().partition("=") for pair in re.split(r",(?=\s*\w+=)", filters) if pair.strip())
    wanted = {key: values.split("|") for key, _, values in pairs}
    rows = [row for row in read_rows(file) if all(str(row.get(key)) in values for key, values in wanted.items())]
    if not rows:
        raise InputError(f"{RESULTS / file} has no row with {filters}")
    return rows


def make_table(file: str, columns: str, filters: str) -> str:
    rows = choose_rows(file, filters)
    known = {key for row in read_rows(file) for key in row}
    heads: list[str] = []
    cells: list[list[str]] = []
    for column in columns.split(","):
        name, _, heading = (part.strip() for part in column.partition(":"))
        mean, _, deviation = (part.strip() for part in name.partition("±"))
        if mean not in known:
            raise InputError(f"a page names the column {mean}, which {RESULTS / file} does not have")
        heads.append(heading or name)
        cells.append([])
        for row in rows:
            spread = f" ± {format_cell(row[deviation])}" if row.get(deviation) is not None else ""
            cells[-1].append(format_cell(row.get(mean)) + spread)
    return format_table(heads, zip(*cells, strict=True))


def plot_few_clips() -> Figure:
    """Plot the accuracy on clips of unseen people and places, with its standard error over clips."""
    top1 = {f"{row['features']}, linear": row["linear_top1"] for row in read_rows(f"{FEW_CLIPS}/linear_baseline.json")}
    for row in read_rows(f"{FEW_CLIPS}/masking_study.json"):
        name = row["strategy"].replace(":", ", ").replace("model.", "")
        top1 |= {f"{name}, fine-tuned": row["finetune_top1"]}
        top1 |= {f"{name}, linear": row["linear_top1"]} if row.get("linear_top1") is not None else {}
    names = sorted(top1, key=top1.__getitem__)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    errors = [(top1[name] * (1 - top1[name]) / NUM_TEST_CLIPS) ** 0.5 for name in names]
    colors = ["#2471a3" if "fine-tuned" in name else "#95a5a6" for name in names]
    axes.barh(names, [top1[name] for name in names], xerr=errors, color=colors)
    axes.axvline(0.1, color="#c0392b", linestyle="--", label="chance")
    axes.legend(loc="lower right", fontsize=8)
    axes.set_xlabel(f"top-1 on {NUM_TEST_CLIPS} clips")
    return figure


def plot_loading(rows: Sequence[Row]) -> Figure:
    """Plot the clips per CPU-second of every loader, by the files that it reads, and the bound of decoding alone."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    panels = figure.subplots(1, len(FILES))
    for axes, (encode, title) in zip(panels, FILES.items(), strict=True):
        own = "copy" if encode == "original" else encode  # copied files are the originals
        shown = [row for row in rows if row["encode"] == (own if row["loader"] in ("adamae", "decoding") else encode)]
        bound = next(row["clips_per_cpu_second"] for row in shown if row["loader"] == "decoding")
        shown = sorted((row for row in shown if row["loader"] in PLOTTED), key=itemgetter("clips_per_cpu_second"))
        names = [row["loader"] + ",\n2 clips per decode" * (row["repeats"] == 2) for row in shown]
        colors = ["#2471a3" if row["loader"] == "adamae" else "#95a5a6" for row in shown]
        bars = axes.barh(names, [row["clips_per_cpu_second"] for row in shown], color=colors)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.axvline(bound, color="#c0392b", linestyle="--", label=f"decoding alone: {bound:.3g}")
        axes.margins(x=0.25)
        axes.legend(loc="lower right", fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("clips per CPU-second")
    return figure


def plot_step(rows: Sequence[Row]) -> Figure:
    """Plot the milliseconds of a step's parts by kind of kernel, and of the whole step beside its bound."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, width_ratios=[3, 2])
    for axes, kind, title in zip(panels, ("part", "step"), ("parts, estimated", "the whole step"), strict=True):
        shown = [row for row in reversed(rows) if row["kind"] == kind]
        names, ends = [row["part"] for row in shown], [0.0] * len(shown)
        for of, color in KINDS.items():
            widths = [row.get(f"{of}_ms") or 0 for row in shown]
            bars = axes.barh(names, widths, left=ends, color=color, label=of.replace("_", " "))
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        labels = [f"{row['ms']}, MFU {row['mfu']:.2f}" if "mfu" in row else row["ms"] for row in shown]
        axes.bar_label(bars, labels, padding=3)
        axes.set_xlim(right=(1.6 if kind == "step" else 1.1) * max(ends))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("ms, 64 clips of ViT-Base on an H200")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS), fontsize=8)
    return figure


if __name__ == "__main__":
    run_command(main)
