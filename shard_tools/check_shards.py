"""Verify shards: report what is wrong, by shard and key.

    python shard_tools/check_shards.py FOLDER

compares all files with their hashes and decodes every video. Exits with 1 if anything is wrong.
"""

import argparse
from collections.abc import Sequence

from adamae.common.arguments import ArgumentParser, between
from adamae.common.cpus import count_cpus
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.locations import local_path


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("folder", type=local_path, help="folder of shards")
    parser.add_argument(
        "--decode",
        type=between(0),
        metavar="N",
        help="decode N random videos (default: all of them)",
    )
    parser.add_argument(
        "--workers", type=between(1), default=count_cpus(), help="processes (default: one per core)"
    )
    parser.add_argument(
        "--timeout", type=between(1), default=900, help="seconds per video (default 900)"
    )
    parser.add_argument(
        "--rewrite-tables",
        action="store_true",
        help="first rewrite the tables from the samples.jsonl of the shards",
    )
    return parser.parse_args(arguments)


# Mistakes and --help are answered here, before the imports that take a second.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import hashlib
import json
import math
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import av

from adamae.common.atomic_io import hash_file
from adamae.common.logging import format_count, log
from adamae.common.progress import progress_bar
from adamae.pipeline.shards.format import DATASET_FILE, DatasetInfo, Sample, ShardInfo
from adamae.pipeline.shards.read_format import read_dataset_info, read_samples
from adamae.pipeline.video_error import VideoError
from adamae.shard_tools.build import lock_folder
from adamae.shard_tools.encoding.encode import StoredVideo, encode_segments
from adamae.shard_tools.inputs.location import TarMember, local_copy
from adamae.shard_tools.settings import COPY, Settings
from adamae.shard_tools.temp_table import explain_full_disk
from adamae.shard_tools.work import explain
from adamae.shard_tools.workers import ENGINES
from adamae.shard_tools.write import hash_description, list_members, publish_tables

# Relative: containers round the times of frames.
FPS_TOLERANCE = 0.005
# The fields of a Sample that decoding can verify.
DECODED = ("num_frames", "width", "height", "codec", "fps")

# A stored video, and the sample that says what it should decode to.
Video = tuple[TarMember, Sample]


def check_hash(path: Path, sha256: str) -> Iterator[str]:
    """Yield what is wrong with a file that had a hash when it was written."""
    if not path.is_file():
        yield f"{path.name} is missing"
    elif hash_file(path) != sha256:
        yield f"{path.name}: its bytes have changed since it was written"


def check_tables(folder: Path, info: DatasetInfo) -> Iterator[str]:
    """Compare dataset.json and the tables with the hashes in it."""
    values = json.loads((folder / DATASET_FILE).read_bytes())
    if values.get("sha256") != hash_description(values):
        yield f"{DATASET_FILE} has changed since it was written"
    for table in info.tables.values():
        yield from check_hash(folder / table.file, table.sha256)


def check_shard(folder: Path, shard: ShardInfo, num_classes: int) -> tuple[list[str], list[Video]]:
    """Compare a shard with its hashes; return its problems, which name samples, and its videos."""
    path = folder / shard.name
    problems = list(check_hash(path, shard.sha256))
    problems += check_hash(folder / shard.samples_name, shard.samples_sha256)
    videos: list[Video] = []
    try:
        members = list_members(path)
        with path.open("rb") as tar:
            for sample in read_samples(folder, shard):
                member = TarMember(
                    str(path), sample.offset, sample.size, f"{sample.key}.{sample.container}"
                )
                videos.append((member, sample))
                problem = _check_label(sample, num_classes)
                if problem:
                    problems.append(f"{shard.name}: {sample.key}: {problem}")
                tar.seek(sample.offset)
                # The position is compared first: a wrong size may be larger than memory.
                if members.get(member.name) != (sample.offset, sample.size):
                    problems.append(
                        f"{shard.name}: {sample.key} is not where its shard's samples.jsonl says"
                    )
                elif hashlib.sha256(tar.read(sample.size)).hexdigest() != sample.sha256:
                    problems.append(f"{shard.name}: {sample.key}: the video's bytes have changed")
    except (OSError, tarfile.TarError) as error:
        problems.append(f"{shard.name} is not a complete tar file ({error})")
    except InputError as error:
        problems.append(str(error))
    return problems, videos


def _check_label(sample: Sample, num_classes: int) -> str:
    """Return what is wrong with the labels of a sample, or an empty string."""
    for label in sample.labels or ():
        if not 0 <= label < num_classes:
            return f"label {label}, but there are {num_classes} classes"
    return ""


def check_video(video: Video) -> str:
    """Decode a video; return what is wrong with it, or an empty string."""
    av.logging.set_level(None)
    member, sample = video
    try:
        with local_copy(member) as path:
            ((_, decoded),) = encode_segments(path, {path: None}, Settings(encode=COPY))
    except (VideoError, av.error.FFmpegError) as error:
        return explain(error)
    # A reason to reject the only segment would have been raised.
    assert isinstance(decoded, StoredVideo)
    # A single frame has no rate.
    if decoded.num_frames == 1 or math.isclose(decoded.fps, sample.fps, rel_tol=FPS_TOLERANCE):
        decoded = decoded._replace(fps=sample.fps)
    differences = []
    for name in DECODED:
        actual = getattr(decoded, name)
        expected = getattr(sample, name)
        if actual != expected:
            differences.append(f"its {name} is {actual} instead of {expected}")
    return "; ".join(differences)


def main(arguments: Sequence[str]) -> int:
    """Check shards as a command line says; return the exit code."""
    return check_dataset(parse_arguments(arguments))


def check_dataset(parsed: argparse.Namespace) -> int:
    folder: Path = parsed.folder
    if parsed.rewrite_tables:
        with explain_full_disk(), lock_folder(folder):
            publish_tables(folder, read_dataset_info(folder))
    info = read_dataset_info(folder)
    problems = list(check_tables(folder, info))
    videos: list[Video] = []
    for shard in progress_bar(info.shards, unit="shard"):
        shard_problems, shard_videos = check_shard(folder, shard, len(info.classes))
        problems += shard_problems
        videos += shard_videos
    if parsed.decode is not None:
        # The same videos every time, so that a problem can be seen again.
        videos = random.Random(0).sample(videos, min(parsed.decode, len(videos)))
    results = ENGINES["processes"](check_video, videos, parsed.workers, parsed.timeout)
    for (member, _), problem in progress_bar(results, unit="video", total=len(videos)):
        if problem:
            problems.append(f"{Path(member.archive).name}: {member.name}: {problem}")
    for problem in problems:
        log(problem)
    log(
        f"{format_count(len(info.shards), 'shard')} checked, {format_count(len(videos), 'video')}"
        f" decoded, {format_count(len(problems), 'problem')}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    run_command(lambda: check_dataset(OPTIONS))
