"""Measure data-loading throughput on real videos: this loader beside others, on the same videos.

    python benchmarks/pipeline_throughput.py VIDEOS [--encodes h264 mjpeg copy] [--seconds 10] \
        [--rounds 3] [--output FOLDER]

VIDEOS is a folder. Shards are made with every encode (kept in --work), and each loader runs in a
process of its own, over the original files and over the same re-encoded bytes as in the shards.
SPDL, torchcodec, decord and webdataset (which decodes by torchcodec) take part if they are
installed: `pip install -e .[peers]`, and FFmpeg's shared libraries for SPDL and torchcodec (SPDL
0.8, torchcodec 0.17 and decord2 3.4 were found to work with FFmpeg 5.1, Debian 12's package
ffmpeg).

All cut the clips of one plan, and these are checked before anything is timed. webdataset cuts one
clip of each video again and again, as it streams tars and looks nothing up. The bound is
`decoding`: PyAV from packets to frames of the same clips, in as many threads, without anything
else. `planes` adds the copy that a worker makes beside a GPU, which then scales; torchcodec gives
planes, too. Loaders take turns in every round. Clips per CPU-second, of which other programs on the
machine disturb the least, is a median over rounds.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import NamedTuple

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
from adamae.benchmarks.peers.loaders import (
    FILE_PEERS,
    NUM_FRAMES,
    PEERS,
    SIDE,
    TORCHCODEC,
    WEBDATASET,
    copy_planes_with_torchcodec,
    cut_with_torchcodec,
    load_batches,
    load_with_webdataset,
)
from adamae.common.arguments import between
from adamae.common.cpus import count_cpus
from adamae.common.devices import choose_device
from adamae.common.errors import InputError, run_command
from adamae.pipeline.config import DEFAULT_STRIDE, DataConfig
from adamae.pipeline.decoding.containers import main_stream, open_video
from adamae.pipeline.decoding.encoded import MJPEG
from adamae.pipeline.decoding.gpu_codecs import SESSION_SECONDS
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.decoding.video import Video
from adamae.pipeline.decoding.video_source import VideoSource
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.crops import FrameSize
from adamae.pipeline.planning.plan import PlanRow, TrainingPlan, join_frames
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.shard_tools.plan import make_key

PEER_BATCH = 8
# More than loaders prefetch (DataConfig.prefetch is 3). So processes and threads run, and as many
# batches are ready when the clock starts as when it stops: those that are counted were made
# meanwhile.
WARM_UP_BATCHES = 4
# The check decodes whole videos, which takes a second of many cores for so many clips.
CHECKED_CLIPS = 16
# Gray levels on average over a clip, from PIL's scaling.
MAX_DIFFERENCE = 4
# Gray levels by which a clip may be nearer to the frames beside its own: as much as decoders
# differ. In a video that hardly moves, those frames are within MAX_DIFFERENCE, too.
NEIGHBOR_MARGIN = 0.05
# The same of decoded planes, which nobody has scaled.
MAX_PLANE_DIFFERENCE = 0.5
# Parts of a loader's work, named like loaders.
DECODING = "decoding"
PLANES = "planes"
PARTS = (DECODING, PLANES)
# Columns of numbers, of which a row has medians.
SPEEDS = ("clips_per_second", "clips_per_cpu_second", "cores_busy")
NOTE = (
    f"Clips of {NUM_FRAMES} frames, {SIDE}², every {DEFAULT_STRIDE}th source frame, after"
    f" {WARM_UP_BATCHES} batches (with NVDEC, {SESSION_SECONDS:g} s), in as many threads or worker"
    " processes as there are cores. relative_to_reference: clips per CPU-second, relative to the"
    f" fastest of {', '.join(PEERS)} on the original files, or the first row without them."
    " decoding: packets to frames alone; planes: with one copy, for a GPU to scale. Medians over"
    " rounds; lower and upper: the least and the most clips per CPU-second of a round. dali_share:"
    " of the clips, PyAV decodes the others. videos_left_out: what a loader reads wrong, and is not"
    " measured with."
)


class Case(NamedTuple):
    """One row of the table: a loader, and the files that it reads."""

    # adamae, one of PARTS or one of PEERS
    loader: str
    decoder: str
    # Of the shards; original: the files as they were.
    encode: str
    # Clips per decoded video.
    repeats: int = 1
    batch_size: int = PEER_BATCH


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_videos(["h264", "mjpeg", "copy"])
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="measuring time per loader and round"
    )
    parser.add_argument("--rounds", type=between(1), default=3)
    parser.add_argument(
        "--decoders",
        nargs="+",
        choices=("pyav", "dali", "auto"),
        default=["pyav"],
        help="of this loader; auto: whole batches go to whoever is free",
    )
    options = parser.parse_args(arguments)
    device = choose_device()
    # The shards of `copy` are also where the peers' original files come from, so that all loaders
    # see the same videos: make_shards.py rejects damaged ones.
    work = prepare_shards(options.videos, options.work, {*options.encodes, "copy"})
    about = {
        "videos": len(ShardDataset.open(work / "copy").samples),
        "seconds": options.seconds,
        "threads": count_cpus(),
    }
    report = Report("pipeline_throughput", options.output, device, [NOTE], **about)
    default_batch_size = 64 if device.type == "cuda" else PEER_BATCH
    batch_size = options.batch_size or default_batch_size
    cases = list_cases(options.encodes, options.decoders, batch_size)
    measure_case = partial(in_fresh_process, measure, work, options.seconds, device.type)
    print_table(measure_cases(report, cases, measure_case, make_rows, options.rounds))


def list_peers() -> list[str]:
    """List the peers of which all that they need is installed."""
    return [name for name, modules in PEERS.items() if all(map(find_spec, modules))]


def list_cases(encodes: list[str], decoders: list[str], batch_size: int) -> list[Case]:
    """List the peers on the original files, then every loader on every encode."""
    peers = list_peers()
    cases = [make_peer_case(name, "original") for name in peers]
    for encode in encodes:
        # Copied files are the originals.
        if encode != "copy":
            cases += [make_peer_case(name, encode) for name in peers]
        # The bound, by which a reader sees what the rest of a loader costs: a quarter of the CPU
        # time with h264 (docs/results.md).
        cases.append(Case(DECODING, "pyav", encode))
        # Of copied videos, some have no planes that a GPU takes.
        if encode != "copy":
            cases.append(Case(PLANES, "pyav", encode))
            if TORCHCODEC in peers:
                cases.append(Case(PLANES, TORCHCODEC, encode))
        for decoder, repeats in product(decoders, (1, 2)):
            cases.append(Case("adamae", decoder, encode, repeats, batch_size))
    return cases


def make_peer_case(name: str, encode: str) -> Case:
    """Return the case of a peer, with the library that decodes for it."""
    # webdataset reads tars and decodes nothing, so its decoder is the other library that it needs.
    return Case(name, PEERS[name][-1], encode)


def make_rows(results: dict[Case, list[Row]]) -> list[Row]:
    """Make a row of medians over rounds for each case.

    Its speed is also given relative to the fastest peer's on the original files.
    """
    rows = []
    for case, rounds in results.items():
        # The other columns are equal in all rounds, or as good in one as in another.
        row: Row = {**case._asdict(), **rounds[-1]}
        for column in SPEEDS:
            row[column] = median(measured[column] for measured in rounds)
        speeds = [measured["clips_per_cpu_second"] for measured in rounds]
        rows.append({**row, "lower": min(speeds), "upper": max(speeds), "rounds": len(rounds)})
    # The fastest loader for someone who does not re-encode videos. So the column also shows what
    # re-encoding gives to every loader, which is about ten times the speed.
    references = [row for row in rows if row["loader"] in PEERS and row["encode"] == "original"]
    if not references:
        references = rows[:1]
    reference = max(row["clips_per_cpu_second"] for row in references)
    for row in rows:
        row["relative_to_reference"] = row["clips_per_cpu_second"] / reference
    return rows


def prepare_shards(videos: Path, work: Path | None, encodes: Iterable[str]) -> Path:
    """Make shards of the videos with every encode, each in a folder of the one that is returned.

    An encode is a codec, such as h264, or h264-size: make_shards.py's --tune size. The samples are
    written beside the shards as files, for the loaders that need files. Raise InputError if
    make_shards.py fails.
    """
    if work is None:
        folder_name = make_key(str(videos.resolve()))
        work = Path(tempfile.gettempdir()) / "adamae-pipeline-throughput" / folder_name
    # In a process of its own, as a user makes them. It resumes: what is there is not encoded again.
    program = [sys.executable, str(ROOT / "shard_tools" / "make_shards.py")]
    for encode in encodes:
        codec, _, tune = encode.partition("-")
        settings = ["--encode", codec]
        if tune:
            settings += ["--tune", tune]
        command = [*program, str(videos), str(work / encode), *settings, "--unlabeled"]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
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
        if sample.container == "mp4":
            remux(dataset.read_video(index), path)
        else:
            path.write_bytes(dataset.read_video(index))


def remux(video: bytes, path: Path) -> None:
    """Write the packets of a video into a plain MP4."""
    with open_video(video) as source, av.open(path, "w") as target:
        source_stream = main_stream(source)
        assert source_stream is not None
        stream = target.add_stream_from_template(source_stream)
        for packet in source.demux(source_stream):
            # The demuxer's last packet is empty.
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)


def file_of(dataset: ShardDataset, folder: Path, index: int) -> Path:
    """Return the path of the file that write_files makes of a sample."""
    return folder / "files" / f"{index:06d}.{dataset.samples[index].container}"


def measure(work: Path, seconds: float, device: str, case: Case) -> Row:
    """Run one loader for `seconds`; call it in a process of its own.

    The number of threads of torch and the workers of a loader then end with the process.
    """
    # Every loader has as many threads or processes as there are cores. Those of torch would be
    # further ones, and compete with them.
    torch.set_num_threads(1)
    folder = work / ("copy" if case.encode == "original" else case.encode)
    with open_batches(case, folder, torch.device(device)) as (batch_sizes, columns):
        warm_up(batch_sizes, opens_sessions(case, device))
        # By time instead of by number of clips, since loaders differ by a factor of twenty.
        num_clips = 0
        cpu_start = cpu_seconds()
        start = time.perf_counter()
        elapsed = 0.0
        while elapsed < seconds:
            num_clips += next(batch_sizes)
            elapsed = time.perf_counter() - start
        cpu = cpu_seconds() - cpu_start
    speeds = (num_clips / elapsed, num_clips / cpu, cpu / elapsed)
    return {**dict(zip(SPEEDS, speeds, strict=True)), **columns}


def opens_sessions(case: Case, device: str) -> bool:
    """Return whether NVDEC takes part; JPEGs need no sessions."""
    return device == "cuda" and case.decoder in ("dali", "auto") and case.encode != MJPEG


def warm_up(batch_sizes: Iterator[int], with_sessions: bool) -> None:
    """Take batches that are not timed."""
    start = time.perf_counter()
    for number in count(1):
        next(batch_sizes)
        is_long_enough = not with_sessions or time.perf_counter() - start > SESSION_SECONDS
        if number >= WARM_UP_BATCHES and is_long_enough:
            return


@contextmanager
def open_batches(
    case: Case, folder: Path, device: torch.device
) -> Iterator[tuple[Iterator[int], Row]]:
    """Open the sizes of a loader's batches, as the batches come, and columns of its own.

    The columns are complete at the end of the block. Raise InputError if its clips are wrong.
    """
    columns: Row = {"dali_share": None, "videos_left_out": []}
    dataset = ShardDataset.open(folder)
    plan = make_plan(dataset, DataConfig(), case.batch_size)
    if case.loader == "adamae":
        config = DataConfig(
            decoder=case.decoder,  # type: ignore[arg-type]
            repeats=case.repeats,
            num_workers=count_cpus(),
        )
        with open_loader(folder, config, case.batch_size, device) as loader:
            yield (len(batch.keys) for batch in loader.batches(0)), columns
            # DALI leaves some videos to PyAV, so a speed without this share says little of DALI.
            if case.decoder != "pyav":
                counters = loader.counters
                columns["dali_share"] = counters["dali_clips"] / counters["clips"]
    elif case.loader in PARTS:
        do_part = make_part(case, dataset, folder)
        if case.loader == PLANES:
            check_planes(dataset, plan.batch(0), do_part)

        def count_part(row: PlanRow) -> Tensor:
            # A batch of tensors of one size.
            return torch.tensor(len(do_part(row)))

        yield map(len, load_batches(count_part, map(plan.row, count()), case.batch_size)), columns
    else:
        # An epoch has a row for every video, so every video is checked before it is timed.
        rows = [plan.row(position) for position in range(plan.clips_per_epoch)]
        cut = make_cut(case.loader, dataset, folder)
        faults = find_peer_faults(case.loader, dataset, rows, cut)
        columns["videos_left_out"] = [dataset.samples[sample].key for sample in faults]
        batches: Iterator[Tensor]
        if case.loader == WEBDATASET:
            row_by_key = {
                dataset.samples[row.sample].key: row for row in rows if row.sample not in faults
            }
            shards = sorted(folder.glob("*.tar"))
            batches = load_with_webdataset(shards, row_by_key, case.batch_size)
        else:
            # The same positions of the plan as this repository's loader has, without those videos.
            endless_rows = (row for row in map(plan.row, count()) if row.sample not in faults)
            batches = load_batches(cut, endless_rows, case.batch_size)
        yield map(len, batches), columns


def make_cut(loader: str, dataset: ShardDataset, folder: Path) -> Callable[[PlanRow], Tensor]:
    """Return the function by which a peer cuts a planned clip."""

    def cut_bytes(row: PlanRow) -> Tensor:
        return cut_with_torchcodec(dataset.read_video(row.sample), row)

    def cut_file(row: PlanRow) -> Tensor:
        return FILE_PEERS[loader](str(file_of(dataset, folder, row.sample)), row)

    return cut_bytes if loader == WEBDATASET else cut_file


def find_peer_faults(
    loader: str,
    dataset: ShardDataset,
    rows: Sequence[PlanRow],
    cut: Callable[[PlanRow], Tensor],
) -> dict[int, str]:
    """Return what is wrong with a peer's clips, by sample; print each.

    Raise InputError if most of them are wrong.
    """
    # A few videos that a library cannot read are no reason to leave it out: the row names them. If
    # it reads most of them wrong, it is probably used wrong here, and its speed would say nothing.
    faults = find_faults(dataset, rows, cut)
    for fault in faults.values():
        print(f"{loader} is not measured with {fault}", file=sys.stderr)
    num_right = len(rows) - len(faults)
    require(
        f"{loader} reads most videos right",
        num_right > len(faults),
        f"{num_right} of {len(rows)}",
    )
    return faults


def make_part(case: Case, dataset: ShardDataset, folder: Path) -> Callable[[PlanRow], Sized]:
    """Return the function that does a part of a loader's work for a planned clip."""

    def copy_with_torchcodec(row: PlanRow) -> Tensor:
        return copy_planes_with_torchcodec(str(file_of(dataset, folder, row.sample)), row)

    if case.loader == DECODING:
        return partial(decode_only, dataset)
    return copy_with_torchcodec if case.decoder == TORCHCODEC else partial(copy_planes, dataset)


