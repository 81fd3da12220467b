"""Videos that failed at run time: written down and counted, until too many end the run."""

import json
from pathlib import Path

from adamae.common.errors import InputError
from adamae.common.jsonl import append_line, end_last_line, read_jsonl
from adamae.pipeline.shards.dataset import ShardDataset

# With fewer clips a fraction says little: one bad video among the first ten is not 10 % of the
# data.
MIN_CLIPS = 200


class Quarantine:
    """The bad samples of a run; one file may serve several processes."""

    def __init__(self, dataset: ShardDataset, path: Path | None, max_bad_fraction: float) -> None:
        """Continue the file `path`; None: bad clips are only counted.

        An interrupted run may have left half a line at its end.
        """
        self._dataset = dataset
        self._path = path
        self._max_bad_fraction = max_bad_fraction
        self._written_keys: set[str] = set()
        if path is not None:
            self._written_keys = {str(line.get("key")) for line in read_jsonl(path)}
            end_last_line(path)

    def add(self, sample: int, reason: str, bad_clips: int, clips: int) -> None:
        """Write a sample down, once per run.

        `bad_clips` and `clips` are counts since the start. Raise InputError if so many bad clips
        are more than data.max_bad_fraction allows.
        """
        video = self._dataset.samples[sample]
        where = self._dataset.describe_location(sample)
        if self._path is not None and video.key not in self._written_keys:
            self._written_keys.add(video.key)
            line = {"key": video.key, "where": where, "source": video.source, "reason": reason}
            append_line(self._path, json.dumps(line) + "\n")
        if bad_clips > self._max_bad_fraction * max(clips, MIN_CLIPS):
            message = (
                f"{bad_clips} of {clips} clips came from videos that cannot be decoded, the last"
                f" one {where} ({reason}): more than data.max_bad_fraction ="
                f" {self._max_bad_fraction} allows"
            )
            if self._path is not None:
                message += f"; see {self._path}"
            raise InputError(message)
