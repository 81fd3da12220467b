"""Show the exact model inputs of a run: `python preview.py SHARDS [--config FILE] [section.key=value ...]`.

Writes FOLDER/preview.png, for every clip a row of source frames with the crop drawn on them and a row of clip frames,
and FOLDER/preview.gif, the same as a video. The clips come from the loader that training uses; --config may be the
config.yaml of a run.
"""

import argparse
import sys
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between
from adamae.common.errors import InputError, parse_early, run_command
from adamae.training.config import parse


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("shards", metavar="SHARDS", help="dataset folder or URL")
    add("overrides", nargs="*", metavar="section.key=value", help="such as model.image_size=112")
    add("--config", metavar="FILE", help="config of the run")
    add("--output", type=Path, default=Path("preview"), help="output folder")
    add("--num-clips", type=between(1), default=4, help="number of clips")
    add("--first", type=int, default=0, help="number of the batch to show")
    options = parser.parse_intermixed_args(arguments)
    file = ["--config", options.config] if options.config else []
    options.config = parse(
        [*file, f"data.shards={options.shards}", "data.weights=null", *options.overrides]
    )
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

from collections.abc import Sequence

import torch

from adamae.common.logging import log
from adamae.figures.clips import describe_sample
from adamae.figures.sheet import (
    Layout,
    Row,
    render_animation,
    render_sheet,
    save_animation,
    save_image,
)
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.loader import Batch, ClipLoader
from adamae.pipeline.planning.plan import PlanRow, TrainingPlan
from adamae.pipeline.shards.arrays import to_rgb
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.video_error import VideoError
from adamae.training.startup_warnings import warn_of_videos

COLUMNS = 8  # frames of a clip that the image shows
BOX_COLOR = (255, 64, 32)


def main(options: argparse.Namespace) -> None:
    config, num_frames = options.config.data, options.config.model.num_frames
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
    rows = make_rows(dataset, plan.batch(options.first), batch)

    options.output.mkdir(parents=True, exist_ok=True)
    columns = min(COLUMNS, num_frames)
    frames = [column * num_frames // columns for column in range(columns)]
    save_image(
        render_sheet(rows, frames, Layout.fit(rows, columns)), options.output / "preview.png"
    )
    save_animation(render_animation(rows), options.output / "preview.gif")
    log(
        f"wrote {options.output}/preview.png and preview.gif: {len(batch.clip)} clips of batch {options.first}"
    )


def make_rows(dataset: ShardDataset, plan_rows: Sequence[PlanRow], batch: Batch) -> list[Row]:
    """Make two rows per clip: source frames with the crop drawn on them, and the clip. Raise InputError if a video
    cannot be decoded."""
    rows = []
    for row, clip in zip(plan_rows, batch.clip, strict=True):
        sample = dataset.samples[row.sample]
        try:
            frames = to_rgb(
                decode_frames(dataset.read_video(row.sample), row.frames, sample.num_frames)
            ).copy()
        except VideoError as error:
            location = dataset.describe_location(row.sample)
            advice = "run `python shard_tools/check_shards.py`"
            raise InputError(f"{location} cannot be decoded: {error}; {advice}") from error
        x, y, width, height = row.crop
        line = max(
            2, round(max(sample.width, sample.height) / 160)
        )  # still visible when scaled down
        box = frames[:, y : y + height, x : x + width]
        for edge in (box[:, :line], box[:, -line:], box[:, :, :line], box[:, :, -line:]):
            edge[:] = BOX_COLOR
        source_label = (
            f"{describe_sample(dataset, sample)}\nframes {row.frames[0]} to {row.frames[-1]} of {sample.num_frames}\n"
            f"{sample.width}×{sample.height}"
        )
        clip_label = f"crop {width}×{height}\nat ({x}, {y}){', flipped' * row.flip}"
        rows += [Row(source_label, frames), Row(clip_label, to_rgb(clip.numpy()))]
    return rows


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS))
