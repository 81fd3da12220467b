"""Measure what the settings of make_shards.py cost and give: CPU time to encode and to decode, bytes, PSNR and SSIM.

    python benchmarks/encode_settings.py VIDEOS [--num-videos 10] [--clips 4] [--repetitions 5] [--output FOLDER]

The beginnings of the first videos of the folder are scaled as for shards, encoded with every case, and compared to the
scaled frames. Takes about 10 minutes on one core.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch
from av.video.frame import VideoFrame

from benchmarks.arguments import ArgumentParser, at_least, existing_folder
from benchmarks.harness import Report, Row, print_table, require
from common.errors import InputError, run_command
from common.progress import progress_bar
from pipeline.decoding.containers import EXTENSIONS, open_video
from shard_tools.encoding.codecs import CODECS, CONTAINER, TUNES, Codec
from shard_tools.encoding.cuts import VideoWriter
from shard_tools.encoding.picture import FrameConverter, deinterlace
from shard_tools.encoding.source import assign_ticks, open_source, read_frames, read_timing, subsample
from shard_tools.settings import Settings

CLIP = 16  # frames
VIDEO_SUFFIXES = {f".{extension}" for extensions in EXTENSIONS.values() for extension in extensions}
NOTE = (
    f"Per clip of {CLIP} stored frames. CPU milliseconds of one thread, without reading and demultiplexing; decode_ms:"
    f" median of alternating repetitions; clip_ms: a clip at a random place, {CLIP} + (GOP - 1) / 2 frames. PSNR (Y, U"
    " and V) and SSIM (Y) are relative to the scaled source, mean over videos."
)


@dataclass(frozen=True)
class Case:
    """What is encoded; `name`: the value of --tune, or the one option of its decode that is tried alone."""

    name: str
    codec: Codec
    settings: Settings


@dataclass(frozen=True)
class Source:
    """The beginning of a video as it is handed to the encoder."""

    frames: list[VideoFrame]
    rate: Fraction

    @property
    def size(self) -> tuple[int, int]:
        return self.frames[0].width, self.frames[0].height


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    sources = read_sources(options.videos, options.num_videos, CLIP * options.clips)
    cases = list_cases(options.codecs)
    about = {"videos": len(next(iter(sources.values()))), "frames_per_video": f"up to {CLIP * options.clips}"}
    report = Report("encode_settings", options.output, torch.device("cpu"), [NOTE], ("av", "numpy"), **about)
    with tempfile.TemporaryDirectory() as folder:
        rows, files = [], []
        for number, case in enumerate(progress_bar(cases, unit="case", desc="encode")):
            paths = Path(folder, str(number))
            paths.mkdir()
            rows.append(encode(case, sources[case.codec.pixel_format], paths))
            files.append(sorted(paths.iterdir()))
        for row, seconds in zip(rows, time_decoding(files, options.repetitions), strict=True):
            frames = row.pop("frames")
            row["decode_ms"] = seconds / frames * CLIP * 1e3
            row["clip_ms"] = row["decode_ms"] * (1 + (row.pop("group") - 1) / 2 / CLIP)
    report.write(rows)
    print_table(rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__, "benchmarks/results/cpu")
    parser.add_argument("videos", type=existing_folder, help="folder of videos")
    parser.add_argument("--num-videos", type=at_least(1), default=10, help="the first ones by name (default 10)")
    parser.add_argument("--clips", type=at_least(1), default=4, help=f"of {CLIP} frames of each video (default 4)")
    parser.add_argument("--repetitions", type=at_least(1), default=5, help="of decoding (default 5)")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=[*CODECS], help="default: all")
    return parser.parse_args(arguments)


def list_cases(codecs: Sequence[str]) -> list[Case]:
    """List settings × quality × preset × GOP of h264, less of hevc, and the defaults of the others."""
    cases = []
    for name in codecs:
        codec = CODECS[name]
        grid: list[tuple[str, int | None, str, int]] = [("size", None, "veryfast", 8)]
        if name == "h264":
            presets = ("superfast", "veryfast", "faster", "medium")
            grid = list(product(TUNES, (22, 23, 24), presets, (4, 8, 16)))
            grid += list(product(TUNES, (20, 21, 25), ("veryfast",), (8,)))
            usual = codec.options["x264-params"]
            for part in ("cabac=0", "no-deblock=1", "weightp=0"):
                alone = replace(codec, options=codec.options | {"x264-params": f"{usual}:{part}"})
                cases.append(Case(f"only {part}", alone, Settings(quality=23, tune="size")))
        elif name == "hevc":
            grid = list(product(TUNES, (24, 25, 26), ("superfast", "veryfast"), (8,)))
        for tune, quality, preset, gop in grid:
            settings = Settings(encode=name, tune=tune, quality=quality, preset=preset, gop=gop)
            cases.append(Case(tune, codec, settings))
    return cases


def read_sources(folder: Path, num_videos: int, max_frames: int) -> dict[str, list[Source]]:
    """Read what is encoded, by pixel format: whole clips of the beginning of each video that is long enough."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in VIDEO_SUFFIXES)
    found: dict[str, list[Source]] = {}
    for codec in {codec.pixel_format: codec for codec in CODECS.values()}.values():
        read = (read_source(path, codec, max_frames) for path in paths)
        found[codec.pixel_format] = list(islice((source for source in read if source.frames), num_videos))
    if not all(found.values()):
        raise InputError(f"no video in {folder} has {CLIP} frames at the stored rate: give a folder of longer ones")
    return found


