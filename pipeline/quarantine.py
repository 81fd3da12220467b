"""Videos that failed at run time: written down, counted, and too many of them end the run."""

import threading
from pathlib import Path

from common.errors import InputError
from pipeline.jsonl import JsonlFile
from pipeline.shards.dataset import ShardDataset

# Below this many clips a share says little: one bad video among the first ten is not 10 % of the data.
MIN_CLIPS = 200


class Quarantine:
    """The bad samples of a run; safe to use from many threads, and one file may serve several processes."""

    def __init__(self, dataset: ShardDataset, path: Path | None, max_bad_fraction: float) -> None:
        self._dataset, self._max_bad_fraction = dataset, max_bad_fraction
        self._lock = threading.Lock()
        self._lines = JsonlFile(path) if path else None
        self._written = {str(line.get("key")) for line in self._lines.read()} if self._lines else set()
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
            if self._lines is not None and video.key not in self._written:
                self._written.add(video.key)
                line = {"key": video.key, "where": self._dataset.where(sample), "source": video.source}
                self._lines.add({**line, "reason": reason})
            most = self._max_bad_fraction * max(self._clips, MIN_CLIPS)
            if self._bad_clips > most:
                raise InputError(
                    f"{self._bad_clips} of {self._clips} clips came from videos that cannot be decoded, the last one"
                    f" {self._dataset.where(sample)} ({reason}): more than data.max_bad_fraction ="
                    f" {self._max_bad_fraction} allows; see"
                    f" {self._lines.path if self._lines else 'data.max_bad_fraction'}"
                )
