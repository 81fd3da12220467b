"""What threads and prefetched batches are worth: how the defaults of data.num_threads, data.prefetch and
data.dali_threads were chosen.

    python benchmarks/data/loader_settings.py VIDEOS [--encode h264] [--threads 1 2 4] [--prefetch 1 2 3 4]
        [--dali-threads 4 7 14] [--output FOLDER]

VIDEOS is a folder; shards are made of it as for pipeline_throughput.py. Every pair of threads and prefetch, and every
number of DALI's threads, where DALI decodes all (on a CPU, of vp9 or mjpeg), gets a process of its own and two
measurements: clips a second if nobody does anything with them, and the share of the time that a training
step would wait which leaves the CPU alone and takes a quarter longer than a batch takes to make.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.harness import Row, default_output, in_fresh_process, machine, rows_of, write_results
from benchmarks.peers.loaders import NUM_FRAMES, SIDE
from benchmarks.pipeline_throughput import FRAME_STRIDE, WARM_UP_BATCHES, check, kept_folder, memory_mib, prepare
from common.devices import choose_device
from common.errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.plan import Plan
from pipeline.shards.dataset import ShardDataset

LOAD = 0.8  # of a step, how long a batch takes to make


def main() -> None:
    options = parse(sys.argv[1:])
    device = choose_device()
    folder = (options.work or kept_folder(options.videos)) / options.encode
    prepare(options.videos, folder, options.encode)
    settings = [
        DataConfig(frame_stride=FRAME_STRIDE, num_threads=threads, prefetch=prefetch)
        for threads in options.threads
        for prefetch in options.prefetch
    ]
    of_dali = options.dali_threads if options.dali_threads is not None else [4, 7, 14] * (device.type == "cuda")
    settings += [DataConfig(frame_stride=FRAME_STRIDE, decoder="dali", dali_threads=threads) for threads in of_dali]
    about = machine(device, ("av", "nvidia-dali-cuda130"))
    about |= {"encode": options.encode, "batch_size": options.batch_size}
    output = options.output or default_output(device)

    def measured(config: DataConfig) -> Row:
        found: Row = in_fresh_process(measure, folder, config, options.batch_size, options.seconds, device.type)
        return found

    def report(rows: list[Row]) -> None:
        write_results(output, "loader_settings", rows, about, [NOTE.format(seconds=options.seconds)])

    rows_of(settings, measured, report, unit="pair")
    print((output / "loader_settings.md").read_text(encoding="utf-8"))


NOTE = (
    f"Clips of {NUM_FRAMES} frames, {SIDE}², every {FRAME_STRIDE}th source frame; two rounds of {{seconds:g}} s after"
    f" {WARM_UP_BATCHES} batches. wait_share: of the time of steps of which {LOAD:.0%} would do to make the next batch,"
    " how much the loop stands waiting."
)


def measure(folder: Path, config: DataConfig, batch_size: int, seconds: float, device: str) -> Row:
    """Both figures of one pair of settings; called in a process of its own."""
    torch.set_num_threads(1)
    dataset = ShardDataset.open(folder)
    plan = Plan(dataset, config, num_frames=NUM_FRAMES, image_size=SIDE, seed=0, batch_size=batch_size)
    with ClipLoader(dataset, plan, torch.device(device), config, None, sharing=None) as loader:
        check(dataset, plan, next(loader.batches(0)).clip.permute(0, 2, 3, 4, 1).cpu().numpy())
        batches = loader.batches(0)
        for _ in range(WARM_UP_BATCHES):
            next(batches)
        a_batch = seconds_a_batch(batches, seconds, pause=0)
        waited, started = loader.counters["wait_seconds"], time.perf_counter()
        seconds_a_batch(batches, seconds, pause=a_batch / LOAD)
        waited = loader.counters["wait_seconds"] - waited
        return {
            "threads": config.threads,
            "prefetch": config.prefetch,
            "dali_threads": config.dali_threads,
            "clips_per_second": batch_size / a_batch,
            "wait_share": waited / (time.perf_counter() - started),
            "memory_mib": memory_mib(),
        }


def seconds_a_batch(batches: Iterator[Batch], seconds: float, pause: float) -> float:
    """Take batches for so long, and pause after each."""
    started, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        next(batches)
        time.sleep(pause)
        count += 1
    return passed / count


def parse(arguments: list[str]) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", type=Path, help="folder of videos")
    parser.add_argument("--encode", default="h264", help="of make_shards.py")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({max(1, cores // 2), cores, 2 * cores}))
    parser.add_argument("--prefetch", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument("--dali-threads", type=int, nargs="*", help="default: 4 7 14 on a GPU")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each of the two measurements")
    parser.add_argument("--work", type=Path, help="folder that keeps the shards")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(arguments)
    if not options.videos.is_dir():
        raise InputError(f"{options.videos} is no folder of videos")
    if options.batch_size < 1 or options.seconds <= 0:
        raise InputError("--batch-size and --seconds must be above 0")
    return options


if __name__ == "__main__":
    run_command(main)
