"""Show the exact model inputs: `python preview.py SHARDS [--output FOLDER] [data.flip=false ...]`.

Writes FOLDER/preview.png, for every clip a row of source frames with the crop drawn on them and a row of clip frames,
and FOLDER/preview.gif, the same as a video. The clips come from the loader that training uses.
"""

from dataclasses import replace
from pathlib import Path

from jsonargparse import Namespace

from common.config_parser import ConfigParser
from common.errors import InputError, parse_early, run_command
from pipeline.config import DataConfig


def parse_arguments(arguments: list[str]) -> Namespace:
    parser = ConfigParser(
        "python preview.py", "python preview.py SHARDS [option ...] [data.key=value ...]", __doc__ or ""
    )
    parser.add_argument("shards", type=str, help="dataset folder or URL")
    parser.add_argument("--output", type=Path, default=Path("preview"), help="output folder")
    parser.add_argument("--num-clips", type=int, default=4, help="number of clips")
    parser.add_argument("--num-frames", type=int, default=16, help="frames per clip")
    parser.add_argument("--image-size", type=int, default=224, help="height and width of clips in pixels")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data order")
    parser.add_argument("--first", type=int, default=0, help="number of the batch to show")
    parser.add_settings(DataConfig, "data", skip={"shards", "weights"})
    options = parser.parse(arguments)
    for name in ("num_clips", "num_frames", "image_size"):
        if options[name] < 1:
            raise InputError(f"--{name.replace('_', '-')} is {options[name]}: must be at least 1")
    options.data = replace(options.data, shards=options.shards)
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw

from common.atomic_io import atomic_write
from common.logging import log, printable
from pipeline.decoding.sources import decode_frames
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.plan import PlanRow, TrainingPlan
from pipeline.reading.reader import Reader
from pipeline.shards import arrays
from pipeline.shards.dataset import ShardDataset
from pipeline.video_error import VideoError

HEIGHT, GAP, CAPTION = 128, 2, 16  # pixels: of a frame, between frames, of a line of text
COLUMNS = 8  # frames of a clip that the sheet shows
BOX_COLOR, TEXT_COLOR, BACKGROUND = (255, 64, 32), (40, 40, 40), (250, 250, 250)
FRAME_MS = 133  # of the GIF


class Preview(NamedTuple):
    """A clip and where it comes from."""

    caption: str
    sources: list[Image.Image]  # whole frames with the crop drawn on them
    frames: list[Image.Image]


def main(options: Namespace) -> None:
    config = options.data
    dataset = ShardDataset.open(config)
    plan = TrainingPlan(
        dataset, config, num_frames=options.num_frames, image_size=options.image_size, seed=options.seed,
        batch_size=options.num_clips * config.repeats,
    )  # fmt: skip
    with ClipLoader(dataset, plan, torch.device("cpu"), config, quarantine=None) as loader:
        batch = next(loader.batches(options.first))
    previews = make_previews(dataset, plan.batch(options.first), batch)

    options.output.mkdir(parents=True, exist_ok=True)
    columns = [place * options.num_frames // COLUMNS for place in range(COLUMNS)]
    columns = columns if options.num_frames > COLUMNS else list(range(options.num_frames))
    lines: list[str | list[Image.Image]] = []
    for preview in previews:
        lines += [preview.caption, *([images[time] for time in columns] for images in preview[1:])]
    with atomic_write(options.output / "preview.png") as temporary:
        make_sheet(lines).save(temporary, format="PNG")
    moments = []
    for time in range(options.num_frames):
        lines = []
        for preview in previews:
            lines += [preview.caption, [preview.sources[time], preview.frames[time]]]
        moments.append(make_sheet(lines))
    with atomic_write(options.output / "preview.gif") as temporary:
        moments[0].save(temporary, format="GIF", save_all=True, append_images=moments[1:], duration=FRAME_MS, loop=0)
    log(f"wrote {options.output}/preview.png and preview.gif: {len(previews)} clips of batch {options.first}")


def make_previews(dataset: ShardDataset, rows: Sequence[PlanRow], batch: Batch) -> list[Preview]:
    """Pair each clip with its source frames. Raise InputError if a video cannot be decoded."""
    reader = Reader(dataset)
    previews = []
    for row, clip in zip(rows, batch.clip, strict=True):
        sample = dataset.samples[row.sample]
        try:
            frames = decode_frames(reader.read(row.sample), row.frames, sample.num_frames)
        except VideoError as error:
            raise InputError(
                f"{dataset.where(row.sample)} cannot be decoded: {error}; run `python shard_tools/check_shards.py`"
            ) from error
        x, y, width, height = row.crop
        line = max(2, round(max(sample.width, sample.height) / 160))  # still visible when scaled down
        sources = [Image.fromarray(frame) for frame in arrays.to_rgb(frames)]
        for source in sources:
            ImageDraw.Draw(source).rectangle((x, y, x + width - 1, y + height - 1), outline=BOX_COLOR, width=line)
        caption = (
            f"{printable(sample.key)}: frames {row.frames[0]} to {row.frames[-1]} of {sample.num_frames}, "
            f"crop {width}x{height} at ({x}, {y}) of {sample.width}x{sample.height}{', flipped' * row.flip}"
        )
        previews.append(Preview(caption, sources, [Image.fromarray(frame) for frame in arrays.to_rgb(clip.numpy())]))
    return previews


def make_sheet(lines: Sequence[str | Sequence[Image.Image]]) -> Image.Image:
    """Draw captions and rows of images, all of one height, below each other."""
    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    drawn: list[str | list[Image.Image]] = [
        line if isinstance(line, str) else [
            image.resize((max(1, round(HEIGHT * image.width / image.height)), HEIGHT)) for image in line
        ]
        for line in lines
    ]  # fmt: skip
    widths = [
        round(draw.textlength(line)) + 4 if isinstance(line, str) else sum(image.width + GAP for image in line)
        for line in drawn
    ]
    heights = [CAPTION if isinstance(line, str) else HEIGHT + GAP for line in drawn]
    sheet = Image.new("RGB", (max(widths), sum(heights)), BACKGROUND)
    y = 0
    for line, height in zip(drawn, heights, strict=True):
        if isinstance(line, str):
            ImageDraw.Draw(sheet).text((2, y + 2), line, TEXT_COLOR)
        else:
            x = 0
            for image in line:
                sheet.paste(image, (x, y))
                x += image.width + GAP
        y += height
    return sheet


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS))
