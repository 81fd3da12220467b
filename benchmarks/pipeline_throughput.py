"""Measure data-loading throughput on real videos: this loader beside others, on the same videos and cores.

    python benchmarks/pipeline_throughput.py VIDEOS [--encodes h264 mjpeg copy] [--seconds 10] [--output FOLDER]

VIDEOS is a folder. Shards are made with every encode (kept in --work), and each loader runs in a process of its own,
over the original files and over files of the same re-encoded bytes as in the shards. SPDL, torchcodec and decord take
part if they are installed: `pip install -e .[peers]`, and FFmpeg's shared libraries for the first two (SPDL 0.8,
torchcodec 0.17 and decord2 3.4 were found to work with FFmpeg 5.1, Debian 12's package ffmpeg). They cut the very clips
that this loader (`adamae`) cuts, and these are checked first. The bound is `decoding`: PyAV from packets to frames of
the same clips, in as many threads, without anything else. Clips per CPU-second is the metric that other programs on the
machine do not disturb.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import (
    ROOT,
    Report,
    Row,
    cpu_seconds,
    in_fresh_process,
    measure_cases,
    print_table,
    require,
)
from adamae.benchmarks.peers.loaders import NUM_FRAMES, PEERS, SIDE, load_batches
from adamae.common.cpus import count_cpus
from adamae.common.devices import choose_device
from adamae.common.errors import InputError, run_command
from adamae.pipeline.config import DEFAULT_STRIDE, DataConfig
from adamae.pipeline.decoding.containers import main_stream, open_video
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.decoding.video import Video
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.plan import PlanRow, TrainingPlan
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.shard_tools.plan import make_key

PEER_BATCH = 8
WARM_UP_BATCHES = 4
CHECKED_CLIPS = 16  # which take a second of many cores
MAX_DIFFERENCE = 4  # gray levels, on average over a clip, from PIL's scaling
NOTE = (
    f"Clips of {NUM_FRAMES} frames, {SIDE}², every {DEFAULT_STRIDE}th source frame, after {WARM_UP_BATCHES}"
    " batches, in as many threads or worker processes as there are cores. relative_to_reference: clips per CPU-second,"
    f" relative to the fastest of {', '.join(PEERS)} on the original files, or the first row without them. decoding:"
    " packets to frames alone. dali_share: of the clips, PyAV decodes the others. videos_left_out: what a loader reads"
    " wrong, and is not measured with."
)


class Case(NamedTuple):
    """One row of the table."""

    loader: str  # adamae, decoding or one of PEERS
    decoder: str
    encode: str  # of the shards; original: the files as they were
    repeats: int = 1  # clips per decoded video
    batch_size: int = PEER_BATCH


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_videos(["h264", "mjpeg", "copy"])
    parser.add_argument("--seconds", type=float, default=10.0, help="measuring time per loader")
    of_own = "of this loader; auto: whole batches go to whoever is free"
    parser.add_argument(
        "--decoders", nargs="+", choices=("pyav", "dali", "auto"), default=["pyav"], help=of_own
    )
    options = parser.parse_args(arguments)
    device = choose_device()
    work = prepare_shards(options.videos, options.work, {*options.encodes, "copy"})
    videos = len(ShardDataset.open(work / "copy").samples)
    about = {"videos": videos, "seconds": options.seconds, "threads": count_cpus()}
    report = Report("pipeline_throughput", options.output, device, [NOTE], **about)
    batch_size = options.batch_size or (64 if device.type == "cuda" else PEER_BATCH)
    cases = list_cases(options.encodes, options.decoders, batch_size)
    measure_case = partial(in_fresh_process, measure, work, options.seconds, device.type)
    print_table(measure_cases(report, cases, measure_case, make_rows))


def list_cases(encodes: list[str], decoders: list[str], batch_size: int) -> list[Case]:
    """List the peers on the original files, then every loader on every encode."""
    peers = [name for name in PEERS if find_spec(name)]
    cases = [Case(name, name, "original") for name in peers]
    for encode in encodes:
        if encode != "copy":  # copied files are the originals
            cases += [Case(name, name, encode) for name in peers]
        cases.append(Case("decoding", "pyav", encode))
        cases += [
            Case("adamae", decoder, encode, repeats, batch_size)
            for decoder in decoders
            for repeats in (1, 2)
        ]
    return cases


def make_rows(found: dict[Case, list[Row]]) -> list[Row]:
    rows = [{**case._asdict(), **measured} for case, (measured,) in found.items()]
    peers = [row for row in rows if row["loader"] in PEERS and row["encode"] == "original"]
    reference = max(row["clips_per_cpu_second"] for row in peers or rows[:1])
    return [
        {**row, "relative_to_reference": row["clips_per_cpu_second"] / reference} for row in rows
    ]


def prepare_shards(videos: Path, work: Path | None, encodes: Iterable[str]) -> Path:
    """Make shards of the videos with every encode, such as h264 or h264-size (--tune size), each in a folder of the one
    that is returned.

    Their samples are written beside them as files, for the loaders that need files.
    """
    work = work or Path(tempfile.gettempdir()) / "adamae-pipeline-throughput" / make_key(
        str(videos.resolve())
    )
    for encode in encodes:
        codec, _, tune = encode.partition("-")
        settings = ["--encode", codec, *(["--tune", tune] if tune else []), "--unlabeled"]
        command = [
            sys.executable,
            str(ROOT / "shard_tools" / "make_shards.py"),
            str(videos),
            str(work / encode),
        ]
        if subprocess.run([*command, *settings], stdout=subprocess.DEVNULL).returncode:
            raise InputError(f"making shards of {videos} failed, see above")
        write_files(work / encode)
    return work


def write_files(folder: Path) -> None:
    """Write the samples of shards as files; MP4s without fragments, which decord cannot read."""
    dataset = ShardDataset.open(folder)
    (folder / "files").mkdir(exist_ok=True)
    for index, sample in enumerate(dataset.samples):
        path = file_of(dataset, folder, index)
        if path.exists():
            continue
        if sample.container != "mp4":
            path.write_bytes(dataset.read_video(index))
            continue
        with open_video(dataset.read_video(index)) as source, av.open(path, "w") as target:
            video = main_stream(source)
            assert video is not None
            stream = target.add_stream_from_template(video)
            for packet in source.demux(video):
                if packet.dts is not None:  # the demuxer's last one is empty
                    packet.stream = stream
                    target.mux(packet)


def file_of(dataset: ShardDataset, folder: Path, index: int) -> Path:
    return folder / "files" / f"{index:06d}.{dataset.samples[index].container}"


def measure(work: Path, seconds: float, device: str, case: Case) -> Row:
    """Run one loader for `seconds`, in a process of its own."""
    torch.set_num_threads(1)
    folder = work / ("copy" if case.encode == "original" else case.encode)
    with open_batches(case, folder, torch.device(device)) as (batches, columns):
        for _ in range(WARM_UP_BATCHES):
            next(batches)
        clips, cpu, started = 0, cpu_seconds(), time.perf_counter()
        while (wall := time.perf_counter() - started) < seconds:
            clips += next(batches)
        cpu = cpu_seconds() - cpu
    speeds = {
        "clips_per_second": clips / wall,
        "clips_per_cpu_second": clips / cpu,
        "cores_busy": cpu / wall,
    }
    return {**speeds, **columns}


@contextmanager
def open_batches(
    case: Case, folder: Path, device: torch.device
) -> Iterator[tuple[Iterator[int], Row]]:
    """Open the sizes of the batches as they come; columns of the loader's own are complete at the end of the block."""
    dataset, columns = (
        ShardDataset.open(folder),
        dict[str, Any](dali_share=None, videos_left_out=[]),
    )
    plan = make_plan(dataset, DataConfig(), case.batch_size)
    if case.loader == "adamae":
        config = DataConfig(
            decoder=case.decoder,  # type: ignore[arg-type]
            repeats=case.repeats,
            num_workers=count_cpus(),
        )
        with open_loader(folder, config, case.batch_size, device) as loader:
            yield (len(batch.keys) for batch in loader.batches(0)), columns
            if case.decoder != "pyav":
                columns["dali_share"] = loader.counters["dali_clips"] / loader.counters["clips"]
    elif case.loader == "decoding":
        decode = partial(decode_only, dataset)
        yield map(len, load_batches(decode, map(plan.row, count()), case.batch_size)), columns
    else:

        def cut(row: PlanRow) -> Tensor:
            return PEERS[case.loader](str(file_of(dataset, folder, row.sample)), row)

        every_video = [plan.row(number) for number in range(plan.clips_per_epoch)]
        faults = find_faults(dataset, every_video, cut)
        for fault in faults.values():
            print(f"{case.loader} is not measured with {fault}", file=sys.stderr)
        right = len(every_video) - len(faults)
        require(
            f"{case.loader} reads most videos right",
            right > len(faults),
            f"{right} of {len(every_video)}",
        )
        columns["videos_left_out"] = [dataset.samples[sample].key for sample in faults]
        rows = (row for row in map(plan.row, count()) if row.sample not in faults)
        yield map(len, load_batches(cut, rows, case.batch_size)), columns


