"""Visualize reconstructions: `python visualize.py RUN VIDEO... [--output FOLDER]`.

Writes the paper's figure for each video (frames, reconstruction, error, sampling probability, mask) as PNG and GIF. A
VIDEO is a file, a folder of files or a folder of shards; RUN is a run directory, one of its checkpoints, or any file of
weights that training can start from.
"""

import argparse
from pathlib import Path

from common.errors import InputError, parse_early, run_command


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="run directory (or its URL), checkpoint or file of weights")
    parser.add_argument("videos", metavar="VIDEO", nargs="+", help="video file, folder of videos, folder of shards")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: figures/ in the run directory")
    parser.add_argument("--mask-ratio", type=float, metavar="R", help="default: the run's")
    parser.add_argument("--frame-stride", type=int, metavar="N", help="source frame stride; default: the run's")
    parser.add_argument("--clips", type=int, default=8, metavar="N", help="videos per folder (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the masks")
    parser.add_argument("--strategies", action="store_true", help="also compare the masking strategies")
    parser.add_argument("--checkpoints", action="store_true", help="also compare the run's checkpoints")
    parser.add_argument("--compare", action="append", default=[], metavar="RUN", help="also compare with another run")
    parser.add_argument("--html", action="store_true", help="also report.html, with sliders for frame and mask ratio")
    options = parser.parse_args(arguments)
    for name in ("frame_stride", "clips"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}: must be at least 1")
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

from dataclasses import replace

import common.openmp  # noqa: F401

import torch

from common.atomic_io import atomic_write, write_text
from common.logging import escape, log
from common.progress import progress_bar
from figures.clips import Clip, read_clips
from figures.interactive import render_page
from figures.reconstruction import (
    Row,
    error_row,
    explain_figure,
    figure_rows,
    frames_row,
    mask_row,
    probability_row,
    reconstruction_rows,
    render_animation,
    render_figure,
)
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.maps import Maps
from model.masking import MASKS
from model.weights.pretrained import find_file, run_of, trained_stride
from training.checkpoint import list_checkpoints, parse_step
from training.remote_run import local_run

REPORT_RATIOS = (0.5, 0.75, 0.85, 0.9, 0.95, 0.98)


def visualize(options: argparse.Namespace) -> None:
    run = local_run(options.run)
    changes = {} if options.mask_ratio is None else {"mask_ratio": options.mask_ratio}
    model = AdaMAE.from_pretrained(run, **changes)
    config = model.config
    # Not in a checkpoint's directory, which is deleted when there are newer ones.
    output = options.output or (run_of(find_file(run)) or (run if run.is_dir() else Path())) / "figures"
    output.mkdir(parents=True, exist_ok=True)
    stride = options.frame_stride or trained_stride(run)
    clips = read_clips(options.videos, config.num_frames, config.image_size, stride, options.clips)
    interactive = []
    for clip in progress_bar(clips, unit="clip", desc="figures"):
        figures = {"": figure_rows(model.reconstruct(clip.frames[None], options.seed))}
        write_animation(output / f"{clip.name}.gif", figures[""])
        if options.strategies:
            figures[".strategies"] = compare_strategies(model, clip, options.seed)
        if options.checkpoints:
            figures[".checkpoints"] = compare_checkpoints(run, config, clip, options.seed)
        if options.compare:
            others = [(path, AdaMAE.from_pretrained(local_run(path), **changes)) for path in options.compare]
            figures[".runs"] = compare_models([(options.run, model), *others], clip, options.seed)
        for suffix, rows in figures.items():
            with atomic_write(output / f"{clip.name}{suffix}.png") as partial:
                render_figure(rows, config, clip.times).save(partial, "PNG")
        if options.html:
            interactive.append((clip.name, rows_by_ratio(model, clip, options.seed)))
    if interactive:
        write_text(output / "report.html", render_page(f"AdaMAE: {run}", interactive, explain_figure(config)))
    log(f"wrote figures to {output}")


def compare_strategies(model: AdaMAE, clip: Clip, seed: int) -> list[Row]:
    """Mask a clip by every strategy, at the model's ratio; strategies with equal masks share their rows."""
    ratio, grid = model.config.mask_ratio, model.config.grid
    found: dict[str, Maps] = {}
    for masking, strategy in MASKS.items():
        # Of frames, at least one token frame has to stay.
        frame_ratio = min(ratio, 1 - 1 / grid[0]) if strategy.unit == "frame" else ratio
        try:
            masked = model.with_masking(masking=masking, mask_ratio=frame_ratio)
        except InputError:  # no sampler was trained, or there is no motion in one token frame
            continue
        maps = masked.reconstruct(clip.frames[None], seed)
        same = next((name for name, other in found.items() if torch.equal(other.is_masked, maps.is_masked)), None)
        if same is None:
            found[masking] = maps
        else:
            found = {f"{name} = {masking}" if name == same else name: other for name, other in found.items()}
    rows = [frames_row(next(iter(found.values())))]
    for name, maps in found.items():
        rows += prefix_labels(name, [mask_row(maps), reconstruction_rows(maps)[-1], error_row(maps)])
    return rows


def compare_checkpoints(run: Path, config: ModelConfig, clip: Clip, seed: int) -> list[Row]:
    """Reconstruct a clip, with the same noise, by every checkpoint of a run."""
    rows: list[Row] = []
    for folder in list_checkpoints(run / "checkpoints"):
        maps = AdaMAE.from_pretrained(folder, mask_ratio=config.mask_ratio).reconstruct(clip.frames[None], seed)
        probability = [] if maps.probability is None else [probability_row(maps)]
        rows = rows or [frames_row(maps)]
        rows += prefix_labels(f"step {parse_step(folder.name)}", [*probability, reconstruction_rows(maps)[-1]])
    if not rows:
        raise InputError(f"no checkpoints/ in {run}: --checkpoints needs a run directory")
    return rows


def compare_models(models: list[tuple[str, AdaMAE]], clip: Clip, seed: int) -> list[Row]:
    """Reconstruct a clip, with the same noise, by several models, named after their files."""
    rows: list[Row] = []
    shape = clip.frames.shape[:3]
    for path, model in models:
        if (model.config.num_frames, *model.config.frame_size) != shape:
            raise InputError(f"{path} takes clips of another shape than {models[0][0]}: they cannot be compared")
        maps = model.reconstruct(clip.frames[None], seed)
        probability = [] if maps.probability is None else [probability_row(maps)]
        rows = rows or [frames_row(maps)]
        rows += prefix_labels(Path(path).name, [*probability, mask_row(maps), reconstruction_rows(maps)[-1]])
    return rows


def prefix_labels(title: str, rows: list[Row]) -> list[Row]:
    return [row._replace(label=f"{escape(title)}:\n{row.label}") for row in rows]


def rows_by_ratio(model: AdaMAE, clip: Clip, seed: int) -> dict[float, list[Row]]:
    """Make the figure's rows at every ratio that leaves some tokens of this clip shape visible."""
    rows = {}
    for ratio in sorted({*REPORT_RATIOS, model.config.mask_ratio}):
        try:
            replace(model.config, mask_ratio=ratio)
        except InputError:  # too few tokens, or token frames, for this ratio
            continue
        rows[ratio] = figure_rows(model.with_masking(mask_ratio=ratio).reconstruct(clip.frames[None], seed))
    return rows


def write_animation(path: Path, rows: list[Row]) -> None:
    first, *others = render_animation(rows)
    with atomic_write(path) as partial:
        first.save(partial, "GIF", save_all=True, append_images=others, duration=160, loop=0)


if __name__ == "__main__":
    run_command(lambda: visualize(OPTIONS))
