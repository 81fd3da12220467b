"""Plots of docs/results.md, drawn from the rows of its tables."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.harness import Row

GREY, BLUE, ORANGE, RED = "#95a5a6", "#2471a3", "#d68910", "#c0392b"
FILES = {"original": "original files", "h264": "our h264 shards", "h264-size": "our h264 shards (--tune size)"}


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
        names = [row["loader"] + (", 2 clips a decode" if row["repeats"] == 2 else "") for row in shown]
        colors = [BLUE if row["loader"] == "ours" else GREY for row in shown]
        bars = axes.barh(names, [row["clips_per_cpu_second"] for row in shown], color=colors)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.axvline(bound, color=RED, linestyle="--")
        axes.margins(x=0.2)
        axes.set(title=f"{title}\ndecoding alone: {bound:.3g}", xlabel="clips per CPU-second")
    return figure


def plot_encodings(rows: Sequence[Row]) -> Figure:
    """Plot quality and time to decode over size: h264 with either tune by CRF, the other codecs at one setting each."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    usual = sorted((row for row in rows if row["gop"] == 8), key=lambda row: row["quality"])
    metrics = {"psnr_db": "PSNR (dB)", "decode_ms": "decode (ms of one thread)"}
    for axes, (name, unit) in zip(figure.subplots(1, 2), metrics.items(), strict=True):
        for tune, color in (("decode", BLUE), ("size", ORANGE)):
            line = [row for row in usual if (row["codec"], row["tune"], row["preset"]) == ("h264", tune, "veryfast")]
            label = f"h264 --tune {tune}, CRF {line[0]['quality']} to {line[-1]['quality']}"
            points = [row["kb_per_clip"] for row in line], [row[name] for row in line]
            axes.plot(*points, "o-", color=color, label=label)
        for row in usual:
            if row["tune"] is None:
                axes.plot(row["kb_per_clip"], row[name], "s", color=GREY)
                axes.annotate(row["codec"], (row["kb_per_clip"], row[name]), (5, 4), textcoords="offset points")
        axes.margins(x=0.1)
        axes.set(xlabel="kB per clip of 16 frames", ylabel=unit)
        axes.legend(fontsize=8)
    return figure
