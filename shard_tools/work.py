"""What a worker does with one input video: fetch it, encode it, leave the result in the staging folder.

A staged result is a JSON file and the video files it names. It is complete when the JSON file is there and the hashes
in it are right, so nothing is flushed to disk here: a result torn by a power cut is simply made again.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import av
import fsspec
import msgspec

from common.atomic_io import hash_file
from pipeline.reading.storage import is_remote
from pipeline.shards.format import Sample
from shard_tools.encoding.cuts import Cut, StoredVideo
from shard_tools.encoding.encode import store_cuts
from shard_tools.encoding.frames import list_frames
from shard_tools.encoding.picture import UnusableError
from shard_tools.inputs import Location, Segment
from shard_tools.inputs.item import join_name
from shard_tools.settings import Settings

MIN_FREE_BYTES = 1_000_000
MAX_SUFFIX = 16  # characters, of a temporary copy
PROGRESS_EVERY_S = 2


class Entry(NamedTuple):
    """A sample as planned: a video, a segment of one, or a piece of a long one."""

    source: str
    segment: str = ""
    labels: list[int] | None = None
    fields: str = ""
    piece: int = 0
    is_last: bool = True  # of the planned pieces: it stands for all that may follow

    @property
    def name(self) -> str:
        return join_name(self.source, self.segment)


@dataclass(frozen=True, slots=True)
class Job:
    """What one video is to become: `entries`, each with where its results go, without extension; the samples' key is
    the name of that."""

    source: str
    location: Location | None  # None: it was there when the run began, and is gone now
    entries: list[tuple[Path, Entry]]
    settings: Settings

    @property
    def progress_file(self) -> Path:
        """Where the share that is done is written, as text, every few seconds."""
        stem = self.entries[0][0]
        return stem.with_name(f"{stem.name}.progress")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an entry: samples with the paths of their videos, and the reason why some or all are missing."""

    name: str
    samples: list[tuple[Sample, Path]]
    reason: str | None = None

    def save(self, stem: Path) -> None:
        samples = [{"path": str(path), **asdict(sample)} for sample, path in self.samples]
        value = {"name": self.name, "reason": self.reason, "samples": samples}
        stem.parent.mkdir(exist_ok=True)
        aside = stem.with_name(f"{stem.name}.{os.getpid()}.partial")
        aside.write_text(json.dumps(value), encoding="utf-8")
        aside.replace(stem.with_name(f"{stem.name}.json"))


def load_outcome(stem: Path) -> Outcome | None:
    """Load the staged result at `stem`; None if it is missing or torn."""
    try:
        value = json.loads(stem.with_name(f"{stem.name}.json").read_text(encoding="utf-8"))
        samples = [(msgspec.convert(sample, Sample), Path(sample.pop("path"))) for sample in value["samples"]]
        if any(hash_file(path) != sample.sha256 for sample, path in samples):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Outcome(value["name"], samples, value["reason"])


class DiskFullError(OSError):
    """The disk with the staged results is full."""


def process_job(job: Job) -> OSError | None:
    """Do what is not done of the job, and leave each result at its stem as soon as it is whole; return an OSError if
    the disk fails, which must end the whole run."""
    av.logging.set_level(None)
    folder = job.progress_file.parent
    missing = {stem: entry for stem, entry in job.entries if not load_outcome(stem)}

    def keep(stem: Path, outcome: Outcome) -> None:
        if outcome.reason is not None and shutil.disk_usage(folder).free < MIN_FREE_BYTES:
            raise DiskFullError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        del missing[stem]
        outcome.save(stem)

    try:
        for stem in missing:
            stem.parent.mkdir(exist_ok=True)
        try:
            for stem, outcome in _make_outcomes(job, list(missing.items())) if missing else ():
                keep(stem, outcome)
        except DiskFullError:
            raise
        except Exception as error:  # whatever it is costs what is not done of this video, and says why
            for stem, entry in list(missing.items()):
                keep(stem, Outcome(entry.name, [], explain(error)))
        job.progress_file.unlink(missing_ok=True)
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


def _make_outcomes(job: Job, missing: list[tuple[Path, Entry]]) -> Iterator[tuple[Path, Outcome]]:
    if job.location is None:
        raise UnusableError("it was there when the run began, and is gone now")
    with local_copy(job.location, job.progress_file.parent) as path:
        source_hash, source_size = hash_source(path)

        def make_sample(key: str, entry: Entry, video: StoredVideo) -> tuple[Sample, Path]:
            facts = video._asdict()
            kept: Path = facts.pop("path")
            if kept == path and str(path) != job.location:  # the temporary copy itself is to be kept
                kept = cut.stem.with_name(f"{cut.stem.name}.{video.container}")
                shutil.copyfile(path, kept)
            return Sample(
                key=key,
                **facts,
                labels=None if entry.labels is None else tuple(entry.labels),
                source=job.source,
                sha256=source_hash if kept == path else hash_file(kept),
                size=kept.stat().st_size,
                source_sha256=source_hash,
                source_size=source_size,
                segment=entry.segment,
                fields=json.loads(entry.fields) if entry.fields else {},
            ), kept

        entries = {}
        for stem, entry in missing:
            # A worker whose parent was killed may still be at it when the next run begins: each writes its own files.
            aside = stem.with_name(f"{stem.name}-{os.getpid()}")
            segment = Segment.parse(entry.segment) if entry.segment else None
            entries[Cut(aside, segment, entry.piece, entry.is_last)] = stem, entry
        for cut, files, problem in store_cuts(path, list(entries), job.settings, ProgressFile(job.progress_file).write):
            stem, entry = entries[cut]
            keys = [stem.name, *(f"{stem.name}-{number:04d}" for number in range(1, len(files)))]
            samples = [make_sample(key, entry, video) for key, video in zip(keys, files, strict=False)]
            yield stem, Outcome(entry.name, samples, explain(problem) if problem else None)


def hash_source(path: Path) -> tuple[str, int]:
    """Return hash and bytes of a file, or of all frames in a folder of them."""
    if not path.is_dir():
        return hash_file(path), path.stat().st_size
    frames = list_frames(path)
    digest = hashlib.sha256("".join(f"{hash_file(frame)} {frame.name}\n" for frame in frames).encode()).hexdigest()
    return digest, sum(frame.stat().st_size for frame in frames)


class ProgressFile:
    """A file that says which share of a job is done; there is none in the first seconds."""

    def __init__(self, path: Path) -> None:
        self._path, self._due = path, time.monotonic() + PROGRESS_EVERY_S

    def write(self, share: float) -> None:
        if time.monotonic() > self._due:
            self._path.write_text(f"{share:.6f}", encoding="ascii")
            self._due = time.monotonic() + PROGRESS_EVERY_S


def read_progress(job: Job) -> float | None:
    """Return the share of a job that is done, where it has said one."""
    try:
        return float(job.progress_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


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
