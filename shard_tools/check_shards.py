"""Read shards again and say what is wrong with them, by shard and key.

    python shard_tools/check_shards.py FOLDER

checks sizes and hashes of all files, compares the tables with each other, with the tars and with what decodes, and
decodes every video. Other people's WebDatasets, with videos but without our dataset.json, are checked as far as they
go. Exits with 1 if anything is wrong.
"""

import argparse
import hashlib
import json
import random
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np

from common.atomic_io import hash_file
from common.errors import InputError, run_command
from common.logging import log
from common.progress import progress_bar
from pipeline.decoding.video_error import VideoError
from pipeline.shards import arrays
from pipeline.shards.format import (
    DATASET_FILE,
    DatasetInfo,
    Sample,
    ShardInfo,
    is_described,
    read_dataset_info,
    read_samples,
    read_table,
)
from pipeline.shards.gops import index_gops
from pipeline.shards.index import Tables
from pipeline.shards.rows import RowWriter, ShardRows, encode_gops
from shard_tools.build import locked_folder
from shard_tools.encoding.picture import Pose, UnusableError
from shard_tools.encoding.source import VIDEO_EXTENSIONS, check_frames, open_source
from shard_tools.encoding.timing import read_timing
from shard_tools.inputs import TarMember
from shard_tools.tables import hash_of_description, hashed, publish
from shard_tools.work import local_copy
from shard_tools.workers import Failed, count_cpus, run_in_processes
from shard_tools.write import PLACE, index_of, list_members

RATE_TOLERANCE = 0.005  # of frames a second: containers round the times of frames
Members = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Video:
    """A video inside a tar; `said` is what it should decode to, None where nobody said."""

    shard: Path
    member: str
    offset: int
    size: int
    said: Sample | None


class DatasetCheck:
    """Compares all that a dataset of ours says of itself, shard after shard."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.info = folder, read_dataset_info(folder)
        self._maker = RowWriter()
        self._num_frames = self._num_bytes = 0
        self._is_complete = True  # all samples.jsonl could be read
        self._has_tables = self.info.schema_version > 1
        if self._has_tables:
            self._tables = Tables.open(self.info, folder, lambda table: folder / table.file)
            self._gops = read_table("gops", self.info, lambda table: folder / table.file)

    def shards(self) -> Iterator[tuple[list[str], list[Video]]]:
        """What is wrong with each shard, and the videos that it holds."""
        for number, shard in enumerate(progress_bar(self.info.shards, unit="shard")):
            yield self._check(number, shard)

    def rest(self) -> Iterator[str]:
        """What is wrong with the tables as a whole and with dataset.json, once all shards have been seen."""
        if not self._has_tables:
            return
        said = json.loads((self.folder / DATASET_FILE).read_bytes())
        if said.get("sha256") != hash_of_description(said):
            yield f"{DATASET_FILE} has changed since it was made"
        for table in self.info.tables.values():
            path = self.folder / table.file
            if not path.is_file() or hash_file(path) != table.sha256:
                yield f"{table.file} has changed since it was made, or is missing"
        if self._is_complete:
            found = replace(
                self._maker.describe(self.info),
                num_samples=self._maker.num_samples,
                num_frames=self._num_frames,
                num_bytes=self._num_bytes,
            )
            for entry in fields(DatasetInfo):
                if getattr(found, entry.name) != getattr(self.info, entry.name):
                    yield f"{DATASET_FILE} is wrong about {entry.name}"

    def _check(self, number: int, shard: ShardInfo) -> tuple[list[str], list[Video]]:
        problems: list[str] = []
        samples = None
        try:
            samples = list(read_samples(self.folder, shard))
            made = self._maker.rows_of(samples)
            self._num_frames += sum(sample.num_frames for sample in samples)
            if self._has_tables:
                problems += self._compare(number, shard, samples, made)
        except (InputError, ValueError) as error:
            problems.append(f"{shard.samples_name}: {error}")
            self._skip(number)
            samples = None
        self._num_bytes += shard.num_bytes
        found, videos = check_shard(self.folder, shard, samples, len(self.info.classes))
        return [*problems, *found], videos

    def _skip(self, number: int) -> None:
        """Go on behind a shard whose samples cannot be read."""
        self._is_complete = False
        if self._has_tables and number + 1 < len(self.info.shards):
            row = self._tables.rows[int(self._tables.first_of_shard[number + 1])]
            self._maker.continue_at(number + 1, int(row["first_gop"]), int(row["name"]))

    def _compare(self, number: int, shard: ShardInfo, samples: list[Sample], made: ShardRows) -> Iterator[str]:
        """Where the tables of the dataset say something else than the shard's own."""
        if hashed(self.folder, shard) != shard:
            yield f"{shard.index_name} or {shard.samples_name} has changed since it was made"
        first = int(self._tables.first_of_shard[number])
        rows = self._tables.rows[first : first + shard.num_samples]
        if len(rows) != len(samples):
            yield f"{shard.name}: {len(rows)} rows in the table of samples, {len(samples)} in {shard.samples_name}"
            return
        for name in rows.dtype.names or ():
            for place in np.flatnonzero(rows[name] != made.samples[name]).tolist():
                yield f"{shard.name}: {samples[place].key}: {name} is another one in the table of samples"
        for place, sample in enumerate(samples):
            if self._tables.sample(first + place).problem:
                yield f"{shard.name}: {sample.key}: {self._tables.sample(first + place).problem}"
            elif (self._tables.sample(first + place).key, self._tables.sample(first + place).source) != (
                sample.key,
                sample.source,
            ):
                yield f"{shard.name}: {sample.key} has another name in the table of names"
        start = self._maker.num_gops - len(made.gops)
        if not np.array_equal(self._gops[start : self._maker.num_gops], made.gops):
            yield f"{shard.name}: the GOP table has other rows than {shard.samples_name}"