def decode_only(dataset: ShardDataset, row: PlanRow) -> list[int]:
    """Decode the frames of a clip, and drop them: no cropping, scaling or colors."""
    video = dataset.read_clip(row.sample, row.frames)
    frames = Video(video.data, video.num_frames).frames(video.numbers)
    return [number for number, _ in frames]


def copy_planes(dataset: ShardDataset, row: PlanRow) -> Tensor:
    """Decode the frames of a clip, each once, and copy what it shows of their planes."""
    video = dataset.read_clip(row.sample, join_frames([row]))
    copies = np.empty(0, np.uint8)

    def allocate(num_bytes: int) -> tuple[int, np.ndarray]:
        nonlocal copies
        copies = np.empty(num_bytes, np.uint8)
        return 0, copies

    sample = dataset.samples[row.sample]
    planes = VideoSource().copy_planes(video, sample, [row], FrameSize(SIDE, SIDE), allocate)
    require("videos decode to planes", planes is not None, sample.key)
    return torch.from_numpy(copies)


def check_planes(
    dataset: ShardDataset, rows: Sequence[PlanRow], copy: Callable[[PlanRow], Sized]
) -> None:
    """Check that planes are those that PyAV decodes. Raise InputError if they are not."""
    for row in rows[:CHECKED_CLIPS]:
        expected = copy_planes(dataset, row)
        copied = copy(row)
        assert isinstance(copied, Tensor)
        is_right = len(copied) == len(expected)
        if is_right:
            # Decoders of JPEG and MPEG-4 may round in other ways.
            difference = (copied.int() - expected.int()).abs().double().mean().item()
            is_right = difference < MAX_PLANE_DIFFERENCE
        require("planes are those of PyAV", is_right, dataset.describe_location(row.sample))