def decode_only(dataset: ShardDataset, row: PlanRow) -> Tensor:
    """Decode the frames of a clip, and drop them: no cropping, scaling or colors."""
    video = dataset.read_clip(row.sample, row.frames)
    return torch.tensor(sum(1 for _ in Video(video.data, video.num_frames).frames(video.numbers)))


@contextmanager
def open_loader(
    folder: Path, config: DataConfig, batch_size: int, device: torch.device
) -> Iterator[ClipLoader]:
    """Open this repository's loader over shards, and check its first batch."""
    dataset = ShardDataset.open(folder)
    plan = make_plan(dataset, config, batch_size)
    with ClipLoader(dataset, plan, device, config, None) as loader:
        rows, clips = plan.batch(0), next(loader.batches(0)).clip.cpu()
        faults = find_faults(dataset, rows[:CHECKED_CLIPS], lambda row: clips[rows.index(row)])
        require("clips are what the plan says", not faults, "; ".join(faults.values()))
        yield loader


def make_plan(dataset: ShardDataset, config: DataConfig, batch_size: int) -> TrainingPlan:
    return TrainingPlan(
        dataset, config, num_frames=NUM_FRAMES, image_size=SIDE, seed=0, batch_size=batch_size
    )


def find_faults(
    dataset: ShardDataset, rows: Sequence[PlanRow], cut: Callable[[PlanRow], Tensor]
) -> dict[int, str]:
    """Return what is wrong with the clips that `cut` makes, by sample."""

    def find(row: PlanRow) -> str:
        try:
            return find_fault(dataset, row, cut(row).numpy())
        except Exception as error:  # each library raises what it likes
            return f"{type(error).__name__}: {error}"[:200]

    with ThreadPoolExecutor() as pool:
        faults = list(pool.map(find, rows))
    faulty = {}
    for row, fault in zip(rows, faults, strict=True):
        if fault:
            faulty[row.sample] = f"{dataset.describe_location(row.sample)} {fault}"
    return faulty


