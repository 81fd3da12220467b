"""Measure data-loading throughput on real videos: our pipeline beside other loaders, on the same videos and cores.

    python benchmarks/pipeline_throughput.py VIDEOS [--encodes h264 mjpeg copy] [--seconds 10] [--output FOLDER]
    python benchmarks/pipeline_throughput.py VIDEOS --loaders ours --encodes h264 --threads 1 2 4 --prefetch 1 2 3 4

VIDEOS is a folder. Shards are made with every encode (kept in --work), and each loader runs in a process of its own,
over the original files and over the same re-encoded bytes as in the shards. SPDL, torchcodec and decord take part if
they can be imported: `pip install -e .[peers]`, and FFmpeg's shared libraries for the first two (SPDL 0.8, torchcodec
0.17 and decord2 3.4 were found to work with FFmpeg 5.1, Debian 12's package ffmpeg). They cut the very clips that ours
cuts, and these are checked first. `pyav` and `webdataset` are the common way, with processes and PIL. The bound is
`decoding`: the CPU time from packets to frames of the same clips, in as many threads. `planes` is what ours takes of a
CPU where a GPU scales: decoding, and copying planes into the memory of a batch. Clips per CPU-second is the metric that
other programs on the machine do not disturb.
"""

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, product
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image

from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import ROOT, Report, Row, find_version, in_fresh_process, measure_cases, print_table, require
from benchmarks.peers.loaders import IMPORTS, NUM_FRAMES, SIDE, STRONG, file_batches, plan_batches, tar_batches
from common.devices import choose_device
from common.errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.decoding.containers import main_stream, open_video
from pipeline.decoding.dali import CPU_CODECS, GPU_CODECS, find_dali_fault
from pipeline.decoding.sources import decode_frames, find_source
from pipeline.decoding.upload import CHUNK_BYTES, HostClips
from pipeline.decoding.video import reduce_unwanted
from pipeline.loader import ClipLoader
from pipeline.planning.crops import FrameSize
from pipeline.planning.plan import PlanRow, TrainingPlan
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice
from shard_tools.plan import make_key

FRAME_STRIDE = 4
BASELINE_BATCH = 8  # one of their workers makes a whole batch: of large ones, few would be made while the clock runs
WARM_UP_BATCHES = 4
CHECKED_CLIPS = 16  # which take a second of many cores
MAX_DIFFERENCE = 4  # gray levels, on average over a clip, from PIL's scaling
PACKAGES = ("av", "nvidia-dali-cuda130", "webdataset", "spdl", "torchcodec", "decord2", "decord")
LOADERS = ("ours", "planes", "decoding", *STRONG, "pyav", "webdataset")


TimeClip = Callable[[VideoSlice, Sample, PlanRow], float | None]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    loader: str  # one of LOADERS
    decoder: str
    encode: str  # of the shards; original: the files as they were
    repeats: int = 1  # clips per decoded video
    batch_size: int = BASELINE_BATCH
    threads: int = 1
    prefetch: int | None = None  # batches, of ours
    dali_threads: int | None = None  # of ours


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    device = choose_device()
    work = prepare_shards(options.videos, options.work, {*options.encodes, "copy"})
    note = (
        f"Clips of {NUM_FRAMES} frames, {SIDE}², every {FRAME_STRIDE}th source frame. {options.seconds:g} s per loader"
        f" after {WARM_UP_BATCHES} batches. relative_to_reference: clips per CPU-second, relative to the fastest of"
        f" {', '.join(STRONG)} on the original files, or the first row without them. decoding: packets to frames alone."
        " videos_left_out: what a loader reads wrong, and is not measured with."
    )
    videos = len(ShardDataset.open(work / "copy").samples)
    report = Report("pipeline_throughput", options.output, device, [note], PACKAGES, videos=videos)

    def write_table(rows: list[Row]) -> None:
        add_relative_speed(rows)
        report.write(rows)
        print_table(rows[-1:])

    measure_case = partial(in_fresh_process, measure, work=work, seconds=options.seconds, device=device.type)
    if not (cases := list_cases(options, device)):
        raise InputError(f"nothing to measure: DALI decodes no {' or '.join(options.encodes)} here {find_dali_fault()}")
    measure_cases(cases, measure_case, write_table, unit="loader")


