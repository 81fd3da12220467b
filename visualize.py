"""Visualize reconstructions: `python visualize.py RUN VIDEO... [--output FOLDER]`.

Writes the paper's figure for each video (frames, reconstruction, error, sampling probability, mask)
as PNG and GIF, with the principal components of the encoder's features of the whole clip as colors;
of four videos or more, less what the features of a position have in common in all of them.
A VIDEO is a file, a folder or a list of videos, a tar, or a folder of shards; RUN is a run
directory, one of its checkpoints, or any file of weights that training can start from.
"""

import argparse
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.locations import local_path


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory (or its URL), checkpoint or file of weights")
    add("videos", metavar="VIDEO", nargs="+", help="video, folder or list of videos, tar, shards")
    add(
        "--output",
        type=local_path,
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


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

from adamae.common.atomic_io import make_output_folder
from adamae.common.commands import command_line, log_next
from adamae.common.logging import format_count, log
from adamae.common.progress import progress_bar
from adamae.figures.clips import read_clips
from adamae.figures.reconstruction import (
    average_positions,
    comparison_rows,
    make_rows,
    render_figure,
)
from adamae.figures.sheet import render_animation, save_animation, save_image
from adamae.model.adamae import AdaMAE
from adamae.model.load_adamae import load_adamae
from adamae.model.maps import reconstruct
from adamae.model.weights.find_weights import find_file, run_of
from adamae.model.weights.read_config import trained_rate
from adamae.pipeline.config import DataConfig
from adamae.training.remote_run import local_run

# In pixels; less than other figures have, as these have many rows.
COMPARISON_WIDTH = 1000


def visualize(options: argparse.Namespace) -> None:
    run = local_run(options.run)
    model, *compared_models = load_models(run, options)
    names = [Path(path).name for path in (options.run, *options.compare)]
    config = model.config
    output = options.output or choose_folder(run, options.run) / "figures"
    rate = {"frame_stride": options.frame_stride} if options.frame_stride else trained_rate(run)
    source = read_clips(
        options.videos, config.num_frames, config.image_size, DataConfig(**rate), options.clips
    )
    # All are kept, 10 MB each at ViT-Base: what they have in common is subtracted from each.
    clips = []
    clip_maps = []
    for clip in progress_bar(source, unit="clip", desc="reconstructions"):
        clips.append(clip)
        # One seed for all models: those that mask at random mask the same tokens.
        clip_maps.append(reconstruct(model, clip.frames[None], options.seed))
    if not clips:
        raise InputError("none of these videos can be decoded: nothing was written")
    position_means = average_positions(clip_maps)
    make_output_folder(output)
    pairs = zip(clips, clip_maps, strict=True)
    for clip, maps in progress_bar(pairs, unit="clip", desc="figures", total=len(clips)):
        frames = clip.frames[None]
        rows = list(make_rows(maps, clip.title, position_means).values())
        save_image(render_figure(rows, config, clip.times), output / f"{clip.name}.png")
        save_animation(render_animation(rows), output / f"{clip.name}.gif")
        if compared_models:
            all_maps = [maps]
            all_maps += [reconstruct(other, frames, options.seed) for other in compared_models]
            rows = comparison_rows(zip(names, all_maps, strict=True), clip.title)
            figure = render_figure(rows, config, clip.times, COMPARISON_WIDTH)
            save_image(figure, output / f"{clip.name}.runs.png")
    log(f"wrote a PNG and a GIF for {format_count(len(clips), 'video')} to {output}")
    features = choose_folder(run, options.run) / "features"
    advice = command_line("features", options.videos[0], features, "--model", options.run)
    log_next(advice)


def load_models(run: Path, options: argparse.Namespace) -> list[AdaMAE]:
    """Load the run's model, and those of --compare; raise InputError if they take other clips."""
    changes = {} if options.mask_ratio is None else {"mask_ratio": options.mask_ratio}
    models = [load_adamae(run, **changes)]
    shape = clip_shape(models[0])
    for path in options.compare:
        models.append(load_adamae(local_run(path), **changes))
        if clip_shape(models[-1]) != shape:
            raise InputError(
                f"{path} takes clips of another shape than {run}: they cannot be compared"
            )
    return models


def clip_shape(model: AdaMAE) -> tuple[int, ...]:
    """Return the frames, height and width of a model's clips."""
    return model.config.num_frames, *model.config.frame_size


def choose_folder(run: Path, name: str) -> Path:
    """Return the run directory, or the current one for a URL or for weights without a run."""
    # The copy of a URL lies in a cache, where nobody looks.
    if not Path(name).exists():
        return Path()
    # Not a checkpoint's own directory: it is deleted when there are newer checkpoints.
    folder = run_of(find_file(run)) or run
    return folder if folder.is_dir() else Path()


if __name__ == "__main__":
    run_command(lambda: visualize(OPTIONS))
