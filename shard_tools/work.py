"""What a worker does with one input video: fetch it, encode it, leave the result in the staging folder.

A staged result is a JSON file and the video files it names. It is complete when the JSON file is there and the hashes
in it are right, so nothing is flushed to disk here: a result torn by a power cut is simply made again.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

import av
import fsspec
import msgspec

from common.atomic_io import hash_file
from pipeline.reading.storage import is_remote
from pipeline.shards.format import Sample
from shard_tools.encoding.encode import store_video
from shard_tools.encoding.picture import UnusableError
from shard_tools.inputs import TarMember
from shard_tools.settings import Settings

MIN_FREE_BYTES = 1_000_000
MAX_SUFFIX = 16  # characters, of a temporary copy


@dataclass(frozen=True, slots=True)
class Job:
    """One video to process; `stem` is where its results go, without extension, and its name the samples' key."""

    source: str
    location: str | TarMember
    stem: Path
    settings: Settings
    labels: list[int] | None = None
    segment: str = ""
    fields: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an input: samples with the paths of their videos, or the reason why there are none."""

    source: str
    samples: list[tuple[Sample, Path]]
    reason: str | None = None

    def save(self, stem: Path) -> None:
        samples = [{"path": str(path), **asdict(sample)} for sample, path in self.samples]
        value = {"source": self.source, "reason": self.reason, "samples": samples}
        aside = stem.with_name(f"{stem.name}.{os.getpid()}.partial")
        aside.write_text(json.dumps(value), encoding="utf-8")
        aside.replace(stem.with_name(f"{stem.name}.json"))


def load_outcome(stem: Path, is_needed: Callable[[int], bool]) -> Outcome | None:
    """Load the staged result at `stem`; None if it is missing, or one of the pieces that are needed is torn."""
    try:
        value = json.loads(stem.with_name(f"{stem.name}.json").read_text(encoding="utf-8"))
        samples = [(Path(sample.pop("path")), msgspec.convert(sample, Sample)) for sample in value["samples"]]
        if any(is_needed(piece) and hash_file(path) != sample.sha256 for piece, (path, sample) in enumerate(samples)):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Outcome(value["source"], [(sample, path) for path, sample in samples], value["reason"])


def process_job(job: Job) -> Outcome | OSError:
    """Do the job and leave its result at `job.stem`; an OSError is about the disk and must end the whole run."""
    av.logging.set_level(None)
    try:
        outcome = Outcome(job.source, list(_make_samples(job)))
    except Exception as error:  # whatever it is costs this video, and says why
        outcome = Outcome(job.source, [], explain(error))
    try:
        if outcome.reason is not None and shutil.disk_usage(job.stem.parent).free < MIN_FREE_BYTES:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(job.stem.parent))
        outcome.save(job.stem)
    except OSError as error:
        return error
    return outcome


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


def _make_samples(job: Job) -> Iterator[tuple[Sample, Path]]:
    with local_copy(job.location, job.stem.parent) as path:
        source_hash = hash_file(path)
        # A worker whose parent was killed may still be at it when the next run begins: each writes its own files.
        stem = job.stem.with_name(f"{job.stem.name}-{os.getpid()}")
        for number, video in enumerate(store_video(path, stem, job.settings)):
            facts = video._asdict()
            kept: Path = facts.pop("path")
            if kept == path and str(path) != job.location:  # the temporary copy itself is to be kept
                kept = stem.with_name(f"{stem.name}.{video.container}")
                shutil.copyfile(path, kept)
            sample = Sample(
                key=job.stem.name + (f"-{number:04d}" if job.settings.max_seconds else ""),
                **facts,
                labels=None if job.labels is None else tuple(job.labels),
                source=job.source,
                sha256=source_hash if kept == path else hash_file(kept),
                size=kept.stat().st_size,
                source_sha256=source_hash,
                source_size=path.stat().st_size,
                segment=job.segment,
                fields=json.loads(job.fields) if job.fields else {},
            )
            yield sample, kept


@contextmanager
def local_copy(location: str | TarMember, folder: Path | None = None) -> Iterator[Path]:
    """Yield a local file with the bytes at `location`: the file itself, or a temporary copy in `folder`."""
    if isinstance(location, str) and not is_remote(location):
        yield Path(location)
        return
    name = location.name if isinstance(location, TarMember) else location
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # The member's own name may be longer than a file's, and FFmpeg looks at the extension alone.
        path = Path(scratch, "video").with_suffix(PurePosixPath(name).suffix[:MAX_SUFFIX])
        if isinstance(location, TarMember):
            with open(location.archive, "rb") as archive:
                archive.seek(location.offset)
                path.write_bytes(archive.read(location.size))
        else:
            filesystem, remote = fsspec.core.url_to_fs(location)
            filesystem.get_file(remote, str(path))
        yield path
