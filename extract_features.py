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
With --format npz, files are NumPy's; with --format parquet, they have a row per window, with the metadata,
`first_frame`, `last_frame`, `start` and `end` (seconds) as columns. Videos that have a file are skipped.
"""

import argparse
from pathlib import Path

from common.arguments import ArgumentParser, between, parse_part
from common.errors import DISK_FULL, InputError, parse_early, run_command


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("input", metavar="INPUT", help="shards, videos, or a list of videos")
    add("output", metavar="OUT", type=Path, help="folder for the features")
    add("--model", required=True, help="run, checkpoint, export, another project's file, or hf://user/name")
    add("--window", type=between(1), metavar="T", help="frames per window; default: as trained")
    add("--stride", type=between(1), metavar="N", help="frames from window to window; default: a whole window")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--frame-stride", type=between(1), metavar="N", help="source frames; default: the run's, else 4")
    rate.add_argument("--fps", type=between(1, kind=float), help="sampled frames per second; some may repeat")
    add("--pad", action="store_true", help="windows end at the first frame and at every --stride-th after it")
    add("--image-size", type=int, nargs="+", metavar="PIXELS", help="side of a clip, or height and width; as trained")
    add("--batch-size", type=between(1), default=8, metavar="B", help="windows per forward pass (default 8)")
    add("--keep", type=float, default=1.0, metavar="FRACTION", help="encode only what the token sampler selects")
    add("--tokens", action="store_true", help="also the features of every token, in fp16")
    add("--format", choices=("safetensors", "npz", "parquet"), default="safetensors", help="(default safetensors)")
    add(
        "--part", type=parse_part, default=(1, 1), metavar="I/N", help="only every Nth video, from the Ith: one per GPU"
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    options = parser.parse_args(arguments)
    if options.tokens and options.format == "parquet":
        raise InputError("--format parquet is for features alone: choose npz or safetensors with --tokens")
    if options.tokens and options.keep != 1:
        raise InputError("--tokens writes the whole grid of tokens, of which --keep encodes a fraction: leave out one")
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8

from common.atomic_io import atomic_write, write_json
from common.devices import choose_device, explain_out_of_memory
from common.logging import log, printable
from common.progress import progress_bar
from figures.clips import resize_and_crop
from model.encoder import VideoEncoder
from model.weights.models import load_encoder
from model.weights.pretrained import find_file, trained_rate
from model.weights.weight_files import save_tensors
from pipeline.config import DataConfig
from pipeline.decoding.video import Video
from pipeline.decoding.video_source import Scaler
from pipeline.planning.crops import FrameSize, view_crop
from pipeline.planning.plan import check_strides, frame_step
from pipeline.reading.storage import is_remote
from pipeline.shards import arrays
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import DATASET_FILE, find_splits
from pipeline.video_error import VideoError
from shard_tools.encoding.encode import find_ticks
from shard_tools.encoding.picture import VideoError, display_size, find_flips
from shard_tools.encoding.source import (
    open_source,
    read_timing,
    require_complete,
    seek_frames,
    subsample,
)
from shard_tools.inputs import Item, ListOptions, read_inputs
from shard_tools.inputs.location import import_pyarrow, local_copy
from shard_tools.plan import make_key
from pipeline.videos.segment import Segment
from training.remote_run import local_run

# Source frames since the video's or segment's first, seconds in the source, and the frame as the model takes it.
Shown = tuple[int, float, UInt8[np.ndarray, "H W C"]]
T = TypeVar("T")


@dataclass
class Features:
    """A video and what is known of it so far.

    `frames` yields its sampled frames; raises VideoError, VideoError or OSError where it is damaged.
    """

    key: str
    source: str
    label: str
    frames: Callable[[], Iterator[Shown]]
    segment: str  # of the source: t=1.5,4 (seconds) or frames=10,50
    fields: dict[str, Any]
    offset: float = 0.0  # of its first frame in the source, seconds
    incomplete: str = ""
    # Of all windows, and an array like one window's. Small arrays that stay between large ones that go would fragment
    # memory, 2 GB for an hour.
    buffers: dict[str, tuple[bytearray, np.ndarray]] = field(default_factory=dict)

    def append(self, window: dict[str, np.ndarray]) -> None:
        for name, values in window.items():
            self.buffers.setdefault(name, (bytearray(), np.empty_like(values)))[0].extend(values.tobytes())

    def stack(self) -> dict[str, np.ndarray]:
        """Return the arrays of all windows, without a copy."""
        return {
            name: np.frombuffer(buffer, like.dtype).reshape(-1, *like.shape)
            for name, (buffer, like) in self.buffers.items()
        }


@explain_out_of_memory("lower --batch-size")
def main(options: argparse.Namespace) -> int:
    device = choose_device(options.device)
    if options.format == "parquet":
        import_pyarrow("OUT")  # says here what is missing
    model = local_run(options.model)
    changes = {"num_frames": options.window, "image_size": options.image_size}
    changes = {name: value for name, value in changes.items() if value}
    encoder = load_encoder(model, **changes).to(device)
    length, size = encoder.config.num_frames, FrameSize.of(encoder.config.image_size)
    given = {"frame_stride": options.frame_stride, "fps": options.fps}
    data = DataConfig(**(given if any(given.values()) else trained_rate(model)))
    stride = options.stride or length
    settings = {"model": str(find_file(model).resolve()), "stride": stride, "frame_stride": data.frame_stride}
    settings |= {"fps": data.fps} | {name: getattr(options, name) for name in ("pad", "keep", "tokens", "format")}
    if options.keep != 1:
        encode(encoder, np.zeros((1, length, *size, encoder.config.in_channels), np.uint8), options)  # raises early
    part, num_parts = options.part
    listed = list(islice(list_videos(options.input, size, data), part - 1, None, num_parts))  # raises if there are none
    write_settings(options.output, settings | changes)
    videos = [video for video in listed if not find_output(options, video).exists()]
    windows = (window for video in videos for window in cut_windows(video, length, stride, options.pad))
    num_bad = 0
    with progress_bar(unit="video", total=len(videos)) as progress:
        for batch in prefetch(iter(lambda: list(islice(windows, options.batch_size)), [])):
            clips = [np.stack([frame for *_, frame in window]) for _, window in batch if window]
            encoded = encode(encoder, np.stack(clips), options) if clips else iter(())
            for video, window in batch:
                if window:
                    frames, times, _ = zip(window[0], window[-1], strict=True)
                    video.append(next(encoded) | {"frames": np.array(frames), "times": np.array(times)})
                else:
                    save_features(options, video)
                    num_bad += bool(video.incomplete)
                    progress.update()
    log(f"wrote features of {len(videos) - num_bad} videos to {options.output}, {num_bad} could not be read wholly")
    return 1 if num_bad else 0


def write_settings(output: Path, settings: dict[str, Any]) -> None:
    """Write features.json; raise InputError if OUT was begun with other settings."""
    file = output / "features.json"
    if not file.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_json(file, settings)
    elif (before := json.loads(file.read_text(encoding="utf-8"))) != settings:
        other = ", ".join(name for name in settings | before if before.get(name) != settings.get(name))
        raise InputError(f"{output} has features made with another {other}: choose another OUT, or remove it")


def list_videos(place: str, size: FrameSize, data: DataConfig) -> Iterator[Features]:
    """Yield all videos of shards, or of what make_shards.py takes, in the same order every time."""
    is_dataset = is_remote(place) or (Path(place) / DATASET_FILE).is_file()
    datasets = {"": place} if is_dataset else {f"{split.name}/": str(split) for split in find_splits(Path(place))}
    for prefix, folder in datasets.items():
        yield from list_samples(ShardDataset.open(folder), prefix, size, data)
    if datasets:
        return
    for item in read_inputs(place, ListOptions(asks=False)):
        # Its path below INPUT; where a list names a video outside of its folder, the key that shards would have.
        is_outside = item.source.startswith(("../", "/"))
        key = make_key(item.source, item.segment) if is_outside else item.name
        read = partial(read_item, item, size, data)
        labels = ", ".join(item.labels or ())
        yield Features(key, item.source, labels, read, item.segment, json.loads(item.fields or "{}"))


def list_samples(dataset: ShardDataset, prefix: str, size: FrameSize, data: DataConfig) -> Iterator[Features]:
    check_strides(dataset, data)
    for index, sample in enumerate(dataset.samples):
        label = ", ".join(dataset.info.classes[int(label)] for label in sample.labels or ())
        read = partial(read_sample, dataset, index, size, data)
        yield Features(prefix + sample.key, sample.source, label, read, sample.segment, sample.fields)


def read_sample(dataset: ShardDataset, index: int, size: FrameSize, data: DataConfig) -> Iterator[Shown]:
    sample, content = dataset.samples[index], dataset.read_video(index)
    rate = Fraction(sample.fps).limit_denominator(100_000)
    step = find_step(sample.source, rate, data, sample.frame_stride)
    if arrays.is_array(content):
        yield from read_array(content, step, size)
        return
    scaler = make_scaler(sample.width, sample.height, size)
    frames = Video(content, sample.num_frames).frames(range(sample.num_frames))
    for count, frame in enumerate(subsample(frames, step)):
        yield int(count * step) * sample.frame_stride, sample.start + float(count * step / rate), scaler(frame)


def read_item(item: Item, size: FrameSize, data: DataConfig) -> Iterator[Shown]:
    """Stream a video file, its frames numbered and timed as make_shards.py does."""
    if item.problem:
        raise VideoError(item.problem)
    with local_copy(item.location) as path:
        if arrays.is_array(path):
            if item.segment:
                raise VideoError("segments are cut out of videos, not out of arrays")
            yield from read_array(path, find_step(item.source, Fraction(arrays.FPS), data), size)
            return
        with open_source(path) as (container, stream):
            timing = read_timing(container, stream)
            require_complete(path, container, stream, timing.num_packets)
            aspect = stream.sample_aspect_ratio
        step = find_step(item.source, timing.rate, data)
        first, end = find_ticks(Segment.parse(item.segment), timing) if item.segment else (0, math.inf)
        scaler, frames = None, seek_frames(partial(open_source, path), timing, first)
        for count, frame in enumerate(subsample(frames, step, first)):
            if (tick := first + count * step) >= end:
                return
            if scaler is None:
                width, height = display_size(frame, aspect, find_flips(frame))
                scaler = make_scaler(round(width), round(height), size)
            yield int(count * step), float(tick / timing.rate), scaler(frame)


def read_array(array: bytes | Path, step: Fraction, size: FrameSize) -> Iterator[Shown]:
    frames = arrays.map_frames(array)
    for number in (int(count * step) for count in range(math.ceil(len(frames) / step))):
        yield number, number / arrays.FPS, resize_and_crop(frames[number : number + 1], size)[0].numpy()


def find_step(source: str, fps: Fraction, data: DataConfig, stored_stride: int = 1) -> Fraction:
    """Return the distance of sampled frames in those of a video of `fps`, of which every n-th was stored."""
    if (step := frame_step(float(fps), stored_stride, data)) < 1:
        few = f"{printable(source)} has {float(fps):g} frames a second"
        log(f"{few}: some are repeated for --fps {data.fps:g}", sys.stderr)
    return Fraction(step).limit_denominator(100_000)


def make_scaler(width: int, height: int, size: FrameSize) -> Scaler:
    return Scaler(view_crop(width, height, 0, 1, size), False, size, (width, height))


def cut_windows(video: Features, length: int, stride: int, pad: bool) -> Iterator[tuple[Features, list[Shown]]]:
    """Yield the windows of a video, then an empty one."""
    held: deque[Shown] = deque(maxlen=length)
    count, first_end = 0, 1 if pad else length
    try:
        for count, shown in enumerate(video.frames(), 1):
            if count == 1:
                video.offset = shown[1]
                held.extend([shown] * (length - first_end))
            held.append(shown)
            if count >= first_end and (count - first_end) % stride == 0:
                yield video, list(held)
    except (VideoError, VideoError, OSError) as error:
        if getattr(error, "errno", None) in DISK_FULL:  # of a copy of it
            raise
        video.incomplete = str(error)
    if 0 < count < first_end and not video.incomplete:
        yield video, [*held, *[held[-1]] * (length - count)]
    yield video, []


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
    found = {"features": features.pooled.float()}
    if options.tokens:
        found["tokens"] = features.tokens.half().unflatten(1, encoder.config.grid)
    on_host = {name: values.cpu().numpy() for name, values in found.items()}
    return ({name: values[i] for name, values in on_host.items()} for i in range(len(clips)))


def find_output(options: argparse.Namespace, video: Features) -> Path:
    return options.output / f"{video.key}.{options.format}"


def save_features(options: argparse.Namespace, video: Features) -> None:
    """Write a video's file, if it has a window; say on stderr if it is incomplete."""
    if video.incomplete:
        log(f"{printable(video.source)} is incomplete: {video.incomplete}", sys.stderr)
    if video.buffers:
        names = ("key", "source", "segment", "offset", "label", "incomplete")
        metadata = {name: getattr(video, name) for name in names}
        metadata |= {"episode": str(video.fields.get("episode", "")), "fields": json.dumps(video.fields)}
        file = find_output(options, video)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as partial_file:
            SAVE[options.format](partial_file, video.stack(), metadata)
        video.buffers.clear()


def save_safetensors(path: Path, values: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    strings = {name: str(value) for name, value in metadata.items()}
    save_tensors(path, {name: torch.from_numpy(array) for name, array in values.items()}, strings)


def save_npz(path: Path, values: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **values, **metadata)


def save_parquet(path: Path, values: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    import pyarrow

    features, frames, times = values["features"], values["frames"], values["times"]
    columns: dict[str, Any] = {name: [value] * len(times) for name, value in metadata.items()}
    columns |= {"first_frame": frames[:, 0], "last_frame": frames[:, 1], "start": times[:, 0], "end": times[:, 1]}
    columns["features"] = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(features.ravel()), features.shape[1])
    import_pyarrow(str(path)).write_table(pyarrow.table(columns), path)


SAVE = {"safetensors": save_safetensors, "npz": save_npz, "parquet": save_parquet}

if __name__ == "__main__":
    run_command(lambda: main(OPTIONS), resumable=True)