def check_shard(
    folder: Path, shard: ShardInfo, samples: list[Sample] | None, num_classes: int
) -> tuple[list[str], list[Video]]:
    """What is wrong with a shard of ours, and the videos it holds; `samples` is None where they cannot be read."""
    path = folder / shard.name
    if not path.is_file():
        return [f"{shard.name} is missing"], []
    if path.stat().st_size != shard.num_bytes:
        return [f"{shard.name} has {path.stat().st_size} bytes instead of {shard.num_bytes}"], []
    problems = []
    if hash_file(path) != shard.sha256:
        problems.append(f"{shard.name}: its bytes have changed since it was made")
    try:
        members = list_members(path)
    except tarfile.TarError as error:
        return [*problems, f"{shard.name} is not a whole tar file ({error})"], []
    index = folder / shard.index_name
    if not index.is_file() or index.read_bytes() != index_of(members).encode(errors="surrogateescape"):
        problems.append(f"{shard.index_name} does not fit its tar")
    if samples is None:
        return problems, []
    if not len(samples) == shard.num_samples == len(members) / 2:
        problems.append(
            f"{shard.name} holds {len(members)} files and {shard.samples_name} {len(samples)} samples, where"
            f" {shard.num_samples} samples of two files each are promised"
        )
    with path.open("rb") as file:
        for sample in samples:
            wrong = check_sample(file, sample, members, num_classes)
            problems += [f"{shard.name}: {sample.key}{sentence}" for sentence in wrong]
    return problems, [_video(path, sample) for sample in samples]


def check_sample(file: BinaryIO, sample: Sample, members: Members, num_classes: int) -> Iterator[str]:
    """What is wrong with a sample, as the end of a sentence that begins with its key."""
    if sample.label is not None and not 0 <= sample.label < num_classes:
        yield f": label {sample.label}, and there are {num_classes} classes"
    if members.get(f"{sample.key}.{sample.container}") != (sample.offset, sample.size):
        yield " is not where its shard's table says"
        return
    file.seek(sample.offset)
    video = file.read(sample.size)
    if hashlib.sha256(video).hexdigest() != sample.sha256:
        yield ": the video's bytes have changed"
    elif sample.gops and sample.gops != encode_gops(index_gops(video, sample.num_frames)):
        yield ": its GOPs differ from what its shard's table says"
    yield from _check_description(file, sample, members)


def _check_description(file: BinaryIO, sample: Sample, members: Members) -> Iterator[str]:
    """Compare a sample with its <key>.json in the tar."""
    offset, size = members.get(f"{sample.key}.json", (0, 0))
    file.seek(offset)
    try:
        described = json.loads(file.read(size))
        others = [name for name, value in asdict(sample).items() if described.get(name, value) != value]
        missing = [entry.name for entry in fields(Sample)[:11] if entry.name not in described]
    except (ValueError, AttributeError):
        yield ": its description in the tar cannot be read"
        return
    for name in [*missing, *(name for name in others if name not in PLACE)]:
        yield f": {name} is {described.get(name)!r} in the tar and {getattr(sample, name)!r} in its shard's table"


def _video(path: Path, sample: Sample) -> Video:
    return Video(path, f"{sample.key}.{sample.container}", sample.offset, sample.size, sample)


