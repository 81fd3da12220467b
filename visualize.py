"""Visualize reconstructions: `python visualize.py RUN VIDEO... [--output FOLDER]`.

Writes the paper's figure for each video (frames, reconstruction, error, sampling probability, mask) as PNG and GIF,
with the principal components of the encoder's features of the whole clip as colors. A VIDEO is a file, a folder or
a list of videos, a tar, or a folder of shards; RUN is a run directory, one of its checkpoints, or any file of weights
that training can start from.
"""

import argparse
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between
from adamae.common.errors import InputError, parse_early, run_command


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory (or its URL), checkpoint or file of weights")
    add("videos", metavar="VIDEO", nargs="+", help="video, folder or list of videos, tar, shards")
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="default: figures/ in the run directory, or here",
    )
    add("--mask-ratio", type=float, metavar="R", help="default: the run's")
    add(
        "--frame-stride",
        type=between(1),
        metavar="N",
        help="source frame stride; default: the run's",
    )
    add("--clips", type=between(1), default=8, metavar="N", help="videos per folder (default 8)")
    add("--seed", type=int, default=0, help="seed of the masks")
    add(
        "--compare",
        nargs="+",
        action="extend",
        default=[],
        metavar="RUN",
        help="other runs or checkpoints, to compare",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

from adamae.common.logging import log
from adamae.common.progress import progress_bar
from adamae.figures.clips import read_clips
from adamae.figures.reconstruction import comparison_rows, make_rows, render_figure
from adamae.figures.sheet import render_animation, save_animation, save_image
from adamae.model.maps import reconstruct
from adamae.model.weights.find_weights import find_file, run_of
from adamae.model.weights.load_model import load_adamae
from adamae.model.weights.read_config import trained_rate
from adamae.pipeline.config import DataConfig
from adamae.training.remote_run import local_run

COMPARISON_WIDTH = 1000  # pixels: these figures have many rows


def visualize(options: argparse.Namespace) -> None:
    run = local_run(options.run)
    changes = {} if options.mask_ratio is None else {"mask_ratio": options.mask_ratio}
    model = load_adamae(run, **changes)
    config = model.config
    compared = [(Path(options.run).name, model)]
    for path in options.compare:
        other = load_adamae(local_run(path), **changes)
        if (other.config.num_frames, other.config.frame_size) != (
            config.num_frames,
            config.frame_size,
        ):
            raise InputError(
                f"{path} takes clips of another shape than {run}: they cannot be compared"
            )
        compared.append((Path(path).name, other))

    # Neither in a checkpoint's directory, which is deleted when there are newer ones, nor in a cache.
    folder = (run_of(find_file(run)) or run) if Path(options.run).exists() else Path()
    output = options.output or (folder if folder.is_dir() else Path()) / "figures"
    output.mkdir(parents=True, exist_ok=True)
    rate = {"frame_stride": options.frame_stride} if options.frame_stride else trained_rate(run)
    clips = read_clips(
        options.videos, config.num_frames, config.image_size, DataConfig(**rate), options.clips
    )
    for clip in progress_bar(clips, unit="clip", desc="figures"):
        rows = [
            *make_rows(reconstruct(model, clip.frames[None], options.seed), clip.title).values()
        ]
        save_image(render_figure(rows, config, clip.times), output / f"{clip.name}.png")
        save_animation(render_animation(rows), output / f"{clip.name}.gif")
        if options.compare:
            named = (
                (name, reconstruct(other, clip.frames[None], options.seed))
                for name, other in compared
            )
            figure = render_figure(
                comparison_rows(named, clip.title), config, clip.times, COMPARISON_WIDTH
            )
            save_image(figure, output / f"{clip.name}.runs.png")
    log(f"wrote a PNG and a GIF of each video to {output}")


if __name__ == "__main__":
    run_command(lambda: visualize(OPTIONS))
