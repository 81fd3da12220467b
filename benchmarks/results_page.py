"""Regenerate tables and the plot of docs/results.md, and README's figures of data loading, from benchmarks/results/:
`python benchmarks/results_page.py`.

A table stands between two comments. The first names the JSON file, the columns (`name: heading`, or
`name ± deviation: heading`) and optionally which rows: `key=value|other value, ...`, all of which must hold. The text
around the tables is left as it is. A figure within a line stands between `<!-- = its name -->`, a key of
`describe_loading`, and `<!-- end -->`.
"""

import json
import re
from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.harness import RESULTS, ROOT, Row, format_cell, format_table
from common.atomic_io import atomic_write, write_text
from common.errors import InputError, run_command

PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
LOADING = "cpu/pipeline_throughput.json"
PLOT = ROOT / "docs" / "loading.png"
FILES = {"original": "original files", "h264": "our h264 shards", "h264-size": "h264 shards, --tune size"}
OURS = {"ours": "ours", "planes": "ours, device scales"}  # loaders of pipeline_throughput.py, and what they are
PEERS = ("spdl", "torchcodec", "decord", "pyav", "webdataset")  # beside these
TABLE = re.compile(
    r"(<!-- table (?P<file>\S+) \|(?P<columns>[^|]*?)(?:\|(?P<filters>.*?))?-->\n).*?(<!-- end -->)", re.S
)
FIGURE = re.compile(r"(<!-- = (?P<name>[^|>]+?) -->).*?(<!-- end -->)")


def main() -> None:
    for page in (PAGE, README):
        write_text(page, regenerate(page.read_text(encoding="utf-8")))
        print(f"wrote {page}")
    with atomic_write(PLOT) as partial:
        plot_loading(read_rows(LOADING)).savefig(partial, format="png", dpi=90)
    print(f"wrote {PLOT}")


def regenerate(text: str) -> str:
    """Return the page with all its tables and figures as the results say; raise InputError for a file, column or figure
    that is missing."""
    text = TABLE.sub(
        lambda found: found[1] + make_table(found["file"], found["columns"], found["filters"] or "") + found[5], text
    )
    return FIGURE.sub(lambda found: found[1] + make_figure(found["name"]) + found[3], text)


def read_rows(file: str) -> list[Row]:
    path = RESULTS / file
    if not path.is_file():
        raise InputError(f"{PAGE} names {file}, which is not in {RESULTS}")
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def make_figure(name: str) -> str:
    figures = describe_loading(read_rows(LOADING))
    if name not in figures:
        raise InputError(f"{README} names the figure {name}: must be one of {', '.join(figures)}")
    return figures[name]


def describe_loading(rows: list[Row]) -> dict[str, str]:
    """Describe our throughput with H.264 shards beside that of the fastest other loader, by name of the figure."""

    def fastest(encode: str, *loaders: str, repeats: int = 1) -> Row:
        chosen = {"encode": [encode], "loader": loaders, "repeats": [repeats]}
        fitting = [row for row in rows if all(row[key] in values for key, values in chosen.items())]
        return max(fitting, key=lambda row: row["clips_per_second"])

    files, same_bytes = fastest("original", *PEERS), fastest("h264", *PEERS)
    ours, twice = fastest("h264", "ours"), fastest("h264", "ours", repeats=2)

    def relate(row: Row, other: Row) -> str:
        speed = row["clips_per_second"]
        return f"{format_cell(speed)}, **{speed / other['clips_per_second']:.2g}×**"

    return {
        "speed-up": f"{ours['clips_per_second'] / files['clips_per_second']:.2g} times the throughput of"
        f" {files['loader']}, the fastest other loader",
        "fastest on originals": f"{format_cell(files['clips_per_second'])}, {files['loader']} on the original files",
        "fastest on our bytes": f"{format_cell(same_bytes['clips_per_second'])}, {same_bytes['loader']}",
        "ours": relate(ours, files),
        "ours, two clips": relate(twice, files),
        "ours, same bytes": relate(ours, same_bytes),
    }


def make_table(file: str, columns: str, filters: str) -> str:
    rows = read_rows(file)
    known = {key for row in rows for key in row}
    for pair in filter(None, map(str.strip, filters.split(","))):
        key, _, values = pair.partition("=")
        rows = [row for row in rows if str(row.get(key)) in values.split("|")]
    heads: list[str] = []
    cells: list[list[str]] = []
    for column in columns.split(","):
        name, _, heading = (part.strip() for part in column.partition(":"))
        mean, _, deviation = (part.strip() for part in name.partition("±"))
        if mean not in known:
            raise InputError(f"{PAGE} names the column {mean}, which {RESULTS / file} does not have")
        heads.append(heading or name)
        cells.append([])
        for row in rows:
            spread = f" ± {format_cell(row[deviation])}" if row.get(deviation) is not None else ""
            cells[-1].append(format_cell(row.get(mean)) + spread)
    return format_table(heads, zip(*cells, strict=True))


def plot_loading(rows: Sequence[Row]) -> Figure:
    """Plot the clips per CPU-second of every loader, by the files that it reads, and the bound of decoding alone."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(FILES))
    for axes, (encode, title) in zip(panels, FILES.items(), strict=True):
        ours = "copy" if encode == "original" else encode  # copied files are the originals
        shown = [row for row in rows if row["encode"] == (ours if row["loader"] in ("ours", "decoding") else encode)]
        bound = next(row["clips_per_cpu_second"] for row in shown if row["loader"] == "decoding")
        shown = [row for row in shown if row["loader"] != "decoding"]
        shown.sort(key=lambda row: row["clips_per_cpu_second"])
        names = [OURS.get(row["loader"], row["loader"]) + ", 2 clips a decode" * (row["repeats"] == 2) for row in shown]
        colors = ["#2471a3" if row["loader"] in OURS else "#95a5a6" for row in shown]
        bars = axes.barh(names, [row["clips_per_cpu_second"] for row in shown], color=colors)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.axvline(bound, color="#c0392b", linestyle="--")
        axes.margins(x=0.2)
        axes.set(title=f"{title}\ndecoding alone: {bound:.3g}", xlabel="clips per CPU-second")
    return figure


if __name__ == "__main__":
    run_command(main)