def check_foreign(path: Path) -> tuple[list[str], list[Video]]:
    """What is wrong with a tar that has no description, and the videos it holds."""
    try:
        members = list_members(path)
    except tarfile.TarError as error:
        return [f"{path.name} is not a whole tar file ({error})"], []
    videos = [
        Video(path, name, offset, size, None)
        for name, (offset, size) in members.items()
        if name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS
    ]
    problems = [] if videos else [f"{path.name} holds no video"]
    index = path.with_suffix(".idx")
    expected = index_of(members).encode(errors="surrogateescape")
    if index.is_file() and index.read_bytes().split(b"\n")[1:] != expected.split(b"\n")[1:]:
        problems.append(f"{index.name} does not fit its tar")
    return problems, videos


def decode(video: Video) -> str | None:
    """What is wrong with a video, or None."""
    av.logging.set_level(None)
    place = TarMember(str(video.shard), video.offset, video.size, video.member)
    try:
        with local_copy(place, None) as path:
            wrong = "; ".join(_differences(path, video.said))
            return f"{video.shard.name}: {video.member}: {wrong}" if wrong else None
    except UnusableError as error:
        return f"{video.shard.name}: {video.member}: {error}"


def _differences(path: Path, said: Sample | None) -> Iterator[str]:
    """Where a video is not what was said of it. Raises UnusableError if it does not decode."""
    if path.suffix == f".{arrays.CONTAINER}":
        yield from _differences_of_array(path, said)
        return
    with open_source(path) as (container, stream):
        first, count = check_frames(container, stream)
        width, height = Pose.of(first, stream.sample_aspect_ratio).shown_size(first.width, first.height)
        sides, codec = (round(width), round(height)), stream.codec_context.codec.canonical_name
    if said is None:
        return
    if count != said.num_frames:
        yield f"{count} frames decode instead of {said.num_frames}"
    if sides != (said.width, said.height):
        yield f"it is {sides[0]}x{sides[1]} pixels large instead of {said.width}x{said.height}"
    if codec != said.codec:
        yield f"it is {codec} instead of {said.codec}"
    with open_source(path) as (container, stream):
        rate = float(read_timing(container, stream).rate)
    if count > 1 and abs(rate - said.fps) > RATE_TOLERANCE * said.fps:
        yield f"it has {rate:.4g} frames a second instead of {said.fps:.4g}"


def _differences_of_array(path: Path, said: Sample | None) -> Iterator[str]:
    try:
        frames = arrays.map_frames(path)
    except VideoError as error:
        raise UnusableError(str(error)) from error
    shape = said and (said.num_frames, said.height, said.width, arrays.count_channels([said.codec]))
    if shape and frames.shape != shape:
        yield f"its shape is {frames.shape} instead of {shape}"


def decoding_problems(videos: list[Video], num_workers: int) -> Iterator[str]:
    """Decode all videos in parallel and yield what is wrong."""
    results = run_in_processes(decode, videos, num_workers, timeout=900)
    for video, problem in progress_bar(results, unit="video", total=len(videos)):
        if isinstance(problem, Failed):
            yield f"{video.shard.name}: {video.member}: {problem.reason}"
        elif problem is not None:
            yield problem


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of shards")
    parser.add_argument("--decode", type=int, metavar="N", help="decode N random videos only (default: all; 0: none)")
    parser.add_argument("--workers", type=int, default=count_cpus(), help="default: one a core")
    parser.add_argument(
        "--rewrite-tables", action="store_true", help="first write the dataset's tables again from what the shards say"
    )
    parsed = parser.parse_args(arguments)
    if parsed.workers < 1 or (parsed.decode is not None and parsed.decode < 0):
        raise InputError("--workers: give a whole number of at least 1; --decode: of at least 0")
    folder = parsed.folder
    if parsed.rewrite_tables:
        with locked_folder(folder):
            publish(folder, read_dataset_info(folder))
    if is_described(folder):
        dataset = DatasetCheck(folder)
        found = list(dataset.shards())
        problems = list(dataset.rest())
    else:
        problems = [
            f"{DATASET_FILE} is missing, and {table.name} was written with one: put it back, or make the shards again"
            for table in sorted([*folder.glob("*.samples.jsonl"), *folder.glob("samples-*.npy")])[:1]
        ]
        found = [check_foreign(path) for path in progress_bar(sorted(folder.glob("*.tar")), unit="shard")]
    if not found:
        raise InputError(f"{folder} holds no shards")
    problems += [problem for wrong, _ in found for problem in wrong]
    videos = [video for _, held in found for video in held]
    if parsed.decode is not None:
        videos = random.Random(0).sample(videos, min(parsed.decode, len(videos)))
    problems += decoding_problems(videos, parsed.workers)
    for problem in problems:
        log(problem)
    log(f"{len(found)} shards checked, {len(videos)} videos decoded, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    run_command(main)