def add_relative_speed(rows: list[Row]) -> None:
    others = [row for row in rows if row["loader"] in STRONG and row["encode"] == "original"]
    reference = max(others or rows[:1], key=lambda row: row["clips_per_cpu_second"])
    for row in rows:
        row["relative_to_reference"] = row["clips_per_cpu_second"] / reference["clips_per_cpu_second"]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_videos()
    parser.set_defaults(encodes=["h264", "mjpeg", "copy"])
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, help="default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="measuring time per loader")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[cores], help="threads or worker processes")
    prefetch = [DataConfig.prefetch]
    parser.add_argument("--prefetch", type=at_least(1), nargs="+", default=prefetch, help="batches, of ours")
    decoders = ("pyav", "dali")
    parser.add_argument("--decoders", nargs="+", choices=decoders, default=decoders, help="of ours; default: all")
    parser.add_argument(
        "--dali-threads", type=at_least(1), nargs="+", default=[None], help="of ours; default: the loader's"
    )
    return parser.parse_args(arguments)


def list_cases(options: argparse.Namespace, device: torch.device) -> list[Case]:
    """List the others, then ours with every decoder; threads and prefetched batches vary for ours only."""
    on_gpu = device.type == "cuda"
    loaders = options.loaders or LOADERS
    others = [name for name in (*STRONG, "pyav") if name in loaders and (name == "pyav" or can_import(name))]
    cases = [Case(name, name, "original", threads=options.threads[0]) for name in others]
    ours: list[tuple[str, str, int]] = []
    for encode in options.encodes:
        if encode != "copy":  # copied files are the originals
            cases += [Case(name, name, encode, threads=options.threads[0]) for name in others]
        common = [name for name in ("webdataset", "planes", "decoding") if name in loaders]
        cases += [Case(name, "pyav", encode, threads=options.threads[0]) for name in common]
        ours.append(("pyav", encode, 1))
        if not find_dali_fault() and encode.partition("-")[0] in (GPU_CODECS if on_gpu else CPU_CODECS):
            ours.append(("dali", encode, 1))
        if encode != "copy":
            ours.append(("pyav", encode, 2))
    batch_size = options.batch_size or (64 if on_gpu else BASELINE_BATCH)
    for (decoder, encode, repeats), *sizes in product(ours, options.threads, options.prefetch, options.dali_threads):
        if "ours" in loaders and decoder in options.decoders:
            cases.append(Case("ours", decoder, encode, repeats, batch_size, *sizes))
    return cases


def can_import(loader: str) -> bool:
    """Whether a library is installed and finds its own libraries; say so on stderr if it does not find them."""
    if not any(find_version(package) for package in (loader, f"{loader}2")):  # decord2 is imported as decord
        return False
    tried = subprocess.run([sys.executable, "-c", IMPORTS[loader]], capture_output=True, text=True)
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1]
        print(f"skipping {loader}: it is installed, but cannot be imported ({reason})", file=sys.stderr)
    return tried.returncode == 0


def prepare_shards(videos: Path, work: Path | None, encodes: Iterable[str]) -> Path:
    """Make shards of the videos with every encode, such as h264 or h264-size (--tune size), each in a folder of the one
    that is returned.

    Their samples are written beside them as files, for the loaders that need files.
    """
    work = work or Path(tempfile.gettempdir()) / "adamae-pipeline-throughput" / make_key(str(videos.resolve()))
    for encode in encodes:
        codec, _, tune = encode.partition("-")
        settings = ["--encode", codec, *(["--tune", tune] if tune else []), "--unlabeled"]
        command = [sys.executable, str(ROOT / "shard_tools" / "make_shards.py"), str(videos), str(work / encode)]
        if subprocess.run([*command, *settings], stdout=subprocess.DEVNULL).returncode:
            raise InputError(f"making shards of {videos} failed, see above")
        dataset = ShardDataset.open(work / encode)
        reader = Reader(dataset)
        files = work / encode / "files"
        files.mkdir(exist_ok=True)
        for index, sample in enumerate(dataset.samples):
            path = file_of(work / encode, dataset, index)
            if not path.exists():
                data = reader.read(index)
                path.write_bytes(remux(data) if sample.container == "mp4" else data)
    return work


