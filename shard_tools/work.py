"""What a worker does with one source video: fetch it, encode it, and stage the results.

A staged result is a JSON file and the video file that it names. It is complete when the JSON file
is there and the hash in it is right, so nothing is flushed to disk here: a result torn by a power
cut is simply made again.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import av
import msgspec

from adamae.common.atomic_io import hash_file
from adamae.common.errors import InputError
from adamae.pipeline.reading.storage import MissingFileError, StorageError
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.read_format import parse_line
from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos.opening import list_frames
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.encoding.encode import StoredVideo, encode_segments, staged_file
from adamae.shard_tools.inputs.item import Item, Stored, dump_json
from adamae.shard_tools.inputs.location import Location, local_copy
from adamae.shard_tools.settings import Settings
from adamae.shard_tools.workers import pause_timer, restart_timer

ABSENT = "there is no such file"
FORBIDDEN = "no permission to read it"
OUT_OF_MEMORY = "it needs more memory than there is"
GONE = "it was there when the run began, and is gone now"
# Reasons that say nothing about the content of a video, which the next command tries again.
PASSING_REASONS = (ABSENT, FORBIDDEN, OUT_OF_MEMORY, GONE)
# Such as an unfinished download.
CHANGED = "it was changed while it was read"
# With less free space in the staging folder, a failure is that of the disk, not of the video.
MIN_FREE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """One source video and all that is to be made of it.

    `items` are keyed by their stems: the paths of the staged results, without extension.
    """

    # None: the source was there when the run began, and is gone now.
    location: Location | None
    items: dict[Path, Item]
    settings: Settings


def stage(item: Item, stem: Path) -> None:
    """Write what became of an item, at `stem`: all of it or nothing."""
    # A worker of a killed run may still be at the same item; see staged_file.
    aside = stem.with_name(f"{stem.name}.{os.getpid()}.partial")
    aside.write_text(dump_json(item), encoding="utf-8")
    aside.replace(stem.with_name(f"{stem.name}.json"))


def read_staged(stem: Path) -> Item | None:
    """Read the item that is staged at `stem`, with its result; None if it is missing or torn."""
    try:
        return parse_line(stem.with_name(f"{stem.name}.json").read_bytes(), Item)
    except (OSError, ValueError):
        return None


def is_intact(item: Item) -> bool:
    """Return whether the stored video of an item still has its hash; True if it has no video.

    A power cut may have torn the file, and a copied video is the user's own file, which may change.
    """
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


def process_job(job: Job) -> OSError | StorageError | None:
    """Make what is still missing of a job, and stage each result as soon as it is whole.

    Return the error if the disk or object storage fails: it is not the video's fault, and must end
    the whole run.
    """
    av.logging.set_level(None)
    missing = {stem: item for stem, item in job.items.items() if not is_done(stem)}
    if not missing:
        return None
    try:
        for stem, item in _process_items(job, missing):
            # A full disk would otherwise look like a fault of every video that is left.
            if item.problem is not None and shutil.disk_usage(stem.parent).free < MIN_FREE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(stem.parent))
            stage(item, stem)
    except (OSError, StorageError) as error:
        return error
    return None


def explain(error: Exception) -> str:
    """Return the sentence that tells a user why a video cannot be used."""
    match error:
        case MissingFileError():
            return ABSENT
        case VideoError() | InputError():
            return str(error)
        case FileNotFoundError():
            return ABSENT
        case PermissionError():
            return FORBIDDEN
        case MemoryError():
            return OUT_OF_MEMORY
        # What FFmpeg, the disk and the network raise.
        case av.error.FFmpegError() | OSError() | ValueError() | KeyError():
            return f"it cannot be used ({getattr(error, 'strerror', None) or error})"
    return f"a bug in make_shards, which you may want to report ({type(error).__name__}: {error})"


def _process_items(job: Job, remaining: dict[Path, Item]) -> Iterator[tuple[Path, Item]]:
    """Yield (stem, result) for each remaining item, and remove it from `remaining`.

    An error rejects all items that remain, unless it is of object storage.
    """
    try:
        if job.location is None:
            raise VideoError(GONE)
        scratch_folder = next(iter(remaining)).parent
        with ExitStack() as stack:
            # Downloads have limits of their own: slow storage is no fault of the video.
            with pause_timer():
                path = stack.enter_context(local_copy(job.location, scratch_folder))
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
        if isinstance(error, StorageError) and not isinstance(error, MissingFileError):
            raise
        # Whatever a broken video raises, it costs this video alone.
        reason = explain(error)
        for stem, item in remaining.items():
            yield stem, reject(item, reason)


def _keep(video: StoredVideo, stem: Path, local: Path, location: Location) -> Path:
    """Return the path at which a stored video stays until it is in its shard.

    A copied video stays where it is. If it is a temporary copy itself (`local`, fetched from
    `location`), it is copied into the staging folder.
    """
    is_temporary = video.path == local and str(local) != location
    if is_temporary:
        return shutil.copyfile(local, staged_file(stem, video.container))
    return video.path


def make_sample(item: Item, key: str, class_ids: Mapping[str, int]) -> tuple[Sample, Path]:
    """Return the Sample of a stored item, and the path of its video."""
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
    """Return the hash and the bytes of a file, or of all frames in a folder of them."""
    if not path.is_dir():
        return hash_file(path), path.stat().st_size
    lines = []
    num_bytes = 0
    for frame in list_frames(path):
        lines.append(f"{hash_file(frame)} {frame.name}\n")
        num_bytes += frame.stat().st_size
    return hashlib.sha256("".join(lines).encode()).hexdigest(), num_bytes