def find_fault(dataset: ShardDataset, row: PlanRow, clip: np.ndarray) -> str:
    """Compare a clip with whole frames, cropped and scaled with PIL, and with the frames beside them.

    Return what is wrong, "" if nothing is.
    """
    sample = dataset.samples[row.sample]
    if len(clip) != len(row.frames):
        return f"has {len(clip)} frames instead of {len(row.frames)}"
    around = [
        min(max(0, number + step), sample.num_frames - 1)
        for number in row.frames
        for step in (0, -1, 1)
    ]
    frames = decode_frames(dataset.read_video(row.sample), around, sample.num_frames)
    # The plan's boxes are in square pixels, which those of copies need not be.
    x, y, w, h = row.crop.within((sample.width, sample.height), (frames.shape[2], frames.shape[1]))
    crops = (Image.fromarray(frame[y : y + h, x : x + w]) for frame in frames)
    images = [np.asarray(crop.resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for crop in crops]
    expected = np.stack(images)[:, :, :: -1 if row.flip else 1].astype(int)
    right, before, after = (float(np.abs(expected[step::3] - clip).mean()) for step in range(3))
    if right >= MAX_DIFFERENCE:
        return f"is {right:.1f} off"
    return "has the frames beside the right ones" if right > min(before, after) + 0.05 else ""


if __name__ == "__main__":
    run_command(main)
