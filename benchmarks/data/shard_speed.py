"""How fast shards are made, beside plain ffmpeg command lines, and what each way to store them costs and gives.

    python benchmarks/data/shard_speed.py FOLDER_OF_VIDEOS

Speed: make_shards and ffmpeg (the system's, with the same x264 settings and as many processes) do the same videos in
turns; ours also hashes, decodes again what it stored, and writes tars. Storage: for every codec the size, the
likeness to the source at the same size (SSIM of luma), and how many random clips of 16 frames a core decodes a second.
"""

import argparse
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch

from benchmarks.harness import RESULTS, Row, machine, require, write_results
from common.errors import InputError, run_command
from pipeline.decoding.video import decode_frames
from pipeline.shards.format import Sample, read_dataset_info, read_samples
from shard_tools import make_shards
from shard_tools.encoding.codecs import CODECS
from shard_tools.encoding.picture import Converter
from shard_tools.encoding.source import intact_frames, opened, thinned, with_ticks
from shard_tools.encoding.timing import read_timing
from shard_tools.inputs import Item, Member, read_inputs
from shard_tools.workers.work import fetched

# From a small process: a child's peak counts from its fork, when it is as large as its parent.
PEAK_MEMORY = """
import resource, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:], "--workers", "1"], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
CLIP_FRAMES, SOURCE_STRIDE = 16, 4
SSIM_EVERY = 8  # stored frames
FFMPEG = (
    "ffmpeg -v error -y -threads 1 -i {source} -an -vf {filters} -fps_mode vfr -pix_fmt yuv420p -c:v libx264 "
    "-preset veryfast -crf 23 -threads 1 "
    "-x264-params keyint=8:min-keyint=8:scenecut=0:bframes=0:open-gop=0:cpu-independent=1 -movflags +faststart {target}"
)
SHORT = "trunc(min(256\\,min(iw\\,ih))/16)*16"  # as make_shards does it: sides are multiples of 16
FILTERS = f"select=not(mod(n\\,4)),scale=if(gt(iw\\,ih)\\,-16\\,{SHORT}):if(gt(iw\\,ih)\\,{SHORT}\\,-16)"


def with_ffmpeg(items: list[Item], folder: Path, num_processes: int) -> None:
    """One ffmpeg command a video, `num_processes` at a time."""

    def convert(item: Item) -> None:
        target = folder / (item.source.replace("/", "_") + ".mp4")
        words = [word.format(source=item.location, filters=FILTERS, target=target) for word in FFMPEG.split()]
        subprocess.run(words, check=True)

    with ThreadPoolExecutor(num_processes) as threads:
        list(threads.map(convert, items))


def with_make_shards(folder: Path, output: Path, num_processes: int, *options: str) -> None:
    command = [sys.executable, make_shards.__file__, str(folder), str(output), "--workers", str(num_processes)]
    result = subprocess.run([*command, "--unlabelled", *options], capture_output=True, text=True)
    require("make_shards ends well", result.returncode == 0, result.stderr[-300:])


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """(seconds on the wall clock, seconds of processor time) of work that is done by child processes."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def speed_rows(videos: Path, folder: Path, num_processes: int, repetitions: int) -> list[Row]:
    """Median times of ffmpeg and make_shards over `repetitions` turns, each doing all the videos once."""
    items = list(read_inputs(str(videos), None, unlabelled=True))
    output = folder / "turn"
    ways: dict[str, Callable[[], None]] = {"ffmpeg": lambda: with_ffmpeg(items, output, num_processes)}
    for options in ("", "--encode copy", "--encode copy --check full"):
        ways[f"make_shards {options}".strip()] = partial(
            with_make_shards, videos, output, num_processes, *options.split()
        )
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir()
            times[name].append(measured(way))
    num_frames = sum(count_frames(videos / item.source) for item in items)
    rows = []
    for name, pairs in times.items():
        wall, cpu = (statistics.median(values) for values in zip(*pairs, strict=True))
        row: Row = {"way": name, "seconds": wall, "processor_seconds": cpu, "videos_per_second": len(items) / wall}
        row |= {"source_frames_per_second": num_frames / wall, "repetitions": repetitions}
        rows.append(row)
    for row in rows:
        for peer, its in (("ffmpeg", rows[0]), ("default", rows[1])):
            row[f"speed_to_{peer}"] = its["seconds"] / row["seconds"]
            row[f"speed_to_{peer}_by_processor_time"] = its["processor_seconds"] / row["processor_seconds"]
    return rows


def memory_rows(folder: Path) -> list[Row]:
    """Peak memory of the process, of all that take part, that needs most for a 10-minute 1080p video."""
    videos = folder / "long"
    videos.mkdir()
    draw = f"ffmpeg -v error -f lavfi -i testsrc2=size=1920x1080:rate=25 -t 5 -c:v libx264 -g 250 {folder}/part.mp4"
    repeat = f"ffmpeg -v error -stream_loop 119 -i {folder}/part.mp4 -c copy {videos}/long.mp4"
    for drawing in (draw, repeat):
        subprocess.run(drawing.split(), check=True)
    rows: list[Row] = []
    for encode in ("copy", "h264"):
        output = folder / f"long_{encode}"
        command = [sys.executable, "-c", PEAK_MEMORY, make_shards.__file__, str(videos), str(output)]
        said = subprocess.run([*command, "--encode", encode], check=True, capture_output=True, text=True).stdout
        peak_mib = int(said.splitlines()[-1]) / 1024
        (shard,) = read_dataset_info(output).shards
        (sample,) = read_samples(output, shard)
        rows.append({"encode": encode, "stored_frames": sample.num_frames, "peak_memory_mib": peak_mib})
    return rows


