"""Videos that failed at run time: written down, counted, and too many of them end the run."""

import json
import os
import threading
from contextlib import suppress
from pathlib import Path

from errors import InputError
from pipeline.dataset import ShardDataset

# Below this many clips a share says little: one bad video among the first ten is not 10 % of the data.
CLIPS_BEFORE_JUDGING = 200


class Quarantine:
    """The bad samples of a run; safe to use from many threads, and one file may serve several processes."""

    def __init__(self, dataset: ShardDataset, path: Path | None, max_bad_share: float) -> None:
        self._dataset, self._path, self._max_bad_share = dataset, path, max_bad_share
        self._lock = threading.Lock()
        self._written = _keys_in(path)
        self._bad_clips = self._clips = 0

    def delivered(self, clips: int) -> None:
        """Tell that so many clips, good ones, have been made."""
        with self._lock:
            self._clips += clips

    def add(self, sample: int, reason: str, clips: int) -> None:
        """Write a sample down, once a run; raises InputError when the bad share passes what the user allows."""
        video = self._dataset.samples[sample]
        with self._lock:
            self._bad_clips += clips
            if self._path is not None and video.key not in self._written:
                self._written.add(video.key)
                line = {"key": video.key, "where": self._dataset.where(sample), "source": video.source}
                _append(self._path, json.dumps({**line, "reason": reason}) + "\n")
            judged = max(self._clips, CLIPS_BEFORE_JUDGING)
            if self._bad_clips > self._max_bad_share * judged:
                raise InputError(
                    f"{self._bad_clips} of {self._clips} clips came from videos that cannot be decoded, the last one"
                    f" {self._dataset.where(sample)} ({reason}): more than data.max_bad_share = {self._max_bad_share}"
                    f" allows; see {self._path or 'data.max_bad_share'}"
                )


def _keys_in(path: Path | None) -> set[str]:
    """Keys already in the file. A line that a kill or a full disk has cut short is left out, and ended: the next one
    must not stand behind it."""
    if path is None or not path.exists():
        return set()
    text = path.read_text(encoding="utf-8", errors="replace")  # a bad byte costs its line, not the run
    if text and not text.endswith("\n"):
        _append(path, "\n")
    keys: set[str] = set()
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            keys.add(str(json.loads(line)["key"]))
    return keys


def _append(path: Path, line: str) -> None:
    """One write in append mode: lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
