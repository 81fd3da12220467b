"""Extract features along videos: `python extract_features.py INPUT OUT --model RUN [--stride 8]`.

INPUT is a dataset of shards, or what make_shards.py takes (a video, a folder, a list, tars), or an image. Windows of
--window frames slide over each video by --stride frames; both count sampled frames, which are --frame-stride source
frames apart or, with --fps, 1/fps seconds. A window has the center crop; a video that is shorter than one repeats its
last frame, and what is left after the last whole window is not covered.

Each video gets a file, OUT/<its path in INPUT>.safetensors, with the tensors `features` [W, D] fp32, means over the
tokens of each window, `times` [W, 2] fp64, seconds from the video's first frame to the first and the last frame of the
window, and with --tokens `tokens` [W, t, h, w, D] fp16. The metadata are its key, source, label, class and, if it is
damaged, `incomplete`: why the rest of it is missing. With --format npz or npy, files are NumPy's; npy holds `features`
alone, as ActionFormer reads them. With --format parquet, they have a row per window, with the metadata and `start` and
`end` as columns: OUT is a table. Videos that have a file are skipped, so re-running the command continues.
"""

import argparse
from pathlib import Path

from common.errors import InputError, parse_early, require_positive, run_command

FORMATS = ("safetensors", "npz", "npy", "parquet")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", metavar="INPUT", help="shards, videos, or a list of videos")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder for the features")
    parser.add_argument(
        "--model", required=True, help="run, checkpoint, export, another project's file, or hf://user/name"
    )
    parser.add_argument("--window", type=int, metavar="T", help="frames per window; default: as trained")
    parser.add_argument("--stride", type=int, metavar="N", help="frames from window to window; default: a whole window")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--frame-stride", type=int, metavar="N", help="in source frames; default: the run's, else 4")
    rate.add_argument("--fps", type=float, help="sampled frames per second; of fewer, some are repeated")
    parser.add_argument(
        "--image-size", type=int, nargs="+", metavar="PIXELS", help="side of a clip, or height and width; as trained"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="B", help="windows per forward pass (default 8)")
    parser.add_argument("--keep", type=float, default=1.0, metavar="SHARE", help="encode only this share of the tokens")
    parser.add_argument(
        "--by", choices=("adaptive", "motion", "random"), default="adaptive",
        help="with --keep: chosen by the run's token sampler, by frame differences, or at random (default adaptive)",
    )  # fmt: skip
    parser.add_argument("--tokens", action="store_true", help="also the features of every token, in fp16")
    parser.add_argument("--format", choices=FORMATS, default="safetensors", help="of the files (default safetensors)")
    parser.add_argument(
        "--part", default="0/1", metavar="I/N", help="only every Nth video, from the Ith on: one per GPU"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    options = parser.parse_args(arguments)
    require_positive(options, "batch_size", "window", "stride", "frame_stride", "fps")
    if options.tokens and options.format in ("npy", "parquet"):
        raise InputError(f"--format {options.format} is for features alone: choose npz or safetensors with --tokens")
    if options.tokens and options.keep != 1:
        raise InputError("--tokens writes the whole grid of tokens, of which --keep encodes a share: leave out one")
    options.part = parse_part(options.part)
    return options


def parse_part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise InputError(f"--part is {text}: give I/N with I from 0 to N - 1, such as 0/8")
    return int(index), int(count)


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import json
import math
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import chain, islice, repeat
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from common.atomic_io import atomic_write, write_json
from common.devices import choose_device, explain_out_of_memory
from common.logging import log, printable
from common.progress import progress_bar
from figures.clips import resize_and_crop
from model.encoder import VideoEncoder
from model.weights.models import load_encoder
from model.weights.pretrained import find_file, trained_rate
from model.weights.weight_files import save_tensors
from pipeline.decoding.video import Video
from pipeline.decoding.video_source import Scaler
from pipeline.planning.crops import FrameSize, view_crop
from pipeline.reading.reader import Reader
from pipeline.reading.storage import is_remote
from pipeline.shards import arrays
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import DATASET_FILE
from pipeline.video_error import VideoError
from shard_tools.encoding.picture import Pose, UnusableError
from shard_tools.encoding.source import assign_ticks, open_source, read_frames, read_timing, require_complete, subsample
from shard_tools.inputs import Item, read_inputs
from shard_tools.inputs.item import Segment, import_pyarrow
from shard_tools.plan import make_key
from shard_tools.work import local_copy
from training.remote_run import local_run

PREFETCHED = 4  # batches that are decoded ahead
DTYPES = {"features": np.float32, "tokens": np.float16, "times": np.float64}
Shown = tuple[float, UInt8[np.ndarray, "H W C"]]  # seconds from the first frame, and the frame as the model takes it
T = TypeVar("T")


class Rate(NamedTuple):
    """How many frames are sampled: every so many source frames, or so many a second."""

    frame_stride: int | None = None
    fps: float | None = None

    def step(self, source: str, fps: Fraction, stored_stride: int = 1) -> Fraction:
        """Return the distance of sampled frames in those of a video of `fps`, of which every n-th was stored."""
        step = fps / Fraction(self.fps) if self.fps else Fraction(self.frame_stride or 1, stored_stride)
        if step < 1:
            few = f"{printable(source)} has {float(fps):g} frames a second"
            log(f"{few}: some are repeated for --fps {self.fps:g}", sys.stderr)
        return step.limit_denominator(100_000)


@dataclass
class Source:
    """A video: `frames` yields what is sampled of it; raises VideoError or UnusableError where it is damaged."""

    key: str
    source: str
    frames: Callable[[], Iterator[Shown]]
    label: str = ""


@dataclass
class Features:
    """What is known of a video so far. Small tensors that stay between large ones that go would fragment memory: 2 GB
    for an hour. So they lie in temporary files."""

    source: Source
    files: dict[str, IO[bytes]] = field(default_factory=lambda: defaultdict(TemporaryFile))
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_windows: int = 0
    incomplete: str = ""

    def append(self, window: dict[str, np.ndarray]) -> None:
        for name, values in window.items():
            values.tofile(self.files[name])
            self.shapes[name] = values.shape
        self.num_windows += 1

    def read(self) -> dict[str, Tensor]:
        """Return the features of all windows, which are read from the disk on use."""
        return {
            name: torch.from_numpy(np.memmap(file, DTYPES[name], "c", shape=(self.num_windows, *self.shapes[name])))
            for name, file in self.files.items()
        }


class Window(NamedTuple):
    features: Features
    times: tuple[float, float]
    clip: UInt8[np.ndarray, "T H W C"]


@explain_out_of_memory("lower --batch-size")
def main(options: argparse.Namespace) -> int:
    device = choose_device(options.device)
    if options.format == "parquet":
        import_pyarrow("OUT")  # says here what is missing
    changes = {"num_frames": options.window, "image_size": options.image_size}
    changes = {name: value for name, value in changes.items() if value}
    model = local_run(options.model)
    encoder = load_encoder(model, **changes).to(device)
    length = encoder.config.num_frames
    given = {name: getattr(options, name) for name in Rate._fields if getattr(options, name)}
    rate = Rate(**(given or trained_rate(model)))
    stride = options.stride or length
    settings = {"model": str(find_file(model).resolve()), **rate._asdict(), "stride": stride}
    if options.keep != 1:
        settings |= {"keep": options.keep, "by": options.by}
        black = torch.zeros(1, length, *encoder.config.frame_size, encoder.config.in_channels, dtype=torch.uint8)
        encoder.select_tokens(black.to(device), options.keep, options.by)  # raises here what would be raised later

    first, step = options.part
    listed = list_sources(options.input, FrameSize.of(encoder.config.image_size), rate)
    sources = list(islice(listed, first, None, step))  # which raises here if there are none
    write_settings(options.output, settings | {"tokens": options.tokens, "format": options.format, **changes})
    videos = [Features(source) for source in sources if not file_of(options, source.key).exists()]
    num_bad = 0
    with progress_bar(unit="video", total=len(videos)) as progress:
        windows = (window for video in videos for window in cut_windows(video, length, stride))
        size = options.batch_size
        batches = iter(lambda: list(islice(windows, size)), [])
        for batch in prefetch(batches, PREFETCHED):
            if clips := [window.clip for window in batch if isinstance(window, Window)]:
                found = encode(encoder, torch.from_numpy(np.stack(clips)).to(device), options)
            number = 0
            for item in batch:
                if isinstance(item, Window):
                    part = {name: values[number].numpy() for name, values in found.items()}
                    item.features.append({**part, "times": np.array(item.times)})
                    number += 1
                else:
                    num_bad += not save_features(options, item)
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


def list_sources(place: str, size: FrameSize, rate: Rate) -> Iterator[Source]:
    """Yield all videos of shards, or of what make_shards.py takes, in the same order every time."""
    if is_remote(place) or (Path(place) / DATASET_FILE).is_file():
        yield from list_samples(ShardDataset.open(place), size, rate)
    elif Path(place).suffix.lower() in Image.registered_extensions() and Path(place).is_file():
        yield Source(Path(place).name, place, lambda: read_image(Path(place), size))
    else:
        for item in read_inputs(place):
            key, read = make_file_name(item), partial(read_item, item, size, rate)
            yield Source(key, item.source, read, ", ".join(item.labels or ()))


def make_file_name(item: Item) -> str:
    """Return its path below INPUT; where a list names a video outside of its folder, the key that shards would have."""
    is_outside = item.source.startswith(("../", "/"))
    return make_key(item.source, str(item.segment or "")) if is_outside else item.name


def list_samples(dataset: ShardDataset, size: FrameSize, rate: Rate) -> Iterator[Source]:
    reader, classes = Reader(dataset), dataset.info.classes
    for stored in dataset.info.frame_strides:
        if rate.frame_stride and rate.frame_stride % stored:
            raise InputError(
                f"{dataset.folder} stores one frame of every {stored}, and the frame stride is {rate.frame_stride}:"
                f" give a multiple of {stored} as --frame-stride, or --fps"
            )

    def read(index: int) -> Iterator[Shown]:
        sample = dataset.samples[index]
        fps = Fraction(sample.fps).limit_denominator(100_000)
        step, data = rate.step(sample.source, fps, sample.frame_stride), reader.read(index)
        if arrays.is_array(data):
            yield from read_array(data, step, size)
            return
        scaler = make_scaler(sample.width, sample.height, size)
        repeats = Counter(number_frames(step, sample.num_frames))
        with Video(data, sample.num_frames) as video:
            for number, frame in video.frames(list(repeats)):
                yield from repeat((float(number / fps), scaler(frame)), repeats[number])

    for index, sample in enumerate(dataset.samples):
        label = ", ".join(classes[int(label)] for label in sample.labels or ())
        yield Source(sample.key, sample.source, partial(read, index), label)


def read_item(item: Item, size: FrameSize, rate: Rate) -> Iterator[Shown]:
    """Stream a video file: memory does not grow with its length."""
    if item.problem:
        raise UnusableError(item.problem)
    with local_copy(item.location) as path:
        if arrays.is_array(path):
            yield from read_array(path, rate.step(item.source, Fraction(arrays.FPS)), size)
            return
        with open_source(path) as (container, stream):
            timing = read_timing(container, stream)
            require_complete(path, container, stream, timing.num_packets)
        step = rate.step(item.source, timing.rate)
        with open_source(path) as (container, stream):
            frames = subsample(assign_ticks(read_frames(container, stream), timing), step)
            first = next(frames)
            width, height = Pose.read(first, stream.sample_aspect_ratio).display_size(first.width, first.height)
            scaler = make_scaler(round(width), round(height), size)
            segment = item.segment or Segment(0, math.inf)
            for number, frame in enumerate(chain([first], frames)):
                seconds = number * step / timing.rate
                if (number * step if segment.in_frames else seconds) >= segment.end:
                    return
                if (number * step if segment.in_frames else seconds) >= segment.start:
                    yield float(seconds), scaler(frame)


def read_array(array: bytes | Path, step: Fraction, size: FrameSize) -> Iterator[Shown]:
    frames = arrays.map_frames(array)
    for number in number_frames(step, len(frames)):
        yield number / arrays.FPS, resize_and_crop(frames[number : number + 1].copy(), size)[0].numpy()


def read_image(path: Path, size: FrameSize) -> Iterator[Shown]:
    with Image.open(path) as image:
        yield 0.0, resize_and_crop(np.array(image.convert("RGB"))[None], size)[0].numpy()


def number_frames(step: Fraction, num_frames: int) -> list[int]:
    """List the frames shown at multiples of a step."""
    return [int(number * step) for number in range(math.ceil(num_frames / step))]


def make_scaler(width: int, height: int, size: FrameSize) -> Scaler:
    return Scaler(view_crop(width, height, 0, 1, size), False, size, (width, height))


def cut_windows(video: Features, length: int, stride: int) -> Iterator[Window | Features]:
    """Yield the windows of a video, then the video itself, which then says whether it is incomplete."""
    held: deque[Shown] = deque(maxlen=length)
    count = 0
    try:
        for count, shown in enumerate(video.source.frames(), 1):
            held.append(shown)
            if count >= length and (count - length) % stride == 0:
                yield make_window(video, held)
    except (UnusableError, VideoError, OSError) as error:
        video.incomplete = str(error)
    if 0 < count < length and not video.incomplete:
        held.extend([held[-1]] * (length - count))
        yield make_window(video, held)
    yield video


def make_window(video: Features, held: Sequence[Shown]) -> Window:
    return Window(video, (held[0][0], held[-1][0]), np.stack([frame for _, frame in held]))


def prefetch(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield items, of which up to `depth` are made ahead in a thread."""
    with ThreadPoolExecutor(1) as pool:
        pending = deque(pool.submit(next, items, None) for _ in range(depth))
        try:
            while (item := pending.popleft().result()) is not None:
                pending.append(pool.submit(next, items, None))
                yield item
        finally:
            pool.shutdown(cancel_futures=True)


@torch.no_grad()
def encode(encoder: VideoEncoder, clip: UInt8[Tensor, "B T H W C"], options: argparse.Namespace) -> dict[str, Tensor]:
    device = clip.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        features = encoder.encode(clip, options.keep, options.by)
    found = {"features": features.pooled.float().cpu()}
    if options.tokens:
        found["tokens"] = features.tokens.half().unflatten(1, encoder.config.grid).cpu()
    return found


def file_of(options: argparse.Namespace, key: str) -> Path:
    return options.output / f"{key}.{options.format}"


def save_features(options: argparse.Namespace, video: Features) -> bool:
    """Write a video's file, if it has a window; say on stderr and return False if it is incomplete."""
    source = video.source
    if video.incomplete:
        log(f"{printable(source.source)} is incomplete: {video.incomplete}", sys.stderr)
    if video.num_windows:
        about = {"key": source.key, "source": source.source, "label": source.label, "incomplete": video.incomplete}
        file = file_of(options, source.key)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as partial_file:
            SAVE[options.format](partial_file, video.read(), about)
    for opened in video.files.values():
        opened.close()
    return not video.incomplete


def save_npz(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **{name: values.numpy() for name, values in tensors.items()} | metadata)


def save_npy(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with path.open("wb") as file:
        np.save(file, tensors["features"].numpy())


def save_parquet(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    import pyarrow

    (features, times), count = (tensors[name].numpy() for name in ("features", "times")), len(tensors["times"])
    columns: dict[str, Any] = {name: [value] * count for name, value in metadata.items()}
    columns |= {"start": times[:, 0], "end": times[:, 1]}
    columns["features"] = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(features.ravel()), features.shape[1])
    import_pyarrow(str(path)).write_table(pyarrow.table(columns), path)


SAVE: dict[str, Callable[[Path, dict[str, Tensor], dict[str, str]], None]]
SAVE = {"safetensors": save_tensors, "npz": save_npz, "npy": save_npy, "parquet": save_parquet}

if __name__ == "__main__":
    run_command(lambda: main(OPTIONS), resumable=True)