@contextmanager
def open_loader(
    folder: Path, config: DataConfig, batch_size: int, device: torch.device
) -> Iterator[ClipLoader]:
    """Open this repository's loader over shards, and check its first batch."""
    dataset = ShardDataset.open(folder)
    plan = make_plan(dataset, config, batch_size)
    with ClipLoader(dataset, plan, device, config, None) as loader:
        rows = plan.batch(0)
        clips = next(loader.batches(0)).clip.cpu()
        faults = find_faults(dataset, rows[:CHECKED_CLIPS], lambda row: clips[rows.index(row)])
        require("clips are what the plan says", not faults, "; ".join(faults.values()))
        yield loader


def make_plan(dataset: ShardDataset, config: DataConfig, batch_size: int) -> TrainingPlan:
    """Return the plan of training, always with the same seed: all loaders cut the same clips."""
    return TrainingPlan(
        dataset, config, num_frames=NUM_FRAMES, image_size=SIDE, seed=0, batch_size=batch_size
    )


def find_faults(
    dataset: ShardDataset, rows: Sequence[PlanRow], cut: Callable[[PlanRow], Tensor]
) -> dict[int, str]:
    """Return what is wrong with the clips that `cut` makes, by sample.

    Each is a sentence that begins with the shard and the key of the video.
    """

    def find(row: PlanRow) -> str:
        try:
            return find_fault(dataset, row, cut(row).numpy())
        # Each library has exceptions of its own.
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]

    with ThreadPoolExecutor() as pool:
        faults = list(pool.map(find, rows))
    fault_by_sample = {}
    for row, fault in zip(rows, faults, strict=True):
        if fault:
            location = dataset.describe_location(row.sample)
            fault_by_sample[row.sample] = f"{location} {fault}"
    return fault_by_sample


