"""See what the model will be fed: `python -m pipeline.preview SHARDS [--output FOLDER] [data.flip=false ...]`.

Writes FOLDER/preview.png, a row of source frames and a row of clip frames for every clip, and FOLDER/preview.gif, the
same in motion. The clips come out of the loader that trains; start frame, crop and flip are drawn on the source.
"""

import sys
from argparse import ArgumentError
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from jsonargparse import Namespace
from PIL import Image, ImageDraw

from command_line import add_settings, as_options, config_parser, keys_of, require_known
from durable import write_aside
from errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.dataset import ShardDataset
from pipeline.loader import Loader
from pipeline.plan import Plan, PlanRow
from pipeline.reader import Reader
from pipeline.video import VideoError, decode_frames
from terminal import say, shown

HEIGHT = 112  # of a frame on the sheet, pixels
COLUMNS = 8  # of the sheet: a clip's frames are thinned to as many
BOX, INK, PAPER = (255, 64, 32), (40, 40, 40), (250, 250, 250)


def main() -> None:
    options = parse(sys.argv[1:])
    config = options.data
    dataset = ShardDataset.of(config)
    plan = Plan(
        dataset, config, num_frames=options.num_frames, image_size=options.image_size, seed=options.seed,
        batch_size=options.num_clips * config.repeats,
    )  # fmt: skip
    with Loader(dataset, plan, torch.device("cpu"), config, None) as loader:
        batch = next(loader.batches(options.first))
    rows = plan.batch(options.first)
    for row, key in zip(rows, batch.keys, strict=True):
        if dataset.samples[row.sample].key != key:
            raise InputError(f"{dataset.where(row.sample)} cannot be decoded: check the shards before looking at them")
    reader = Reader(dataset)
    strips = [
        strip(reader, dataset, row, clip.permute(1, 2, 3, 0).numpy())
        for row, clip in zip(rows, batch.clip, strict=True)
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    with write_aside(options.output / "preview.png") as aside:
        sheet(strips).save(aside, format="PNG")
    with write_aside(options.output / "preview.gif") as aside:
        first, *others = [column(strips, time) for time in range(options.num_frames)]
        first.save(aside, format="GIF", save_all=True, append_images=others, duration=133, loop=0)
    say(f"{options.output}/preview.png and preview.gif: {len(rows)} clips of batch {options.first}")


def parse(arguments: list[str]) -> Namespace:
    parser = config_parser(
        "python -m pipeline.preview",
        "python -m pipeline.preview SHARDS [option ...] [data.key=value ...]",
        __doc__ or "",
    )
    parser.add_argument("shards", type=str, help="dataset folder or URL")
    parser.add_argument("--output", type=Path, default=Path("preview"), help="folder for the pictures")
    parser.add_argument("--num-clips", type=int, default=4, help="clips shown")
    parser.add_argument("--num-frames", type=int, default=16, help="frames of a clip")
    parser.add_argument("--image-size", type=int, default=224, help="height and width of a clip, pixels")
    parser.add_argument("--seed", type=int, default=0, help="of the plan")
    parser.add_argument("--first", type=int, default=0, help="batch of the plan")
    add_settings(parser, DataConfig, "data", skip={"shards", "weights"})
    options = as_options(arguments)
    require_known(parser, [name.replace("-", "_") for name in keys_of(options)])
    try:
        options = parser.parse_args(options)
    except ArgumentError as error:
        raise InputError(" ".join(str(error).split())) from error
    for name in ("num_clips", "num_frames", "image_size"):
        if options[name] < 1:
            raise InputError(f"--{name.replace('_', '-')} is {options[name]}: give a whole number of at least 1")
    options.data = DataConfig(shards=options.shards, **options.data.as_dict())
    return options


Strip = tuple[str, list[Image.Image], list[Image.Image]]  # caption, source frames, clip frames


def strip(reader: Reader, dataset: ShardDataset, row: PlanRow, clip: UInt8[np.ndarray, "T S S 3"]) -> Strip:
    """Source frames with the crop drawn on them, and the clip's frames, all HEIGHT pixels high."""
    sample = dataset.samples[row.sample]
    try:
        frames = decode_frames(reader.read(row.sample), row.frames, sample.num_frames)
    except VideoError as error:
        said = f"{dataset.where(row.sample)} cannot be shown: {error}; run `python shard_tools/check_shards.py` on it"
        raise InputError(said) from error
    caption = (
        f"{shown(sample.key)}: frames {row.frames[0]} to {row.frames[-1]} of {sample.num_frames}, "
        f"crop {row.crop.width}x{row.crop.height} at ({row.crop.x}, {row.crop.y}) of {sample.width}x{sample.height}"
        f"{', flipped' * row.flip}"
    )
    scale = HEIGHT / sample.height
    x, y, width, height = (round(side * scale) for side in row.crop)
    sources = [Image.fromarray(frame).resize((round(sample.width * scale), HEIGHT)) for frame in frames]
    for source in sources:
        ImageDraw.Draw(source).rectangle((x, y, x + width - 1, y + height - 1), outline=BOX, width=2)
    return caption, sources, [Image.fromarray(frame).resize((HEIGHT, HEIGHT)) for frame in clip]


def sheet(strips: list[Strip]) -> Image.Image:
    """All clips below each other, time from left to right."""
    return stacked([(caption, thinned(sources), thinned(clip)) for caption, sources, clip in strips])


def column(strips: list[Strip], time: int) -> Image.Image:
    """All clips below each other, at one moment: the source and, beside it, the clip."""
    return stacked([(caption, [sources[time], clip[time]], []) for caption, sources, clip in strips])


def thinned(frames: list[Image.Image]) -> list[Image.Image]:
    return [frames[place * len(frames) // COLUMNS] for place in range(COLUMNS)] if len(frames) > COLUMNS else frames


def stacked(strips: list[Strip]) -> Image.Image:
    lines = [line for _, upper, lower in strips for line in (upper, lower) if line]
    width = max(sum(frame.width + 2 for frame in line) for line in lines)
    captions = max(round(ImageDraw.Draw(lines[0][0]).textlength(caption)) for caption, _, _ in strips)
    canvas = Image.new("RGB", (max(width, captions + 4), len(lines) * (HEIGHT + 2) + 16 * len(strips)), PAPER)
    y = 0
    for caption, upper, lower in strips:
        ImageDraw.Draw(canvas).text((2, y + 2), caption, INK)
        y += 16
        for line in (upper, lower) if lower else (upper,):
            x = 0
            for frame, above in zip(line, upper, strict=True):
                canvas.paste(frame, (x, y))
                x += above.width + 2
            y += HEIGHT + 2
    return canvas


if __name__ == "__main__":
    run_command(main)
