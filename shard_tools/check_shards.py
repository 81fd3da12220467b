"""Read shards again and say what is wrong with them, by shard and key.

    python shard_tools/check_shards.py FOLDER

checks sizes, hashes, index and table of samples of every shard, and decodes every video. Other people's WebDatasets,
with videos but without our dataset.json, are checked as far as they go. Exits with 1 if anything is wrong.
"""

import argparse
import hashlib
import random
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import av

from errors import InputError, run_command
from pipeline.shards import DATASET_FILE, Sample, ShardInfo, read_dataset_info, read_samples
from progress import progress_bar
from shard_tools.encode import file_hash
from shard_tools.inputs import Member
from shard_tools.picture import UnusableError
from shard_tools.source import VIDEO_EXTENSIONS, checked, opened
from shard_tools.work import fetched
from shard_tools.workers import Failed, Pool, num_processors
from shard_tools.write import index_of, list_members
from terminal import say


@dataclass(frozen=True, slots=True)
class Video:
    """A video inside a tar; `num_frames` is what it should decode to, None where nobody said."""

    shard: Path
    member: str
    offset: int
    size: int
    num_frames: int | None


def check_shard(folder: Path, shard: ShardInfo, num_classes: int) -> tuple[list[str], list[Video]]:
    """What is wrong with a shard of ours, and the videos it holds."""
    path = folder / shard.name
    if not path.is_file():
        return [f"{shard.name} is missing"], []
    if path.stat().st_size != shard.num_bytes:
        return [f"{shard.name} has {path.stat().st_size} bytes instead of {shard.num_bytes}"], []
    problems = []
    if file_hash(path) != shard.sha256:
        problems.append(f"{shard.name}: its bytes have changed since it was made")
    try:
        members = list_members(path)
    except tarfile.TarError as error:
        return [*problems, f"{shard.name} is not a whole tar file ({error})"], []
    index = folder / shard.index_name
    if not index.is_file() or index.read_text(encoding="utf-8") != index_of(members):
        problems.append(f"{shard.index_name} does not fit its tar")
    try:
        samples = list(read_samples(folder, shard))
    except InputError as error:
        return [*problems, str(error)], []
    if len(samples) != shard.num_samples:
        problems.append(f"{shard.samples_name} has {len(samples)} samples instead of {shard.num_samples}")
    with path.open("rb") as file:
        for sample in samples:
            if sample.label is not None and not 0 <= sample.label < num_classes:
                problems.append(
                    f"{shard.name}: {sample.key}: label {sample.label}, and there are {num_classes} classes"
                )
            name = f"{sample.key}.{sample.container}"
            if members.get(name) != (sample.offset, sample.size):
                problems.append(f"{shard.name}: {sample.key} is not where {shard.samples_name} says")
                continue
            file.seek(sample.offset)
            if hashlib.sha256(file.read(sample.size)).hexdigest() != sample.sha256:
                problems.append(f"{shard.name}: {sample.key}: the video's bytes have changed")
    return problems, [_video(path, sample) for sample in samples]


def _video(path: Path, sample: Sample) -> Video:
    return Video(path, f"{sample.key}.{sample.container}", sample.offset, sample.size, sample.num_frames)


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
    if index.is_file() and index.read_text(encoding="utf-8").split("\n")[1:] != index_of(members).split("\n")[1:]:
        problems.append(f"{index.name} does not fit its tar")
    return problems, videos


def decode(video: Video) -> str | None:
    """What is wrong with a video, or None."""
    av.logging.set_level(None)
    place = Member(str(video.shard), video.offset, video.size, video.member)
    try:
        with fetched(place, None) as path, opened(path) as (container, stream):
            _, count = checked(container, stream)
    except UnusableError as error:
        return f"{video.shard.name}: {video.member}: {error}"
    if video.num_frames is not None and count != video.num_frames:
        return f"{video.shard.name}: {video.member}: {count} frames decode instead of {video.num_frames}"
    return None


def decoding_problems(videos: list[Video], num_workers: int) -> Iterator[str]:
    """Decode all videos in parallel and yield what is wrong."""
    found = Pool(decode, num_workers, timeout=900).run(videos)
    for video, problem in progress_bar(found, unit="video", total=len(videos)):
        if isinstance(problem, Failed):
            yield f"{video.shard.name}: {video.member}: {problem.reason}"
        elif problem is not None:
            yield problem


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of shards")
    parser.add_argument("--decode", type=int, metavar="N", help="decode N random videos only (default: all; 0: none)")
    parser.add_argument("--workers", type=int, default=num_processors(), help="default: one a core")
    parsed = parser.parse_args(arguments)
    if parsed.workers < 1 or (parsed.decode is not None and parsed.decode < 0):
        raise InputError("--workers: give a whole number of at least 1; --decode: of at least 0")
    folder = parsed.folder
    if (folder / DATASET_FILE).exists():
        info = read_dataset_info(folder)
        shards = progress_bar(info.shards, unit="shard")
        checked = [check_shard(folder, shard, len(info.classes)) for shard in shards]
    else:
        checked = [check_foreign(path) for path in progress_bar(sorted(folder.glob("*.tar")), unit="shard")]
    if not checked:
        raise InputError(f"{folder} holds no shards")
    problems = [problem for found, _ in checked for problem in found]
    videos = [video for _, found in checked for video in found]
    if parsed.decode is not None:
        videos = random.Random(0).sample(videos, min(parsed.decode, len(videos)))
    problems += decoding_problems(videos, parsed.workers)
    for problem in problems:
        say(problem)
    say(f"{len(checked)} shards checked, {len(videos)} videos decoded, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    run_command(main)
