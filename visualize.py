"""Visualize reconstructions: `python visualize.py RUN VIDEO... [--output FOLDER]`.

Writes the paper's figure for each video (frames, reconstruction, error, sampling probability, mask) as PNG and GIF,
with two rows on the encoder's features of the whole clip: their principal components as colors, and how similar all
tokens are to one. A VIDEO is a file, a folder of files or a folder of shards; RUN is a run directory, one of its
checkpoints, or any file of weights that training can start from.
"""

import argparse
from pathlib import Path

from common.arguments import ArgumentParser
from common.errors import InputError, parse_early, require_positive, run_command


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("run", metavar="RUN", help="run directory (or its URL), checkpoint or file of weights")
    parser.add_argument("videos", metavar="VIDEO", nargs="+", help="video file, folder of videos, folder of shards")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: figures/ in the run directory, or here")
    parser.add_argument("--mask-ratio", type=float, metavar="R", help="default: the run's")
    parser.add_argument("--frame-stride", type=int, metavar="N", help="source frame stride; default: the run's")
    parser.add_argument("--clips", type=int, default=8, metavar="N", help="videos per folder (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the masks")
    parser.add_argument("--strategies", action="store_true", help="also compare the masking strategies")
    parser.add_argument("--checkpoints", action="store_true", help="also compare the run's checkpoints")
    parser.add_argument("--compare", action="append", default=[], metavar="RUN", help="also compare with another run")
    options = parser.parse_args(arguments)
    require_positive(options, "frame_stride", "clips")
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

from collections.abc import Iterator
from contextlib import suppress

from common.logging import log
from common.progress import progress_bar
from figures.clips import read_clips
from figures.reconstruction import comparison_rows, make_rows, render_figure
from figures.sheet import render_animation, save_animation, save_image
from model.adamae import AdaMAE
from model.maps import reconstruct
from model.registry import MASKS
from model.weights.models import load_adamae
from model.weights.pretrained import find_file, run_of, trained_rate
from pipeline.config import DataConfig
from training.checkpoint import list_checkpoints, parse_step
from training.remote_run import local_run

COMPARISON_WIDTH = 1000  # pixels: these figures have many rows


def visualize(options: argparse.Namespace) -> None:
    run = local_run(options.run)
    changes = {} if options.mask_ratio is None else {"mask_ratio": options.mask_ratio}
    model = load_adamae(run, **changes)
    config = model.config
    comparisons: dict[str, list[tuple[str, AdaMAE]]] = {}  # models by name, by the ending of the figures' names
    if options.strategies:
        comparisons[".strategies"] = list(with_every_strategy(model))
    if options.checkpoints:
        folders = list_checkpoints(run / "checkpoints")
        if not folders:
            raise InputError(f"no checkpoints/ in {run}: --checkpoints needs a run directory")
        comparisons[".checkpoints"] = [
            (f"step {parse_step(folder.name)}", load_adamae(folder, **changes)) for folder in folders
        ]
    if options.compare:
        others = [(Path(path).name, load_adamae(local_run(path), **changes)) for path in options.compare]
        comparisons[".runs"] = [(Path(options.run).name, model), *others]
        for name, other in others:
            if (other.config.num_frames, other.config.frame_size) != (config.num_frames, config.frame_size):
                raise InputError(f"{name} takes clips of another shape than {run}: they cannot be compared")

    # Neither in a checkpoint's directory, which is deleted when there are newer ones, nor in a cache.
    folder = (run_of(find_file(run)) or run) if Path(options.run).exists() else Path()
    output = options.output or (folder if folder.is_dir() else Path()) / "figures"
    output.mkdir(parents=True, exist_ok=True)
    rate = {"frame_stride": options.frame_stride} if options.frame_stride else trained_rate(run)
    clips = read_clips(options.videos, config.num_frames, config.image_size, DataConfig(**rate), options.clips)
    for clip in progress_bar(clips, unit="clip", desc="figures"):
        rows = [*make_rows(reconstruct(model, clip.frames[None], options.seed), clip.title).values()]
        save_image(render_figure(rows, config, clip.times), output / f"{clip.name}.png")
        save_animation(render_animation(rows), output / f"{clip.name}.gif")
        for ending, models in comparisons.items():  # with the same noise
            rows = comparison_rows(
                ((name, reconstruct(other, clip.frames[None], options.seed)) for name, other in models), clip.title
            )
            save_image(render_figure(rows, config, clip.times, COMPARISON_WIDTH), output / f"{clip.name}{ending}.png")
    log(f"wrote a PNG and a GIF of each video to {output}")


def with_every_strategy(model: AdaMAE) -> Iterator[tuple[str, AdaMAE]]:
    """Yield the model with each masking strategy that it can have, at its own ratio."""
    ratio, grid = model.config.mask_ratio, model.config.grid
    for masking in MASKS:
        # Of frames, at least one token frame has to stay.
        possible = min(ratio, 1 - 1 / grid[0]) if masking == "frame" else ratio
        with suppress(InputError):  # no sampler was trained, or there is no motion in one token frame
            yield masking, model.with_masking(masking=masking, mask_ratio=possible)


if __name__ == "__main__":
    run_command(lambda: visualize(OPTIONS))