def read_source(path: Path, codec: Codec, max_frames: int) -> Source:
    """Raise UnusableError where make_shards.py rejects the video."""
    usual = Settings()
    with open_source(path) as (container, stream):
        timing = read_timing(container, stream)
    with open_source(path) as (container, stream):
        convert = FrameConverter(codec, usual.short_side, stream.sample_aspect_ratio)
        frames = deinterlace(assign_ticks(read_frames(container, stream), timing))
        pictures = list(islice(map(convert, subsample(frames, usual.frame_stride)), max_frames))
    whole = len(pictures) // CLIP * CLIP
    return Source(pictures[:whole], (timing.rate / usual.frame_stride).limit_denominator(100_000))


def encode(case: Case, sources: list[Source], folder: Path) -> Row:
    """Write all videos into `folder` and compare them to their sources."""
    seconds, qualities, num_frames, num_groups = 0.0, [], 0, 0
    for number, source in enumerate(sources):
        path = folder / f"{number:04d}.{CONTAINER}"
        start = time.process_time()
        writer = VideoWriter(path, case.codec, case.settings, source.rate, source.size)
        for frame in source.frames:
            writer.write(frame)
        writer.close()
        seconds += time.process_time() - start
        with open_video(path) as container:
            decoded = list(container.decode(video=0))
        require("all frames come out again", len(decoded) == len(source.frames), f"{case}: {len(decoded)} frames")
        qualities.append(compare(source.frames, decoded))
        num_frames += len(decoded)
        num_groups += sum(frame.key_frame for frame in decoded)
    settings, has_tune = case.settings, case.name != "size" or bool(case.codec.decode_options)
    psnr, ssim = np.mean(qualities, 0).tolist()
    return {
        "codec": settings.encode,
        "tune": case.name if has_tune else None,
        "quality": settings.to_json()["quality"],
        "preset": settings.preset if has_tune else None,
        "gop": settings.gop,
        "kb_per_clip": sum(path.stat().st_size for path in folder.iterdir()) / num_frames * CLIP / 1e3,
        "psnr_db": round(psnr, 3),
        "ssim": round(ssim, 5),
        "encode_ms": seconds / num_frames * CLIP * 1e3,
        "frames": num_frames,
        "group": num_frames / num_groups,
    }


def compare(sources: Sequence[VideoFrame], decoded: Sequence[VideoFrame]) -> tuple[float, float]:
    """Return PSNR in dB, of all samples of all frames, and the mean SSIM of luma."""
    errors, ssims = [], []
    for source, frame in zip(sources, decoded, strict=True):
        wanted, found = source.to_ndarray(), frame.to_ndarray()  # [H + H/2, W]: Y, then U and V
        errors.append(np.square(wanted.astype(np.int32) - found).mean())
        ssims.append(compute_ssim(wanted[: source.height], found[: source.height]))
    return 10 * float(np.log10(255**2 / max(np.mean(errors), 1e-9))), float(np.mean(ssims))


def compute_ssim(wanted: np.ndarray, found: np.ndarray) -> float:
    """Return the mean SSIM of two uint8 [H, W] over windows of 8×8 pixels, 4 apart, as FFmpeg's filter defines it."""
    a, b = wanted.astype(np.int32), found.astype(np.int32)
    sum_a, sum_b, squares, products = (sum_windows(values) for values in (a, b, a * a + b * b, a * b))
    variance = 64 * squares - sum_a**2 - sum_b**2
    covariance = 64 * products - sum_a * sum_b
    c1, c2 = 0.01**2 * 255**2 * 64, 0.03**2 * 255**2 * 64 * 63
    similarity = (2.0 * sum_a * sum_b + c1) * (2.0 * covariance + c2)
    return float((similarity / ((sum_a**2 + sum_b**2 + c1) * (variance + c2))).mean())


def sum_windows(values: np.ndarray) -> np.ndarray:
    """Sum [H, W] over windows of 8×8, 4 apart: [H/4 - 1, W/4 - 1]."""
    height, width = values.shape
    blocks = values.reshape(height // 4, 4, width // 4, 4).sum((1, 3), dtype=np.int32)
    return blocks[:-1, :-1] + blocks[:-1, 1:] + blocks[1:, :-1] + blocks[1:, 1:]


def time_decoding(files: list[list[Path]], repetitions: int) -> Iterator[float]:
    """Return the CPU seconds of decoding each case's files: the median of repetitions, which go round all cases."""
    turns = [
        [sum(map(decode_seconds, paths)) for paths in files]
        for _ in progress_bar(range(repetitions), unit="repetition", desc="decode")
    ]
    return map(statistics.median, zip(*turns, strict=True))


def decode_seconds(path: Path) -> float:
    with open_video(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        packets = list(container.demux(stream))  # the last one is empty and flushes
        start = time.process_time()
        for packet in packets:
            packet.decode()
        return time.process_time() - start


if __name__ == "__main__":
    run_command(main)
