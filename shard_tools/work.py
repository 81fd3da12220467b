"""What a worker does with one input video: fetch it, encode it, leave the results in the staging folder.

A staged result is a JSON file and the video file it names. It is complete when the JSON file is there and the hash in
it is right, so nothing is flushed to disk here: a result torn by a power cut is simply made again.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import av
import fsspec

from common.atomic_io import hash_file
from pipeline.reading.storage import is_remote
from pipeline.shards.format import Sample, parse_line
from shard_tools.encoding.encode import StoredVideo, staged_file, store_segments
from shard_tools.encoding.picture import UnusableError
from shard_tools.encoding.source import list_frames
from shard_tools.inputs import Location, Segment
from shard_tools.inputs.item import join_name
from shard_tools.settings import Settings
from shard_tools.workers import restart_timer

CHANGED = "it was changed while it was read"  # an unfinished download, say
MIN_FREE_BYTES = 1_000_000
MAX_SUFFIX = 16  # characters, of a temporary copy


class Entry(NamedTuple):
    """A sample as planned: a video or a segment of one."""

    source: str
    segment: str = ""
    labels: list[int] | None = None
    fields: str = ""
    shard: str = ""
    position: int = 0  # among the entries of all shards

    @property
    def name(self) -> str:
        return join_name(self.source, self.segment)


@dataclass(frozen=True, slots=True)
class Job:
    """What one video is to become: `entries` by where their results go, without extension, under the samples' key."""

    location: Location | None  # None: it was there when the run began, and is gone now
    entries: dict[Path, Entry]
    settings: Settings


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an entry: a sample and the path of its video, or the reason why there is none."""

    entry: Entry
    sample: Sample | None = None
    video: str = ""
    reason: str | None = None

    def save(self, stem: Path) -> None:
        aside = stem.with_name(f"{stem.name}.{os.getpid()}.partial")
        aside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        aside.replace(stem.with_name(f"{stem.name}.json"))

    def is_intact(self) -> bool:
        """Whether its video is what it was: it may be torn, or a user's file."""
        try:
            return self.sample is None or hash_file(Path(self.video)) == self.sample.sha256
        except OSError:
            return False


def read_outcome(stem: Path) -> Outcome | None:
    """Read the staged result at `stem`; None if it is missing or torn."""
    try:
        return parse_line(stem.with_name(f"{stem.name}.json").read_bytes(), Outcome)
    except (OSError, ValueError):
        return None


def is_done(stem: Path) -> bool:
    """Whether there is a staged result at `stem`, with its video."""
    outcome = read_outcome(stem)
    return outcome is not None and outcome.is_intact()


def process_job(job: Job) -> OSError | None:
    """Do what is not done of the job, and leave each result at its stem as soon as it is whole; return an OSError if
    the disk fails, which must end the whole run."""
    av.logging.set_level(None)
    missing = {stem: entry for stem, entry in job.entries.items() if not is_done(stem)}
    try:
        for stem, outcome in _make_outcomes(job, missing) if missing else ():
            if outcome.reason is not None and shutil.disk_usage(stem.parent).free < MIN_FREE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(stem.parent))
            outcome.save(stem)
    except OSError as error:
        return error
    return None


def explain(error: Exception) -> str:
    """Say why a video cannot be used."""
    match error:
        case UnusableError():
            return str(error)
        case FileNotFoundError():
            return "there is no such file"
        case PermissionError():
            return "no permission to read it"
        case MemoryError():
            return "it needs more memory than there is"
        case av.error.FFmpegError() | OSError() | ValueError() | KeyError():  # of FFmpeg, the disk or the network
            return f"it cannot be used ({getattr(error, 'strerror', None) or error})"
    return f"a bug in make_shards, which you may want to report ({type(error).__name__}: {error})"


def _make_outcomes(job: Job, left: dict[Path, Entry]) -> Iterator[tuple[Path, Outcome]]:
    """Yield the outcome of each entry that is left, and remove it: an error costs the others, and says why."""
    try:
        if job.location is None:
            raise UnusableError("it was there when the run began, and is gone now")
        with local_copy(job.location, next(iter(left)).parent) as path:
            before, source = path.stat(), hash_source(path)
            segments = {stem: Segment.parse(it.segment) if it.segment else None for stem, it in left.items()}
            for stem, result in store_segments(path, segments, job.settings, restart_timer):
                after = path.stat()
                if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                    raise UnusableError(CHANGED)
                if isinstance(result, UnusableError):
                    outcome = Outcome(left[stem], reason=str(result))
                else:
                    outcome = _make_outcome(job, stem, path, source, result)
                del left[stem]
                yield stem, outcome
    except Exception as error:
        yield from ((stem, Outcome(entry, reason=explain(error))) for stem, entry in left.items())


def _make_outcome(job: Job, stem: Path, path: Path, source: tuple[str, int], stored: StoredVideo) -> Outcome:
    """Describe what is stored of the `source`, of this hash and size, at `path`."""
    entry, facts = job.entries[stem], stored._asdict()
    kept: Path = facts.pop("path")
    if kept == path and str(path) != job.location:  # the temporary copy itself is to be kept
        kept = shutil.copyfile(path, staged_file(stem, stored.container))
    sample = Sample(
        key=stem.name,
        **facts,
        labels=None if entry.labels is None else tuple(entry.labels),
        source=entry.source,
        sha256=source[0] if stored.path == path else hash_file(kept),
        source_sha256=source[0],
        source_size=source[1],
        segment=entry.segment,
        fields=json.loads(entry.fields) if entry.fields else {},
    )
    return Outcome(entry, sample, str(kept))


def hash_source(path: Path) -> tuple[str, int]:
    """Return hash and bytes of a file, or of all frames in a folder of them."""
    if not path.is_dir():
        return hash_file(path), path.stat().st_size
    frames = list_frames(path)
    digest = hashlib.sha256("".join(f"{hash_file(frame)} {frame.name}\n" for frame in frames).encode()).hexdigest()
    return digest, sum(frame.stat().st_size for frame in frames)


@contextmanager
def local_copy(location: Location, folder: Path | None = None) -> Iterator[Path]:
    """Yield a local file with the bytes at `location`: the file itself, or a temporary copy in `folder`."""
    if isinstance(location, str) and not is_remote(location):
        yield Path(location)
        return
    name = location if isinstance(location, str) else location.name
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # The member's own name may be longer than a file's, and FFmpeg looks at the extension alone.
        path = Path(scratch, "video").with_suffix(PurePosixPath(name).suffix[:MAX_SUFFIX])
        if not isinstance(location, str):
            path.write_bytes(location.read())
        else:
            filesystem, remote = fsspec.core.url_to_fs(location)
            filesystem.get_file(remote, str(path))
        yield path
