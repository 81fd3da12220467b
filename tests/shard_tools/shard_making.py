"""A short way to make shards in tests, and to look at what came out."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.read_format import read_dataset_info, read_samples
from adamae.pipeline.video_error import VideoError
from adamae.shard_tools import make_shards
from adamae.shard_tools.encoding.encode import StoredVideo, encode_segments
from adamae.shard_tools.inputs import Item, ItemStore, ListOptions, read_inputs
from adamae.shard_tools.settings import Settings
from adamae.shard_tools.synthetic_videos import GRID, GRID_FRACTION, check_bits, draw_frame_number

# Of the package's fixture `videos`.
NUM_VIDEOS = 9
NUM_FRAMES = 18


def run_here(
    function: Callable[[Any], Any], jobs: Iterable[Any], *_: object, **__: object
) -> Iterator[tuple[Any, Any]]:
    """Run all jobs in this process."""
    return ((job, function(job)) for job in jobs)


def make_folder(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files, by name with their content."""
    for name, content in files.items():
        if isinstance(content, str):
            content = content.encode()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def flip(data: bytes, positions: Iterable[int], bits: int = 255) -> bytes:
    """Flip bits of the bytes at some positions."""
    damaged = bytearray(data)
    for position in positions:
        damaged[position] ^= bits
    return bytes(damaged)


def list_segments(videos: Path, path: Path) -> Path:
    """Write a list of three segments of each video, with both labels, one or none."""
    label_sets = (["a", "b"], ["b"], [])
    rows = []
    for number, video in enumerate(sorted(videos.rglob("*.mp4"))):
        labels = label_sets[number % 3]
        rows += [
            {"path": str(video), "label": labels, "start": start, "end": start + 0.3}
            for start in (0, 0.1, 0.25)
        ]
    path.write_text(json.dumps(rows))
    return path


def collect(items: Iterable[Item], unlabeled: bool = False) -> ItemStore:
    inputs = ItemStore()
    inputs.add(items)
    inputs.deduplicate(unlabeled)
    return inputs


def make(inputs: Path | str, output: Path, *options: str) -> int:
    """Run make_shards and return its exit code.

    It has one worker and no limit on rejects, unless `options` say otherwise.
    """
    defaults = ["--workers", "1", "--max-rejects", "1"]
    return make_shards.main([str(inputs), str(output), *defaults, *options])


def read_labels(inputs: Path, **options: Any) -> dict[str, Any]:
    """Return labels by name, the label alone where there is one; "! " and the problem, if any."""
    labels: dict[str, Any] = {}
    for item in read_inputs(str(inputs), ListOptions(**options)):
        labels[item.name] = f"! {item.problem}" if item.problem else item.label or item.labels
    return labels


def store(source: Path, **settings: Any) -> StoredVideo:
    """Store all of a video beside it; raise VideoError if it cannot be used."""
    stem = source.with_name("stored")
    ((_, result),) = encode_segments(source, {stem: None}, Settings(**settings))
    if isinstance(result, VideoError):
        raise result
    return result


def hashes(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of a dataset, by name."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def all_samples(folder: Path) -> list[tuple[str, Sample]]:
    """Return (shard, sample) for the samples of a dataset, in order."""
    samples = []
    for shard in read_dataset_info(folder).shards:
        samples += [(shard.name, sample) for sample in read_samples(folder, shard)]
    return samples


def video_bytes(folder: Path, shard: str, sample: Sample) -> bytes:
    with (folder / shard).open("rb") as file:
        file.seek(sample.offset)
        return file.read(sample.size)


def decode(video: bytes | Path) -> list[np.ndarray]:
    """Return all frames of a video, uint8 [H, W, 3]."""
    file = io.BytesIO(video) if isinstance(video, bytes) else str(video)
    with av.open(file) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def read_frame_number(frame: np.ndarray) -> int:
    """Read the number drawn into `frame`, uint8 [H, W, 3]; raise ValueError if none is readable."""
    height, width = frame.shape[:2]
    code = 0
    for cell in range(GRID * GRID):
        row, column = divmod(cell, GRID)
        # The center of the cell, where scaling has mixed in none of its neighbors.
        y = (row + 0.5) * height / GRID_FRACTION
        x = (column + 0.5) * width / GRID_FRACTION
        center = frame[round(y - 1) : round(y + 1), round(x - 1) : round(x + 1)]
        if center.mean() > 127:
            code |= 1 << cell
    number = code >> 4
    if code & 15 != check_bits(number):
        raise ValueError("no frame number is readable in the top left corner")
    return number


def read_numbers(video: bytes | Path) -> list[int]:
    """Return the numbers that draw_frame_number has written into the frames of a video."""
    return [read_frame_number(frame) for frame in decode(video)]


def numbers_of(folder: Path, field: str = "key") -> dict[str, list[int]]:
    """Return the frame numbers in every sample of a dataset, by a field of it."""
    numbers = {}
    for shard, sample in all_samples(folder):
        numbers[getattr(sample, field)] = read_numbers(video_bytes(folder, shard, sample))
    return numbers


def write_video(
    path: Path,
    frames: Iterable[np.ndarray],
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    times_ms: list[int] | None = None,
    options: dict[str, str] | None = None,
    container: str | None = None,
    rate: int = 25,
    **context: Any,
) -> Path:
    """Encode frames uint8 [H, W, 3], at `rate` or shown at `times_ms`.

    `context` sets fields of the codec context.
    """
    muxer_options = {"movflags": "+faststart"}
    time_base = Fraction(1, rate)
    if times_ms:
        muxer_options["avoid_negative_ts"] = "disabled"
        time_base = Fraction(1, 1000)
    encoder_options = {"bf": "0", "crf": "6", "g": "8"} | (options or {})
    with av.open(str(path), "w", format=container, options=muxer_options) as output:
        stream: Any = output.add_stream(codec, rate=rate, options=encoder_options)
        for number, picture in enumerate(frames):
            if number == 0:
                height, width = picture.shape[:2]
                fields = {
                    "height": height,
                    "width": width,
                    "pix_fmt": pixel_format,
                    "time_base": time_base,
                }
                for name, value in (fields | context).items():
                    setattr(stream.codec_context, name, value)
            rgb = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame = rgb.reformat(format=pixel_format)
            frame.time_base = time_base
            frame.pts = number if times_ms is None else times_ms[number]
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def write_noise(
    path: Path, container: str, num_frames: int, options: dict[str, str], side: int = 64
) -> Path:
    """Write noise that moves, with the number of each frame.

    Every picture takes thousands of bytes, so that damage hits pictures.
    """
    noise = np.random.default_rng(0).integers(0, 256, (side * 3 // 4, side, 3), np.uint8)
    pictures = []
    for number in range(num_frames):
        picture = np.roll(noise, (3 * number, 5 * number), (0, 1))
        draw_frame_number(picture, number)
        pictures.append(picture)
    # bf=-1 leaves the number of B-frames to the preset.
    defaults = {"sc_threshold": "0", "preset": "ultrafast", "crf": "23", "bf": "-1"}
    return write_video(path, pictures, options=defaults | options, container=container, rate=30)
