"""What a worker does with one input video: fetch it, encode it, leave the results in the staging folder.

A staged result is a JSON file and the video file it names. It is complete when the JSON file is there and the hash in
it is right, so nothing is flushed to disk here: a result torn by a power cut is simply made again.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import av
import msgspec

from adamae.common.atomic_io import hash_file
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.read_format import parse_line
from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos.opening import list_frames
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.encoding.encode import StoredVideo, encode_segments, staged_file
from adamae.shard_tools.inputs.item import Item, Stored, dump_json
from adamae.shard_tools.inputs.location import Location, local_copy
from adamae.shard_tools.settings import Settings
from adamae.shard_tools.workers import restart_timer

CHANGED = "it was changed while it was read"  # an unfinished download, say
MIN_FREE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """What one video is to become: `items` by where their results go, without extension, under the samples' keys."""

    location: Location | None  # None: it was there when the run began, and is gone now
    items: dict[Path, Item]
    settings: Settings


def stage(item: Item, stem: Path) -> None:
    """Write what became of an item, at `stem`: all of it or nothing."""
    aside = stem.with_name(f"{stem.name}.{os.getpid()}.partial")
    aside.write_text(dump_json(item), encoding="utf-8")
    aside.replace(stem.with_name(f"{stem.name}.json"))


def read_staged(stem: Path) -> Item | None:
    """Read the item that is staged at `stem`, with what became of it; None if it is missing or torn."""
    try:
        return parse_line(stem.with_name(f"{stem.name}.json").read_bytes(), Item)
    except (OSError, ValueError):
        return None


def is_intact(item: Item) -> bool:
    """Return whether the stored video of an item, if any, has not changed: it may be torn, or a user's file."""
    if item.stored is None:
        return True
    try:
        return hash_file(Path(item.stored.path)) == item.stored.sha256
    except OSError:
        return False


def is_done(stem: Path) -> bool:
    """Return whether a result is staged at `stem`, with its video."""
    item = read_staged(stem)
    return item is not None and is_intact(item)


def reject(item: Item, reason: str) -> Item:
    """Return the item as one that cannot be used."""
    return msgspec.structs.replace(item, problem=reason, stored=None)


def process_job(job: Job) -> OSError | None:
    """Do what is not done of the job, and stage each result as soon as it is whole.

    Return an OSError if the disk fails, which must end the whole run.
    """
    av.logging.set_level(None)
    missing = {stem: item for stem, item in job.items.items() if not is_done(stem)}
    if not missing:
        return None
    try:
        for stem, item in _process_items(job, missing):
            if item.problem is not None and shutil.disk_usage(stem.parent).free < MIN_FREE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(stem.parent))
            stage(item, stem)
    except OSError as error:
        return error
    return None


def explain(error: Exception) -> str:
    """Say why a video cannot be used."""
    match error:
        case VideoError():
            return str(error)
        case FileNotFoundError():
            return "there is no such file"
        case PermissionError():
            return "no permission to read it"
        case MemoryError():
            return "it needs more memory than there is"
        case (
            av.error.FFmpegError() | OSError() | ValueError() | KeyError()
        ):  # of FFmpeg, the disk or the network
            return f"it cannot be used ({getattr(error, 'strerror', None) or error})"
    return f"a bug in make_shards, which you may want to report ({type(error).__name__}: {error})"


def _process_items(job: Job, remaining: dict[Path, Item]) -> Iterator[tuple[Path, Item]]:
    """Yield what became of each remaining item, and remove it; an error makes all that remain unusable."""
    try:
        if job.location is None:
            raise VideoError("it was there when the run began, and is gone now")
        with local_copy(job.location, next(iter(remaining)).parent) as path:
            before = path.stat()
            source_sha256, source_size = hash_source(path)
            segments = {}
            for stem, item in remaining.items():
                segments[stem] = Segment.parse(item.segment) if item.segment else None
            for stem, result in encode_segments(path, segments, job.settings, restart_timer):
                after = path.stat()
                if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                    raise VideoError(CHANGED)
                if isinstance(result, VideoError):
                    item = reject(remaining[stem], str(result))
                else:
                    kept = _keep(result, stem, path, job.location)
                    facts = result._asdict() | {
                        "path": str(kept),
                        "sha256": source_sha256 if result.path == path else hash_file(kept),
                        "source_sha256": source_sha256,
                        "source_size": source_size,
                    }
                    item = msgspec.structs.replace(remaining[stem], stored=Stored(**facts))
                del remaining[stem]
                yield stem, item
    except Exception as error:
        reason = explain(error)
        for stem, item in remaining.items():
            yield stem, reject(item, reason)


def _keep(video: StoredVideo, stem: Path, local: Path, location: Location) -> Path:
    """Return where the stored video stays until it is in its shard; `local` is the source's file.

    A copied video stays where it is, but a temporary copy of one is copied into the staging folder.
    """
    is_temporary = video.path == local and str(local) != location
    if is_temporary:
        return shutil.copyfile(local, staged_file(stem, video.container))
    return video.path


def make_sample(item: Item, key: str, class_ids: Mapping[str, int]) -> tuple[Sample, Path]:
    """Return what the dataset says of a stored item, and the path of its video."""
    assert item.stored is not None
    facts = msgspec.structs.asdict(item.stored)
    path = Path(facts.pop("path"))
    labels = None
    if item.labels is not None:
        labels = tuple(class_ids[label] for label in item.labels)
    fields = json.loads(item.fields) if item.fields else {}
    sample = Sample(
        key=key, labels=labels, source=item.source, segment=item.segment, fields=fields, **facts
    )
    return sample, path


def hash_source(path: Path) -> tuple[str, int]:
    """Return hash and bytes of a file, or of all frames in a folder of them."""
    if not path.is_dir():
        return hash_file(path), path.stat().st_size
    frames = list_frames(path)
    digest = hashlib.sha256(
        "".join(f"{hash_file(frame)} {frame.name}\n" for frame in frames).encode()
    ).hexdigest()
    return digest, sum(frame.stat().st_size for frame in frames)
