"""See what the model will be fed: `python preview.py SHARDS [--output FOLDER] [data.flip=false ...]`.

Writes FOLDER/preview.png, a row of source frames and a row of clip frames for every clip, and FOLDER/preview.gif, the
same in motion. The clips come out of the loader that trains; start frame, crop and flip are drawn on the source.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from jsonargparse import Namespace
from PIL import Image, ImageDraw

from common.atomic_io import atomic_write
from common.config_parser import ConfigParser
from common.errors import InputError, run_command
from common.logging import log, printable
from pipeline.config import DataConfig
from pipeline.decoding.video import VideoError, decode_frames
from pipeline.loader import ClipLoader
from pipeline.planning.plan import PlanRow, TrainingPlan
from pipeline.reading.reader import Reader
from pipeline.shards import arrays
from pipeline.shards.dataset import ShardDataset

CELL = 160  # pixels in width of a frame on the sheet, at least
GAP, HEAD = 2, 16  # between frames, and for a caption
COLUMNS = 8  # of the sheet: a clip's frames are thinned to as many
BOX, INK, PAPER = (255, 64, 32), (40, 40, 40), (250, 250, 250)


def main() -> None:
    options = parse(sys.argv[1:])
    config = options.data
    dataset = ShardDataset.open(config)
    plan = TrainingPlan(
        dataset, config, num_frames=options.num_frames, image_size=options.image_size, seed=options.seed,
        batch_size=options.num_clips * config.repeats,
    )  # fmt: skip
    with ClipLoader(dataset, plan, torch.device("cpu"), config, None) as loader:
        batch = next(loader.batches(options.first))
    rows = plan.batch(options.first)
    for row, key in zip(rows, batch.keys, strict=True):
        if dataset.samples[row.sample].key != key:
            raise InputError(f"{dataset.where(row.sample)} cannot be decoded: check the shards before looking at them")
    reader = Reader(dataset)
    strips = [strip(reader, dataset, row, clip.numpy()) for row, clip in zip(rows, batch.clip, strict=True)]
    options.output.mkdir(parents=True, exist_ok=True)
    with atomic_write(options.output / "preview.png") as aside:
        sheet(strips).save(aside, format="PNG")
    with atomic_write(options.output / "preview.gif") as aside:
        first, *others = [column(strips, time) for time in range(options.num_frames)]
        first.save(aside, format="GIF", save_all=True, append_images=others, duration=133, loop=0)
    log(f"{options.output}/preview.png and preview.gif: {len(rows)} clips of batch {options.first}")


def parse(arguments: list[str]) -> Namespace:
    parser = ConfigParser(
        "python preview.py",
        "python preview.py SHARDS [option ...] [data.key=value ...]",
        __doc__ or "",
    )
    parser.add_argument("shards", type=str, help="dataset folder or URL")
    parser.add_argument("--output", type=Path, default=Path("preview"), help="folder for the pictures")
    parser.add_argument("--num-clips", type=int, default=4, help="clips shown")
    parser.add_argument("--num-frames", type=int, default=16, help="frames of a clip")
    parser.add_argument("--image-size", type=int, default=224, help="height and width of a clip, pixels")
    parser.add_argument("--seed", type=int, default=0, help="of the plan")
    parser.add_argument("--first", type=int, default=0, help="batch of the plan")
    parser.add_settings(DataConfig, "data", skip={"shards", "weights"})
    options = parser.parse(arguments)
    for name in ("num_clips", "num_frames", "image_size"):
        if options[name] < 1:
            raise InputError(f"--{name.replace('_', '-')} is {options[name]}: give a whole number of at least 1")
    options.data = replace(options.data, shards=options.shards)
    return options


Strip = tuple[str, list[Image.Image], list[Image.Image]]  # caption, source frames, clip frames


def strip(reader: Reader, dataset: ShardDataset, row: PlanRow, clip: UInt8[np.ndarray, "T S S 3"]) -> Strip:
    """Source frames with the crop drawn on them, and the clip's frames."""
    sample = dataset.samples[row.sample]
    try:
        frames = decode_frames(reader.read(row.sample), row.frames, sample.num_frames)
    except VideoError as error:
        said = f"{dataset.where(row.sample)} cannot be shown: {error}; run `python shard_tools/check_shards.py` on it"
        raise InputError(said) from error
    caption = (
        f"{printable(sample.key)}: frames {row.frames[0]} to {row.frames[-1]} of {sample.num_frames}, "
        f"crop {row.crop.width}x{row.crop.height} at ({row.crop.x}, {row.crop.y}) of {sample.width}x{sample.height}"
        f"{', flipped' * row.flip}"
    )
    x, y, width, height = row.crop
    line = max(2, round(max(sample.width, sample.height) / CELL))  # still there when the frame is made smaller
    sources = [Image.fromarray(frame) for frame in arrays.to_rgb(frames)]
    for source in sources:
        ImageDraw.Draw(source).rectangle((x, y, x + width - 1, y + height - 1), outline=BOX, width=line)
    return caption, sources, [Image.fromarray(frame) for frame in arrays.to_rgb(clip)]


def sheet(strips: list[Strip]) -> Image.Image:
    """All clips below each other, time from left to right."""
    return stacked([(caption, [thinned(sources), thinned(clip)]) for caption, sources, clip in strips])


def column(strips: list[Strip], time: int) -> Image.Image:
    """All clips below each other, at one moment: the source and, beside it, the clip."""
    return stacked([(caption, [[sources[time], clip[time]]]) for caption, sources, clip in strips])


def thinned(frames: list[Image.Image]) -> list[Image.Image]:
    return [frames[place * len(frames) // COLUMNS] for place in range(COLUMNS)] if len(frames) > COLUMNS else frames


def stacked(strips: list[tuple[str, list[list[Image.Image]]]]) -> Image.Image:
    """Captions with lines of pictures below, each of which is as wide as the sheet."""
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    captions = max(round(measure.textlength(caption)) for caption, _ in strips)
    width = max(captions + 4, max(len(line) for _, lines in strips for line in lines) * (CELL + GAP))
    parts: list[str | list[Image.Image]] = []
    for caption, lines in strips:
        parts += [caption, *(filling(line, width) for line in lines)]
    heights = [HEAD if isinstance(part, str) else part[0].height + GAP for part in parts]
    canvas = Image.new("RGB", (width, sum(heights)), PAPER)
    y = 0
    for part, height in zip(parts, heights, strict=True):
        if isinstance(part, str):
            ImageDraw.Draw(canvas).text((2, y + 2), part, INK)
        else:
            x = 0
            for picture in part:
                canvas.paste(picture, (x, y))
                x += picture.width + GAP
        y += height
    return canvas


def filling(line: list[Image.Image], width: int) -> list[Image.Image]:
    """The pictures, all of one height, with which they fill a line of this width."""
    shapes = [picture.width / picture.height for picture in line]
    height = (width - GAP * len(line)) / sum(shapes)
    return [
        picture.resize((max(1, round(height * shape)), max(1, round(height))))
        for picture, shape in zip(line, shapes, strict=True)
    ]


if __name__ == "__main__":
    run_command(main)