def find_fault(dataset: ShardDataset, row: PlanRow, clip: np.ndarray) -> str:
    """Compare a clip uint8 [T, H, W, C] with frames that PIL crops and scales.

    A clip must also be nearer to its own frames than to those before and after them. Return what
    is wrong, "" if nothing is.
    """
    if len(clip) != len(row.frames):
        return f"has {len(clip)} frames instead of {len(row.frames)}"
    # Seeking that ends one frame too early or too late is a common fault, and hard to see.
    num_frames = dataset.samples[row.sample].num_frames

    def shift_frames(step: int) -> list[int]:
        return [min(max(0, number + step), num_frames - 1) for number in row.frames]

    before, own, after = map(shift_frames, (-1, 0, 1))
    expected = make_expected_frames(dataset, row, {*before, *own, *after})

    def measure_difference(numbers: list[int]) -> float:
        differences = []
        for number, pixels in zip(numbers, clip, strict=True):
            differences.append(np.abs(expected[number] - pixels).mean())
        return float(np.mean(differences))

    difference = measure_difference(own)
    if difference >= MAX_DIFFERENCE:
        return f"is {difference:.1f} off"
    if difference > min(measure_difference(before), measure_difference(after)) + NEIGHBOR_MARGIN:
        return "has the frames beside the right ones"
    return ""


def make_expected_frames(
    dataset: ShardDataset, row: PlanRow, numbers: Iterable[int]
) -> dict[int, np.ndarray]:
    """Decode frames of a row's video, and crop, scale and flip them as the row says, by PIL."""
    sample = dataset.samples[row.sample]
    ordered = sorted(numbers)
    # By this repository's decoder, whose frame numbers tests compare with numbers in the pixels.
    # PIL crops and scales, because no loader here does it by PIL.
    frames = decode_frames(dataset.read_video(row.sample), ordered, sample.num_frames)
    _, height, width, _ = frames.shape
    # The plan's boxes are in square pixels, which those of copies need not be.
    x, y, w, h = row.crop.within((sample.width, sample.height), (width, height))
    images = {}
    for number, frame in zip(ordered, frames, strict=True):
        crop = Image.fromarray(frame[y : y + h, x : x + w])
        scaled = crop.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        # Signed, because differences of uint8 would wrap around.
        image = np.asarray(scaled).astype(int)
        images[number] = image[:, ::-1] if row.flip else image
    return images


if __name__ == "__main__":
    run_command(main)
