"""Show the exact model inputs of a run.

    python preview.py SHARDS [--config FILE] [section.key=value ...]

Writes FOLDER/preview.png, for every clip a row of source frames with the crop drawn on them and a
row of what the model sees: frames, or with model.differences their differences. FOLDER/preview.gif
is the same as a video. The clips come from the loader that training uses; --config may be the
config.yaml of a run.
"""

import argparse
import sys
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.locations import local_path
from adamae.training.config import parse


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("shards", metavar="SHARDS", help="dataset folder or URL")
    add("overrides", nargs="*", metavar="section.key=value", help="such as model.image_size=112")
    add("--config", metavar="FILE", help="config of the run")
    add("--output", type=local_path, default=Path("preview"), help="output folder")
    add("--num-clips", type=between(1), default=4, help="number of clips")
    add("--first", type=int, default=0, help="number of the batch to show")
    options = parser.parse_intermixed_args(arguments)
    options.config_file = options.config
    file = ["--config", options.config] if options.config else []
    # SHARDS is a single dataset, which the weights of a run's several datasets would not fit.
    options.config = parse(
        [*file, f"data.shards={options.shards}", "data.weights=null", *options.overrides]
    )
    return options


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import UInt8

from adamae.common.atomic_io import make_output_folder
from adamae.common.commands import command_line, log_next
from adamae.common.logging import format_count, log
from adamae.figures.clips import describe_sample
from adamae.figures.sheet import (
    Layout,
    Row,
    render_animation,
    render_sheet,
    save_animation,
    save_image,
)
from adamae.model.channels import Clip, check_channels, prepare_clip
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.crops import Crop
from adamae.pipeline.planning.plan import PlanRow, TrainingPlan
from adamae.pipeline.shards.arrays import to_rgb
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.video_error import VideoError
from adamae.training.startup_warnings import warn_of_videos

# Frames of a clip in preview.png; the animation shows all of them.
MAX_COLUMNS = 8
BOX_COLOR = (255, 64, 32)


def main(options: argparse.Namespace) -> None:
    config = options.config.data
    num_frames = options.config.model.num_frames
    dataset = ShardDataset.open(config)
    plan = TrainingPlan(
        dataset,
        config,
        num_frames=num_frames,
        image_size=options.config.model.image_size,
        seed=options.config.seed,
        batch_size=options.num_clips * config.repeats,
    )
    for warning in warn_of_videos(dataset, config, num_frames):
        log(warning, sys.stderr)
    with ClipLoader(dataset, plan, torch.device("cpu"), config, quarantine=None) as loader:
        batch = next(loader.batches(options.first))
    check_channels(batch.clip.shape[-1], options.config.model.in_channels)
    clips = prepare_clip(batch.clip, options.config.model)
    rows = make_rows(dataset, plan.batch(options.first), clips)

    make_output_folder(options.output)
    num_columns = min(MAX_COLUMNS, num_frames)
    # Evenly spread: the first frames of 16 in 8 columns are 0, 2 and 4.
    frames = [column * num_frames // num_columns for column in range(num_columns)]
    sheet = render_sheet(rows, frames, Layout.fit(rows, num_columns))
    save_image(sheet, options.output / "preview.png")
    save_animation(render_animation(rows), options.output / "preview.gif")
    content = f"{format_count(len(batch.clip), 'clip')} of batch {options.first}"
    log(f"wrote {options.output}/preview.png and preview.gif: {content}")
    file = ["--config", options.config_file] if options.config_file else []
    log_next(command_line("doctor", options.shards, *file, *options.overrides))


def make_rows(dataset: ShardDataset, plan_rows: Sequence[PlanRow], clips: Clip) -> list[Row]:
    """Return two rows per clip: source frames with the crop drawn on them, and what the model sees.

    Raise InputError if a video cannot be decoded.
    """
    rows = []
    for row, clip in zip(plan_rows, clips, strict=True):
        sample = dataset.samples[row.sample]
        try:
            content = dataset.read_video(row.sample)
            frames = decode_frames(content, row.frames, sample.num_frames)
        except VideoError as error:
            location = dataset.describe_location(row.sample)
            advice = "run `python shard_tools/check_shards.py`"
            raise InputError(f"{location} cannot be decoded: {error}; {advice}") from error
        # A copy: the frames of an array are its file's, which is mapped read-only.
        marked_frames = to_rgb(frames).copy()
        draw_crop(marked_frames, row.crop)
        frame_range = f"frames {row.frames[0]} to {row.frames[-1]} of {sample.num_frames}"
        size = f"{sample.width}×{sample.height}"
        label = f"{describe_sample(dataset, sample)}\n{frame_range}\n{size}"
        rows.append(Row(label, marked_frames))
        x, y, width, height = row.crop
        flipped = ", flipped" if row.flip else ""
        label = f"crop {width}×{height}\nat ({x}, {y}){flipped}"
        rows.append(Row(label, to_rgb(clip.numpy())))
    return rows


def draw_crop(frames: UInt8[np.ndarray, "T H W 3"], crop: Crop) -> None:
    """Draw a crop's border into the frames."""
    x, y, width, height = crop
    # Wide enough to be visible where large frames are scaled down.
    line = max(2, round(max(frames.shape[1:3]) / 160))
    box = frames[:, y : y + height, x : x + width]
    box[:, :line] = BOX_COLOR
    box[:, -line:] = BOX_COLOR
    box[:, :, :line] = BOX_COLOR
    box[:, :, -line:] = BOX_COLOR


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS))
