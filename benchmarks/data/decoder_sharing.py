"""What a clip costs by its place in a video, and what DALI and PyAV make side by side.

    python benchmarks/data/decoder_sharing.py [--encode vp9] [--threads 1] [--dali-threads 1] [--rounds 5]
        [--batch-sizes 8 32] [--output FOLDER]

Draws videos of 400 frames, 336x256, stores them with a key frame every 8 frames, and measures two things.
clip_places: milliseconds of a clip of 16 frames that begins at the first, middle or last possible frame, by either
decoder, from the groups of pictures that it needs and from the whole video. decoder_sharing: clips a second of both
decoders at once, as two processes and as one loader that has found how to share, in turns; the loader should make what
the two processes make.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from benchmarks.harness import (
    ROOT,
    Row,
    default_output,
    in_fresh_process,
    machine,
    require,
    side_by_side,
    stolen_seconds,
    write_results,
)
from benchmarks.peers.loaders import NUM_FRAMES, SIDE
from common.devices import choose_device
from common.errors import InputError, run_command
from common.progress import progress_bar
from pipeline.config import DataConfig
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.crops import Crop, FrameSize
from pipeline.planning.plan import ClipPlan, Plan, PlanRow
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.groups import Groups
from shard_tools.encoding.codecs import CODECS

LENGTH, WIDTH, HEIGHT, NUM_VIDEOS = 400, 336, 256, 4
PLACES = {"first": 0.0, "middle": 0.5, "last": 1.0}
BATCH = 8  # of clips at one place
WARM_UP = 2  # batches
SETTLING_S = 4.0  # for each clip of a batch, so some 400 batches: of both decoders in one loader, before it is timed


@dataclass(frozen=True)
class Uncut(ShardDataset):
    """Read as shards without a table of groups are."""

    def groups(self, sample: int) -> Groups | None:
        return None


class AtPlace(ClipPlan):
    """Batches of clips at one place of their videos."""

    num_frames, frame_size, batch_size, views = NUM_FRAMES, FrameSize.of(SIDE), BATCH, 1

    def __init__(self, place: float, count: int) -> None:
        self._count = count
        start = round(place * (LENGTH - NUM_FRAMES))
        self._frames = tuple(range(start, start + NUM_FRAMES))

    def batch(self, index: int) -> list[PlanRow]:
        if index >= self._count:
            return []
        box = Crop((WIDTH - HEIGHT) // 2, 0, HEIGHT, HEIGHT)
        return [PlanRow(n, 0, n % NUM_VIDEOS, self._frames, box, flip=False) for n in range(BATCH)]

    def replacement(self, row: PlanRow, attempt: int) -> None:
        return None


def main() -> None:
    options = parse(sys.argv[1:])
    device = choose_device()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_shards(Path(scratch), options.encode)
        threads = options.threads, options.dali_threads, device.type
        places = in_fresh_process(measure_places, folder, *threads, options.rounds)
        shared = []
        for batch_size in options.batch_sizes:
            found = Path(scratch) / f"decoders-{batch_size}.jsonl"
            case = Case(folder, "hybrid", *threads, options.seconds, batch_size, found)
            shared += measure_sharing(case, options.rounds)
    about = machine(device, ("av", "nvidia-dali-cuda130"))
    about |= {"encode": options.encode, "threads": options.threads, "dali_threads": options.dali_threads}
    output = options.output or default_output(device)
    size = (
        f"Clips of {NUM_FRAMES} frames, {SIDE}², of videos of {LENGTH} frames, {WIDTH}x{HEIGHT}, a key frame every 8."
    )
    write_results(output, "clip_places", places, about, [f"{size} Batches of {BATCH}; medians of {options.rounds}."])
    rounds = (
        f"Medians of {options.rounds} rounds of {options.seconds:g} s, of {2 * options.rounds} those during which the"
        " host gave the least of the cores' time to others. pyav and dali: at the same time, each in a process of its"
        f" own; both: one loader, with the threads of the two, that goes on after {SETTLING_S:g} s, for each clip of a"
        " batch, of finding how to share."
    )
    write_results(output, "decoder_sharing", shared, about, [f"{size} {rounds}"])
    for name in ("clip_places", "decoder_sharing"):
        print((output / f"{name}.md").read_text(encoding="utf-8"))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encode", choices=CODECS, default="vp9", help="on a CPU, DALI decodes vp9 and mjpeg")
    parser.add_argument("--threads", type=int, default=1, help="of PyAV")
    parser.add_argument("--dali-threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 32], help="that both share (8 and 32)")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(arguments)
    if min(options.threads, options.dali_threads, options.rounds, *options.batch_sizes) < 1 or options.seconds <= 0:
        raise InputError("--threads, --dali-threads, --rounds, --seconds and --batch-sizes must be above 0")
    return options


def make_shards(scratch: Path, encode: str) -> Path:
    draw = [str(scratch / "videos"), "--num-videos", str(NUM_VIDEOS), "--size", f"{WIDTH}x{HEIGHT}"]
    store = [str(scratch / "videos"), str(scratch / "shards"), "--encode", encode, "--frame-stride", "1"]
    for program, arguments in (
        ("synthetic_videos", [*draw, "--num-frames", str(LENGTH)]),
        ("make_shards", [*store, "--unlabelled"]),
    ):
        command = [sys.executable, str(ROOT / "shard_tools" / f"{program}.py"), *arguments]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise InputError(f"{program} failed: see above")
    return scratch / "shards"


def measure_places(folder: Path, threads: int, dali_threads: int, device: str, rounds: int) -> list[Row]:
    """Called in a process of its own."""
    torch.set_num_threads(1)
    cut = ShardDataset.open(folder)
    uncut = Uncut(**{field.name: getattr(cut, field.name) for field in fields(ShardDataset)})
    rows: list[Row] = []
    for decoder in ("pyav", "dali"):
        config = DataConfig(decoder=decoder, num_threads=threads, dali_threads=dali_threads)
        for read, dataset in (("groups", cut), ("whole", uncut)):
            for name, place in PLACES.items():
                rows.append({"decoder": decoder, "read": read, "place": name})
                plan = AtPlace(place, WARM_UP + rounds)
                with ClipLoader(dataset, plan, torch.device(device), config, None) as loader:
                    rows[-1] |= clip_times(loader)
            of_first = rows[-len(PLACES)]["ms_a_clip"]
            for row in rows[-len(PLACES) :]:
                row["times_first"] = row["ms_a_clip"] / of_first
    return rows


def clip_times(loader: ClipLoader) -> Row:
    """Of all batches; frames are decoded ahead of those that are given out, so only their sums are exact."""
    seconds = []
    started = time.perf_counter()
    for batch in loader.batches(0):
        seconds.append(time.perf_counter() - started)
        if len(seconds) == 1:
            check(batch)
        started = time.perf_counter()
    made = loader.counters
    return {
        "ms_a_clip": statistics.median(seconds[WARM_UP:]) * 1e3 / BATCH,
        "frames_decoded_per_delivered": made["frames_decoded"] / made["frames_delivered"],
        "kib_read_a_clip": made["bytes_read"] / made["videos_read"] / 1024,
    }


def check(batch: Batch) -> None:
    """Clips of one video at one place are alike, others are not."""
    clips = batch.clip.cpu()
    same, other = torch.equal(clips[0], clips[NUM_VIDEOS]), torch.equal(clips[0], clips[1])
    require("clips are those of their videos", same and not other, f"same {same}, other {other}")


@dataclass(frozen=True)
class Case:
    """One way to decode batches for a while."""

    folder: Path
    decoder: Literal["pyav", "dali", "hybrid"]
    threads: int
    dali_threads: int
    device: str
    seconds: float
    batch_size: int
    found: Path  # decoders.jsonl, where a hybrid keeps how it shares
    first: int = 0  # batch


class Made(NamedTuple):
    """What a case has made."""

    clips_per_second: float
    share_of_dali: float
    batches: int  # from the first to the last


class Round(NamedTuple):
    """Clips a second."""

    pyav: float  # while DALI decodes beside it
    dali: float  # while PyAV does
    both: float
    share: float  # of DALI
    stolen: float  # of the time of all cores: what the host of a virtual machine gave to others


def measure_sharing(hybrid: Case, rounds: int) -> list[Row]:
    """The quieter half of the rounds; one row a way."""
    settled = in_fresh_process(make, replace(hybrid, seconds=SETTLING_S * hybrid.batch_size))
    hybrid = replace(hybrid, first=settled.batches)
    all_rounds = [measure_round(hybrid) for _ in progress_bar(range(2 * rounds), unit="round")]
    quiet = sorted(all_rounds, key=lambda found: found.stolen)[:rounds]
    rows: list[Row] = [
        {
            "batch": hybrid.batch_size,
            "decoder": name,
            "clips_per_second": statistics.median(getattr(found, name) for found in quiet),
        }
        for name in ("pyav", "dali", "both")
    ]
    of_sum = [found.both / (found.dali + found.pyav) for found in quiet]
    rows[-1] |= {
        "share_of_dali": statistics.median(found.share for found in quiet),
        "share_of_sum": statistics.median(of_sum),
        "share_of_sum_lowest": min(of_sum),
        "share_of_sum_highest": max(of_sum),
        "stolen_highest": quiet[-1].stolen,
    }
    return rows


def measure_round(hybrid: Case) -> Round:
    """Both decoders at once, each in a process of its own, and then in one loader: either way the same threads have
    the same cores. Alone, each would also have what the other leaves idle."""
    before, started = stolen_seconds(), time.perf_counter()
    alone = replace(hybrid, first=0)
    pyav, dali = side_by_side(make, [replace(alone, decoder="pyav"), replace(alone, decoder="dali")])
    both = in_fresh_process(make, hybrid)
    seconds = (time.perf_counter() - started) * (os.cpu_count() or 1)
    stolen = (stolen_seconds() - before) / seconds
    return Round(pyav.clips_per_second, dali.clips_per_second, both.clips_per_second, both.share_of_dali, stolen)


def make(case: Case) -> Made:
    torch.set_num_threads(1)
    dataset = ShardDataset.open(case.folder)
    config = DataConfig(frame_stride=1, decoder=case.decoder, num_threads=case.threads, dali_threads=case.dali_threads)
    plan = Plan(dataset, config, num_frames=NUM_FRAMES, image_size=SIDE, seed=0, batch_size=case.batch_size)
    with ClipLoader(dataset, plan, torch.device(case.device), config, None, case.found) as loader:
        return made_by(loader, case)


def made_by(loader: ClipLoader, case: Case) -> Made:
    batches = loader.batches(case.first)
    for _ in range(4):
        next(batches)
    before, count, started = loader.counters, 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < case.seconds:
        next(batches)
        count += 1
    clips, of_dali = (loader.counters[name] - before[name] for name in ("clips", "dali_clips"))
    return Made(clips / passed, of_dali / clips, 4 + count)


if __name__ == "__main__":
    run_command(main)
