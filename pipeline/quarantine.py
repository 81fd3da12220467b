"""Videos that failed at run time: written down, counted, and too many of them end the run."""

import json
from pathlib import Path

from adamae.common.errors import InputError
from adamae.common.jsonl import append_line, end_last_line, read_jsonl
from adamae.pipeline.shards.dataset import ShardDataset

# Below this many clips a share says little: one bad video among the first ten is not 10 % of the data.
MIN_CLIPS = 200


class Quarantine:
    """The bad samples of a run; one file may serve several processes."""

    def __init__(self, dataset: ShardDataset, path: Path | None, max_bad_fraction: float) -> None:
        self._dataset, self._path, self._max_bad_fraction = dataset, path, max_bad_fraction
        self._written = {str(line.get("key")) for line in read_jsonl(path)} if path else set()
        if path:
            end_last_line(path)

    def add(self, sample: int, reason: str, bad_clips: int, clips: int) -> None:
        """Write a sample down, once a run; raises InputError if so many bad clips are more than the user allows."""
        video, where = self._dataset.samples[sample], self._dataset.describe_location(sample)
        if self._path is not None and video.key not in self._written:
            self._written.add(video.key)
            line = {"key": video.key, "where": where, "source": video.source, "reason": reason}
            append_line(self._path, json.dumps(line) + "\n")
        if bad_clips > self._max_bad_fraction * max(clips, MIN_CLIPS):
            raise InputError(
                f"{bad_clips} of {clips} clips came from videos that cannot be decoded, the last one {where}"
                f" ({reason}): more than data.max_bad_fraction = {self._max_bad_fraction} allows"
                + (f"; see {self._path}" if self._path else "")
            )