def file_of(folder: Path, dataset: ShardDataset, index: int) -> Path:
    sample = dataset.samples[index]
    return folder / "files" / f"{sample.key.replace('/', '_')}.{sample.container}"


def remux(data: bytes) -> bytes:
    """Return the packets of the video in an MP4 without fragments, which decord cannot read, and other streams."""
    plain = io.BytesIO()
    with open_video(data) as source, av.open(plain, "w", format="mp4") as target:
        video = main_stream(source)
        assert video is not None
        stream = target.add_stream_from_template(video)
        for packet in source.demux(video):
            if packet.dts is not None:  # the demuxer's last one is empty
                packet.stream = stream
                target.mux(packet)
    return plain.getvalue()


def measure(case: Case, work: Path, seconds: float, device: str) -> Row:
    """Run one loader for `seconds`, in a process of its own."""
    torch.set_num_threads(1)
    folder = work / ("copy" if case.encode == "original" else case.encode)
    if case.loader == "decoding":
        return {**asdict(case), **measure_clips(time_decoding, folder, case.threads, seconds)}
    if case.loader == "planes":
        return {**asdict(case), **measure_clips(time_planes, folder, case.threads, seconds)}
    with open_batches(case, folder, torch.device(device)) as (batches, loader, left_out):
        for _ in range(WARM_UP_BATCHES):
            next(batches)
        before = loader.counters if loader else {}
        cpu, started = cpu_seconds(), time.perf_counter()
        clips = 0
        while time.perf_counter() - started < seconds:
            clips += next(batches)
        wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        counts = {name: value - before[name] for name, value in loader.counters.items()} if loader else {}
        memory = memory_mib()
    return {
        **asdict(case),
        "clips_per_second": clips / wall,
        "clips_per_cpu_second": clips / cpu,
        "cores_busy": cpu / wall,
        "frames_decoded_per_delivered": counts["frames_decoded"] / (clips * NUM_FRAMES) if counts else None,
        "dali_share": counts["dali_clips"] / counts["clips"]
        if counts
        else None,  # where it fails, PyAV decodes instead
        "memory_mib": memory,
        "videos_left_out": left_out,
    }


def measure_clips(time_clip: TimeClip, folder: Path, threads: int, seconds: float) -> Row:
    """Time the clips of the plan, each in one of the threads: where these share a core, a clip takes longer."""
    dataset = ShardDataset.open(folder)
    plan, reader = make_plan(dataset, BASELINE_BATCH), Reader(dataset)
    left_out: set[str] = set()
    started = time.perf_counter()

    def measure_thread(first: int) -> tuple[int, float]:
        clips, cpu = 0, 0.0
        for row in map(plan.row, count(first, threads)):
            sample = dataset.samples[row.sample]
            if (taken := time_clip(reader.clip(row.sample, row.frames), sample, row)) is None:
                left_out.add(sample.key)
            else:
                clips, cpu = clips + 1, cpu + taken
            if time.perf_counter() - started >= seconds and row.position >= plan.clips_per_epoch:
                return clips, cpu
        raise AssertionError("the plan is endless")

    with ThreadPoolExecutor(threads) as pool:
        clips, cpu = map(sum, zip(*pool.map(measure_thread, range(threads)), strict=True))
    require("most videos decode alone", len(left_out) < len(dataset.samples) / 2, f"{len(left_out)} do not")
    speed = clips / cpu
    return {
        "clips_per_second": speed * threads, "clips_per_cpu_second": speed, "cores_busy": threads,
        "videos_left_out": sorted(left_out),
    }  # fmt: skip


