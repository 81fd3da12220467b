"""Videos that failed at run time: written down, counted, and too many of them end the run."""

from pathlib import Path

from common.errors import InputError
from pipeline.jsonl import JsonlFile
from pipeline.shards.dataset import ShardDataset

# Below this many clips a share says little: one bad video among the first ten is not 10 % of the data.
MIN_CLIPS = 200


class Quarantine:
    """The bad samples of a run; one file may serve several processes."""

    def __init__(self, dataset: ShardDataset, path: Path | None, max_bad_fraction: float) -> None:
        self._dataset, self._max_bad_fraction = dataset, max_bad_fraction
        self._lines = JsonlFile(path) if path else None
        self._written = {str(line.get("key")) for line in self._lines.read()} if self._lines else set()
        self._bad_clips = 0
        self.clips = 0  # good ones that have been made

    def add(self, sample: int, reason: str, clips: int) -> None:
        """Write a sample down, once a run; raises InputError when the bad share passes what the user allows."""
        video, where = self._dataset.samples[sample], self._dataset.where(sample)
        self._bad_clips += clips
        if self._lines is not None and video.key not in self._written:
            self._written.add(video.key)
            self._lines.add({"key": video.key, "where": where, "source": video.source, "reason": reason})
        if self._bad_clips > self._max_bad_fraction * max(self.clips, MIN_CLIPS):
            raise InputError(
                f"{self._bad_clips} of {self.clips} clips came from videos that cannot be decoded, the last one {where}"
                f" ({reason}): more than data.max_bad_fraction = {self._max_bad_fraction} allows"
                + (f"; see {self._lines.path}" if self._lines else "")
            )
