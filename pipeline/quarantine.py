"""Videos that failed at run time: written down, counted, and too many of them end the run."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import InputError
from pipeline.shards.dataset import ShardDataset

# Below this many clips a share says little: one bad video among the first ten is not 10 % of the data.
MIN_CLIPS = 200


class Quarantine:
    """The bad samples of a run; one file may serve several processes."""

    def __init__(self, dataset: ShardDataset, path: Path | None, max_bad_fraction: float) -> None:
        self._dataset, self._path, self._max_bad_fraction = dataset, path, max_bad_fraction
        self._written = {str(line.get("key")) for line in read_quarantine(path)} if path else set()

    def add(self, sample: int, reason: str, bad_clips: int, clips: int) -> None:
        """Write a sample down, once a run; raises InputError if so many bad clips are more than the user allows."""
        video, where = self._dataset.samples[sample], self._dataset.where(sample)
        if self._path is not None and video.key not in self._written:
            self._written.add(video.key)
            line = {"key": video.key, "where": where, "source": video.source, "reason": reason}
            _append(self._path, json.dumps(line) + "\n")
        if bad_clips > self._max_bad_fraction * max(clips, MIN_CLIPS):
            raise InputError(
                f"{bad_clips} of {clips} clips came from videos that cannot be decoded, the last one {where}"
                f" ({reason}): more than data.max_bad_fraction = {self._max_bad_fraction} allows"
                + (f"; see {self._path}" if self._path else "")
            )


def read_quarantine(path: Path) -> list[dict[str, Any]]:
    """Read all valid lines. One that a kill or a full disk has cut short is skipped, and ended: the next line must not
    be appended to it."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""  # a bad byte costs its line
    if text and not text.endswith("\n"):
        _append(path, "\n")
    found: list[Any] = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def _append(path: Path, line: str) -> None:
    """Write once in append mode, so that lines of several processes do not mix."""
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())
        os.fsync(file.fileno())