def count_frames(path: Path) -> int:
    with opened(path) as (container, stream):
        return sum(1 for packet in container.demux(stream) if packet.size)


def storage_rows(videos: Path, folder: Path, num_processes: int, num_clips: int) -> list[Row]:
    """Every codec on the same videos: size, likeness, speed of random access; the copied videos come first."""
    rows: list[Row] = []
    for encode in ("copy", *CODECS):
        output = folder / encode
        make = partial(with_make_shards, videos, output, num_processes, "--encode", encode)
        _, processor_seconds = measured(make)
        shards = read_dataset_info(output).shards
        stored = [(output / shard.name, sample) for shard in shards for sample in read_samples(output, shard)]
        row: Row = {"encode": encode, "video_mb": sum(sample.size for _, sample in stored) / 1e6}
        row["share_of_copied"] = row["video_mb"] / (rows[0]["video_mb"] if rows else row["video_mb"])
        row["ssim"] = 1.0 if encode == "copy" else statistics.mean(likeness(videos, *place) for place in stored)
        row["random_clips_per_second"] = clips_per_second(stored, num_clips)
        row["making_processor_seconds"] = processor_seconds
        rows.append(row)
        shutil.rmtree(output)
    return rows


def clips_per_second(stored: list[tuple[Path, Sample]], num_clips: int) -> float:
    """Random clips of 16 frames, 4 source frames apart, that one core decodes in a second."""
    chosen = random.Random(0)
    start = time.process_time()
    for _ in range(num_clips):
        shard, sample = chosen.choice(stored)
        stride = SOURCE_STRIDE // sample.frame_stride
        first = chosen.randint(0, max(0, sample.num_frames - CLIP_FRAMES * stride))
        numbers = [min(first + stride * number, sample.num_frames - 1) for number in range(CLIP_FRAMES)]
        with shard.open("rb") as file:
            file.seek(sample.offset)
            decode_frames(file.read(sample.size), numbers)
    return num_clips / (time.process_time() - start)


def likeness(videos: Path, shard: Path, sample: Sample) -> float:
    """Mean SSIM of luma between a stored video and its source, thinned and scaled alike."""
    place = Member(str(shard), sample.offset, sample.size, f"{sample.key}.{sample.container}")
    with fetched(place, None) as path, opened(path) as (container, stream):
        ours = [luma(frame) for frame in every(intact_frames(container, stream))]
    source = videos / sample.source
    with opened(source) as (container, stream):
        timing = read_timing(container, stream)
    with opened(source) as (container, stream):
        converter = Converter(CODECS["h264"], 256, stream.sample_aspect_ratio)
        frames = thinned(with_ticks(intact_frames(container, stream), timing), sample.frame_stride)
        theirs = [luma(converter(frame)) for frame in every(frames)]
    require("stored and source frames correspond", len(ours) == len(theirs), sample.source)
    return statistics.mean(ssim(a, b) for a, b in zip(ours, theirs, strict=True))


def every(frames: Iterator[av.VideoFrame]) -> Iterator[av.VideoFrame]:
    return (frame for number, frame in enumerate(frames) if number % SSIM_EVERY == 0)


def luma(frame: av.VideoFrame) -> np.ndarray:
    """Limited-range luma, float64 [H, W]."""
    return frame.reformat(format="gray", dst_color_range="MPEG").to_ndarray().astype(float)


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Structural similarity of two pictures [H, W] with values to 255, over windows of 8x8."""
    height, width = (length // 8 * 8 for length in a.shape)
    x, y = (p[:height, :width].reshape(height // 8, 8, width // 8, 8).swapaxes(1, 2).reshape(-1, 64) for p in (a, b))
    mean_x, mean_y = x.mean(1), y.mean(1)
    covariance = (x * y).mean(1) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    top = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    bottom = (mean_x**2 + mean_y**2 + c1) * (x.var(1) + y.var(1) + c2)
    return float((top / bottom).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", type=Path, help="folder of intact videos")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--copies", type=int, default=4, help="times each video is taken, so that starts count less")
    parser.add_argument("--clips", type=int, default=200, help="random clips to decode for each codec")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu")
    arguments = parser.parse_args()
    if shutil.which("ffmpeg") is None:
        raise InputError("ffmpeg is not installed: it is what ours is compared with (Debian: apt-get install ffmpeg)")
    av.logging.set_level(None)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        many = folder / "many"
        for item in read_inputs(str(arguments.videos), None, unlabelled=True):
            for number in range(arguments.copies):
                link = many / str(number) / item.source
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to((arguments.videos / item.source).absolute())
        memory = memory_rows(folder)
        speed = speed_rows(many, folder, arguments.processes, arguments.repetitions)
        storage = storage_rows(arguments.videos, folder, arguments.processes, arguments.clips)
    version = subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True).stdout.splitlines()[0]
    about = machine(torch.device("cpu")) | {"processes": arguments.processes, "ffmpeg": version}
    about["load_average"] = f"{os.getloadavg()[1]:.1f} over the last 5 minutes, on {os.cpu_count()} cores"
    notes = [
        f"Each video taken {arguments.copies} times; ways in turns, median of {arguments.repetitions} turns.",
        "Processor time counts all child processes and does not suffer from what else the machine does.",
    ]
    write_results(arguments.output, "shard_speed", speed, about, notes)
    write_results(arguments.output, "shard_storage", storage, about, [f"{arguments.clips} random clips, one core."])
    write_results(arguments.output, "shard_memory", memory, about, ["One video of 10 minutes, 1920x1080, 25 fps."])
    for row in (*speed, *storage, *memory):
        print(row)


if __name__ == "__main__":
    run_command(main)