def time_planes(video: VideoSlice, sample: Sample, row: PlanRow) -> float | None:
    """Return the CPU seconds from packets to planes that the device scales; None if it does not scale these."""
    host = HostClips((1, NUM_FRAMES, SIDE, SIDE, 3), None, takes_frames=True)
    memory = np.ones(CHUNK_BYTES, np.uint8)  # used before, as that of a GPU's batches is
    started = time.thread_time()
    frames = find_source(video.data).copy_planes(
        video, sample, [row], FrameSize(SIDE, SIDE), lambda num_bytes: (0, memory[:num_bytes])
    )
    if frames is None:
        return None
    host.add_frames(0, [row], frames)
    return time.thread_time() - started


def time_decoding(video: VideoSlice, *_: object) -> float | None:
    """Return the CPU seconds that the packets of the wanted frames take, from the key frame before them on; None if
    timestamps do not tell which these are."""
    with open_video(video.data, fpsprobesize="0") as container:
        stream = main_stream(container)
        assert stream is not None
        decoder = stream.codec_context
        decoder.thread_count = 1
        packets = [(packet.pts, packet) for packet in container.demux(stream) if packet.size]
        times = sorted(pts for pts, packet in packets if pts is not None and not packet.is_discard)
        if len(times) < video.num_frames:
            return None
        wanted = {times[number] for number in video.numbers}
        first = max((i for i, (pts, p) in enumerate(packets) if p.is_keyframe and (pts or 0) <= min(wanted)), default=0)
        last = max(i for i, (pts, _) in enumerate(packets) if pts in wanted)
        decoded: set[int | None] = set()
        started = time.thread_time()
        for pts, packet in packets[first : last + 1]:
            reduce_unwanted(decoder, pts in wanted)
            decoded.update(frame.pts for frame in decoder.decode(packet))
        decoded.update(frame.pts for frame in decoder.decode(None))
        seconds = time.thread_time() - started
    return seconds if wanted <= decoded else None


@contextmanager
def open_batches(
    case: Case, folder: Path, device: torch.device
) -> Iterator[tuple[Iterator[int], ClipLoader | None, list[str]]]:
    """Open the sizes of the batches as they come, our loader, and the videos that are left out."""
    if case.loader == "ours":
        config = DataConfig(
            frame_stride=FRAME_STRIDE, decoder=case.decoder, repeats=case.repeats,  # type: ignore[arg-type]
            num_workers=case.threads, prefetch=case.prefetch or DataConfig.prefetch, dali_threads=case.dali_threads,
        )  # fmt: skip
        with open_loader(folder, config, case.batch_size, NUM_FRAMES, SIDE, device) as loader:
            yield (len(batch.keys) for batch in loader.batches(0)), loader, []
        return
    dataset = ShardDataset.open(folder)
    if case.loader in STRONG:
        batches, left_out = open_strong(case, folder, dataset)
        yield map(len, batches), None, left_out
        return
    stride = FRAME_STRIDE // dataset.samples[0].frame_stride
    if case.loader == "webdataset":
        batches = tar_batches(sorted(folder.glob("*.tar")), stride, case.batch_size, case.threads)
    else:
        batches = file_batches(sorted((folder / "files").iterdir()), stride, case.batch_size, case.threads)
    shape = tuple(next(batches).shape)
    whole = (case.batch_size, NUM_FRAMES, 3, SIDE, SIDE)
    require("a baseline gives whole clips", shape == whole, f"{shape} instead of {whole}")
    yield map(len, batches), None, []


def open_strong(case: Case, folder: Path, dataset: ShardDataset) -> tuple[Iterator[torch.Tensor], list[str]]:
    """Return the batches of a strong loader over the videos that it reads right, and the other videos.

    Original files are read from the disk, the bytes of shards from memory.
    """

    def open_source(sample: int) -> str | bytes:
        path = file_of(folder, dataset, sample)
        return str(path) if case.encode == "original" else path.read_bytes()

    cut, plan, reader = STRONG[case.loader], make_plan(dataset, case.batch_size), Reader(dataset)
    left_out: dict[int, str] = {}  # samples, and their keys
    for row in map(plan.row, range(plan.clips_per_epoch)):
        try:
            fault = find_fault(reader, dataset, row, cut(open_source(row.sample), row).numpy())
        except Exception as error:  # each library raises what it likes
            fault = f"{type(error).__name__}: {error}"
        if fault:
            left_out[row.sample] = dataset.samples[row.sample].key
            print(f"{case.loader} is not measured with {dataset.where(row.sample)}: {fault[:200]}", file=sys.stderr)
    right = plan.clips_per_epoch - len(left_out)
    require(f"{case.loader} reads most videos right", right > len(left_out), f"{right} of {plan.clips_per_epoch}")
    rows = (row for row in map(plan.row, count()) if row.sample not in left_out)
    return plan_batches(cut, rows, open_source, case.batch_size, case.threads), list(left_out.values())


