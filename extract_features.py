"""Extract features along videos: `python extract_features.py INPUT OUT --model RUN [--stride 8]`.

INPUT is a dataset of shards, or the folder with train/ and validation/, or what make_shards.py
takes: a video, a folder, a list, tars, with all subsets. Windows of --window frames slide over each
video by --stride frames; both count sampled frames, which are --frame-stride source frames apart
or, with --fps, 1/fps seconds. A window has the center crop; a video that is shorter than one
repeats its last frame, and what is left after the last whole window is not covered. With --pad,
windows end at the first frame and at every --stride-th after it, and see nothing later: the first
frame is repeated before them; --pad --stride 1 is a vector a frame.

Each video, segment or episode gets a file, OUT/<its path in INPUT>.safetensors, with the tensors
`features` [W, D] fp32, means over the tokens of each window; `frames` [W, 2] int64 and `times` [W,
2] fp64, of its first and last frame: source frames since the first one of the video, segment or
episode, and seconds in the source, where that begins at `offset`; and with --tokens `tokens` [W, t,
h, w, D] fp16. The metadata are its key, source, segment, episode, offset, label, `fields` (what
else a list says of it, as JSON) and `incomplete`: why the rest of a damaged video is missing. With
--format parquet, files have a row per window, with the metadata, `first_frame`, `last_frame`,
`start` and `end` (seconds) as columns. With --format webdataset, OUT has tars of up to 1,000
videos, each with its arrays as .npy and its metadata as .json. What is there already is skipped.
"""

