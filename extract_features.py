"""Extract features along videos: `python extract_features.py INPUT OUT --model RUN [--stride 8]`.

INPUT is a dataset of shards, or the folder with train/ and validation/, or what make_shards.py takes: a video, a
folder, a list, tars. Windows of --window frames slide over each video by --stride frames; both count sampled frames,
which are --frame-stride source frames apart or, with --fps, 1/fps seconds. A window has the center crop; a video that
is shorter than one repeats its last frame, and what is left after the last whole window is not covered. With --pad,
windows end at the first frame and at every --stride-th after it, and see nothing later: the first frame is repeated
before them; --pad --stride 1 is a vector a frame.

Each video, segment or episode gets a file, OUT/<its path in INPUT>.safetensors, with the tensors `features` [W, D]
fp32, means over the tokens of each window; `frames` [W, 2] int64 and `times` [W, 2] fp64, of its first and last frame:
source frames since the first one of the video, segment or episode, and seconds in the source, where that begins at
`offset`; and with --tokens `tokens` [W, t, h, w, D] fp16. The metadata are its key, source, segment, episode, offset,
label, `fields` (what else a list says of it, as JSON) and `incomplete`: why the rest of a damaged video is missing.
With --format parquet, files have a row per window, with the metadata, `first_frame`, `last_frame`, `start` and `end`
(seconds) as columns. With --format webdataset, OUT has tars of up to 1,000 videos, each with its arrays as .npy and its
metadata as .json. What is there already is skipped.
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
        raise InputError(
            "--tokens writes the whole grid of tokens, of which --keep encodes a fraction: leave out one"
        )
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
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
from adamae.training.feature_files import WindowArrays, open_writer
from adamae.training.remote_run import local_run
from adamae.training.video_windows import WindowReader

T = TypeVar("T")


@explain_out_of_memory("lower --batch-size")
def main(options: argparse.Namespace) -> int:
    device = choose_device(options.device)
    part, num_parts = options.part
    # Raises here what is missing.
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
    if options.frame_stride or options.fps:
        data = DataConfig(frame_stride=options.frame_stride, fps=options.fps)
    else:
        data = DataConfig(**trained_rate(model))
    stride = options.stride or length
    if options.keep != 1:
        # Raise here what would be raised after the videos have been listed.
        encode(encoder, np.zeros((1, length, *size, encoder.config.in_channels), np.uint8), options)
    reader = WindowReader(data, size, length, stride, options.pad)
    # Raises here if there are none.
    listed = list(islice(reader.list_videos(options.input), part - 1, None, num_parts))
    settings = {
        "model": str(find_file(model).resolve()),
        "stride": stride,
        "frame_stride": data.frame_stride,
        "fps": data.fps,
        "pad": options.pad,
        "keep": options.keep,
        "tokens": options.tokens,
        "format": options.format,
        **changes,
    }
    write_settings(options.output, settings)
    num_written = 0
    num_incomplete = 0
    with writer:
        missing = [video for video in listed if not writer.has(video)]
        windows = (window for video in missing for window in reader.read_windows(video))
        # Of the video under way.
        arrays = WindowArrays()
        with progress_bar(unit="video", total=len(missing)) as progress:
            for batch in prefetch(take_batches(windows, options.batch_size)):
                clips = [
                    np.stack([frame.image for frame in window.frames])
                    for window in batch
                    if window.frames
                ]
                encoded = encode(encoder, np.stack(clips), options) if clips else iter(())
                for video, frames in batch:
                    if frames:
                        ends = (frames[0], frames[-1])
                        values = next(encoded)
                        values["frames"] = np.array([frame.number for frame in ends])
                        values["times"] = np.array([frame.time for frame in ends])
                        arrays.append(values)
                        continue
                    if video.incomplete:
                        num_incomplete += 1
                        log(
                            f"{printable(video.source)} is incomplete: {video.incomplete}",
                            sys.stderr,
                        )
                    else:
                        num_written += 1
                    if len(arrays):
                        writer.write(video, arrays.stack())
                    arrays = WindowArrays()
                    progress.update()
    log(
        f"wrote features of {num_written} videos to {options.output}, {num_incomplete} could not be read wholly"
    )
    return 1 if num_incomplete else 0


def write_settings(output: Path, settings: dict[str, Any]) -> None:
    """Write features.json; raise InputError if OUT was begun with other settings."""
    file = output / "features.json"
    if not file.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_json(file, settings)
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    if before != settings:
        other = ", ".join(
            name for name in settings | before if before.get(name) != settings.get(name)
        )
        raise InputError(
            f"{output} has features made with another {other}: choose another OUT, or remove it"
        )


def take_batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, and the rest."""
    while batch := list(islice(items, size)):
        yield batch


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield items, of which the next one is made in a thread."""
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = pool.submit(next, items, None)
            yield item


@torch.no_grad()
def encode(
    encoder: VideoEncoder, clips: UInt8[np.ndarray, "B T H W C"], options: argparse.Namespace
) -> Iterator[dict[str, np.ndarray]]:
    """Encode clips; return an iterator over the arrays of each."""
    device = next(encoder.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        features = encoder.encode(torch.from_numpy(clips).to(device), options.keep)
    arrays = {"features": features.pooled.float().cpu().numpy()}
    if options.tokens:
        arrays["tokens"] = features.tokens.half().unflatten(1, encoder.config.grid).cpu().numpy()
    return ({name: values[index] for name, values in arrays.items()} for index in range(len(clips)))


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS), resumable=True)