@contextmanager
def open_loader(
    folder: Path, config: DataConfig, batch_size: int, num_frames: int, side: int, device: torch.device
) -> Iterator[ClipLoader]:
    """Open our loader over shards, and check its first batch."""
    dataset = ShardDataset.open(folder)
    plan = TrainingPlan(dataset, config, num_frames=num_frames, image_size=side, seed=0, batch_size=batch_size)
    with ClipLoader(dataset, plan, device, config, None) as loader:
        check_clips(dataset, plan, next(loader.batches(0)).clip.cpu().numpy())
        yield loader


def make_plan(dataset: ShardDataset, batch_size: int) -> TrainingPlan:
    """Plan the clips that everybody cuts: those of our loader."""
    config = DataConfig(frame_stride=FRAME_STRIDE)
    return TrainingPlan(dataset, config, num_frames=NUM_FRAMES, image_size=SIDE, seed=0, batch_size=batch_size)


def check_clips(dataset: ShardDataset, plan: TrainingPlan, clips: np.ndarray) -> None:
    """Require that clips, as far as they are checked, are those of the plan's first batch."""
    reader, rows = Reader(dataset), plan.batch(0)[:CHECKED_CLIPS]
    with ThreadPoolExecutor() as pool:
        faults = list(pool.map(partial(find_fault, reader, dataset), rows, clips))
    for row, fault in zip(rows, faults, strict=True):
        require("clips are what the plan says", not fault, f"{dataset.where(row.sample)} {fault}")


def find_fault(reader: Reader, dataset: ShardDataset, row: PlanRow, clip: np.ndarray) -> str:
    """Compare a clip with whole frames, cropped and scaled with PIL, and with the frames beside them.

    Return what is wrong, "" if nothing is.
    """
    sample = dataset.samples[row.sample]
    if len(clip) != len(row.frames):
        return f"has {len(clip)} frames instead of {len(row.frames)}"
    around = [min(max(0, number + step), sample.num_frames - 1) for number in row.frames for step in (0, -1, 1)]
    size = clip.shape[2], clip.shape[1]
    frames = decode_frames(reader.read(row.sample), around, sample.num_frames)
    # The plan's boxes are in square pixels, which those of copies need not be.
    x, y, w, h = row.crop.within((sample.width, sample.height), (frames.shape[2], frames.shape[1]))
    images = [
        Image.fromarray(frame).crop((x, y, x + w, y + h)).resize(size, Image.Resampling.BILINEAR) for frame in frames
    ]
    expected = np.stack([np.asarray(image)[:, :: -1 if row.flip else 1] for image in images]).astype(int)
    right, before, after = (float(np.abs(expected[step::3] - clip).mean()) for step in range(3))
    if right >= MAX_DIFFERENCE:
        return f"is {right:.1f} off"
    return "has the frames beside the right ones" if right > min(before, after) + 0.05 else ""


def cpu_seconds() -> float:
    """Return user and system time of this process and of those that work for it so far."""
    ticks = 0
    for process in list_family("self"):
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib() -> float:
    """Return the resident memory of this process and of those that work for it, shared pages counted once."""
    sizes = [Path(f"/proc/{process}/smaps_rollup").read_text() for process in list_family("self")]
    return sum(int(text.split("Pss:")[1].split()[0]) for text in sizes) / 1024


def list_family(process: str) -> list[str]:
    """List a process, its children, and theirs."""
    lists = Path(f"/proc/{process}/task").glob("*/children")  # of each thread; not every kernel has them
    children = [child for found in lists for child in found.read_text().split()]
    return [process, *(member for child in children for member in list_family(child))]


if __name__ == "__main__":
    run_command(main)