import argparse
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between, parse_part
from adamae.common.errors import InputError, parse_early, run_command


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("input", metavar="INPUT", help="shards, videos, or a list of videos")
    add("output", metavar="OUT", type=Path, help="folder for the features")
    add(
        "--model",
        required=True,
        help="run, checkpoint, export, another project's file, or hf://user/name",
    )
    add("--window", type=between(1), metavar="T", help="frames per window; default: as trained")
    add(
        "--stride",
        type=between(1),
        metavar="N",
        help="frames from window to window; default: a whole window",
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--frame-stride",
        type=between(1),
        metavar="N",
        help="source frames; default: the run's, else 4",
    )
    rate.add_argument(
        "--fps", type=between(1, kind=float), help="sampled frames per second; some may repeat"
    )
    add(
        "--pad",
        action="store_true",
        help="windows end at the first frame and at every --stride-th after it",
    )
    add(
        "--image-size",
        type=int,
        nargs="+",
        metavar="PIXELS",
        help="side of a clip, or height and width; as trained",
    )
    add(
        "--batch-size",
        type=between(1),
        default=8,
        metavar="B",
        help="windows per forward pass (default 8)",
    )
    add(
        "--keep",
        type=float,
        default=1.0,
        metavar="FRACTION",
        help="encode only what the token sampler selects",
    )
    add("--tokens", action="store_true", help="also the features of every token, in fp16")
    add(
        "--format",
        choices=("safetensors", "parquet", "webdataset"),
        default="safetensors",
        help="a file per video, or tars of many (default safetensors)",
    )
    add(
        "--part",
        type=parse_part,
        default=(1, 1),
        metavar="I/N",
        help="only every Nth video, from the Ith: one per GPU",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    options = parser.parse_args(arguments)
    if options.tokens and options.format == "parquet":
        raise InputError(
            "--format parquet is for features alone: choose safetensors or webdataset with --tokens"
        )
    if options.tokens and options.keep != 1:
        reason = "--tokens writes the whole grid of tokens, of which --keep encodes a fraction"
        raise InputError(f"{reason}: leave out one")
    return options


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8

from adamae.common.atomic_io import write_json
from adamae.common.devices import choose_device, explain_out_of_memory
from adamae.common.logging import log, printable
from adamae.common.progress import progress_bar
from adamae.model.encoder import VideoEncoder
from adamae.model.weights.find_weights import find_file
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.read_config import trained_rate
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning.crops import FrameSize
from adamae.training.feature_files import FeatureWriter, WindowArrays, open_writer
from adamae.training.remote_run import local_run
from adamae.training.video_windows import ListedVideo, Window, WindowReader

T = TypeVar("T")


@explain_out_of_memory("lower --batch-size")
def main(options: argparse.Namespace) -> int:
    device = choose_device(options.device)
    part, num_parts = options.part
    # Raises here if a package is missing.
    writer = open_writer(options.format, options.output, part, num_parts)
    model = local_run(options.model)
    changes = {}
    if options.window:
        changes["num_frames"] = options.window
    if options.image_size:
        changes["image_size"] = options.image_size
    encoder = load_encoder(model, **changes).to(device)
    length = encoder.config.num_frames
    size = FrameSize.of(encoder.config.image_size)
    if options.keep != 1:
        # Raises here, rather than after minutes of listing videos, if the model cannot select
        # tokens.
        encode(encoder, np.zeros((1, length, *size, encoder.config.in_channels), np.uint8), options)
    data = choose_rate(options, model)
    reader = WindowReader(data, size, length, options.stride or length, options.pad)
    # Raises here if there are none.
    videos = list(islice(reader.list_videos(options.input), part - 1, None, num_parts))
    settings = {
        "model": str(find_file(model).resolve()),
        "stride": reader.stride,
        "frame_stride": data.frame_stride,
        "fps": data.fps,
        "pad": options.pad,
        "keep": options.keep,
        "tokens": options.tokens,
        "format": options.format,
        **changes,
    }
    write_settings(options.output, settings)
    with writer:
        missing = [video for video in videos if not writer.has(video)]
        num_incomplete = write_features(missing, reader, encoder, writer, options)
    num_written = len(missing) - num_incomplete
    line = f"wrote features of {num_written} videos to {options.output}"
    log(f"{line}, {num_incomplete} could not be read wholly")
    return 1 if num_incomplete else 0


def choose_rate(options: argparse.Namespace, model: Path) -> DataConfig:
    """Return the frame rate or stride that the options set, or else the model's in training."""
    if options.frame_stride or options.fps:
        return DataConfig(frame_stride=options.frame_stride, fps=options.fps)
    return DataConfig(**trained_rate(model))


def write_settings(output: Path, settings: dict[str, Any]) -> None:
    """Write features.json; raise InputError if OUT was begun with other settings."""
    file = output / "features.json"
    if not file.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_json(file, settings)
        return
    # Nothing in the files of features says which settings they were made with.
    before = json.loads(file.read_text(encoding="utf-8"))
    if before != settings:
        names = settings | before
        changed = ", ".join(name for name in names if before.get(name) != settings.get(name))
        raise InputError(
            f"{output} has features made with another {changed}: choose another OUT, or remove it"
        )


def take_batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, and the rest."""
    while batch := list(islice(items, size)):
        yield batch


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield items; a thread makes the next one, so videos are decoded during the forward pass."""
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = pool.submit(next, items, None)
            yield item


def write_features(
    videos: list[ListedVideo],
    reader: WindowReader,
    encoder: VideoEncoder,
    writer: FeatureWriter,
    options: argparse.Namespace,
) -> int:
    """Encode and write the windows of all videos; return how many could not be read to the end."""
    num_incomplete = 0
    windows = chain.from_iterable(map(reader.read_windows, videos))
    # Of the current video: a batch may begin with the last windows of one and hold the first of the
    # next.
    arrays = WindowArrays()
    with progress_bar(unit="video", total=len(videos)) as progress:
        for batch in prefetch(take_batches(windows, options.batch_size)):
            encoded = encode_windows(
                encoder, [window for window in batch if window.frames], options
            )
            row = 0
            for video, frames in batch:
                if frames:
                    arrays.append({name: values[row] for name, values in encoded.items()})
                    row += 1
                    continue
                # A window without frames marks the end of its video.
                if video.incomplete:
                    num_incomplete += 1
                    name = printable(video.source)
                    log(f"{name} is incomplete: {video.incomplete}", sys.stderr)
                if len(arrays):
                    writer.write(video, arrays.stack())
                arrays = WindowArrays()
                progress.update()
    return num_incomplete


def encode_windows(
    encoder: VideoEncoder, windows: list[Window], options: argparse.Namespace
) -> dict[str, np.ndarray]:
    """Return the arrays that are written of these windows, each with a row per window."""
    if not windows:
        return {}
    arrays = encode(encoder, np.stack([stack_images(window) for window in windows]), options)
    ends = [(window.frames[0], window.frames[-1]) for window in windows]
    arrays["frames"] = np.array([(first.number, last.number) for first, last in ends])
    arrays["times"] = np.array([(first.time, last.time) for first, last in ends])
    return arrays


def stack_images(window: Window) -> UInt8[np.ndarray, "T H W C"]:
    return np.stack([frame.image for frame in window.frames])


@torch.no_grad()
def encode(
    encoder: VideoEncoder, clips: UInt8[np.ndarray, "B T H W C"], options: argparse.Namespace
) -> dict[str, np.ndarray]:
    """Return features fp32 [B, D] of clips and, with --tokens, tokens fp16 [B, t, h, w, D]."""
    device = next(encoder.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        features = encoder.encode(torch.from_numpy(clips).to(device), options.keep)
    arrays = {"features": features.pooled.float().cpu().numpy()}
    if options.tokens:
        arrays["tokens"] = features.tokens.half().unflatten(1, encoder.config.grid).cpu().numpy()
    return arrays


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS), resumable=True)
