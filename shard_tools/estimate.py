"""Estimate how large a dataset will become and how long creating it takes, from a few of its videos."""

import heapq
import tarfile
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from common.logging import format_bytes, format_duration, format_number, log
from shard_tools.inputs import Inputs
from shard_tools.settings import Settings
from shard_tools.work import Job, Outcome, process_job
from shard_tools.write import tar_metadata

MAX_TRIED = 12


def estimate_dataset(splits: Sequence[Inputs], settings: Settings, num_workers: int) -> None:
    """Print the expected size and time; processes a dozen videos of all sizes, one after the other."""
    num_rejected = 0
    num_bytes = num_frames = seconds = 0.0
    by_size = heapq.merge(*(inputs.by_size() for inputs in splits), key=lambda item: (item.size, item.source))
    num_usable = sum(inputs.num_usable for inputs in splits)
    num_tried = min(MAX_TRIED, num_usable)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_tried):  # the middle one of as many groups of videos of about one size
            group = list(islice(by_size, num_usable * (number + 1) // num_tried - num_usable * number // num_tried))
            item = group[len(group) // 2]
            start = time.perf_counter()
            outcome = process_job(Job(item.source, item.location, None, Path(folder, str(number)), settings))
            if not isinstance(outcome, Outcome):
                raise outcome
            # Videos differ more in length than in what a byte of them costs.
            times = sum(other.size for other in group) / item.size if item.size else len(group)
            seconds += times * (time.perf_counter() - start)
            num_rejected += outcome.reason is not None
            for sample, _ in outcome.samples:
                num_bytes += times * sum(_bytes_in_tar(size) for size in (sample.size, len(tar_metadata(sample))))
                num_frames += times * sample.num_frames
    num_bytes = -(-num_bytes // tarfile.RECORDSIZE) * tarfile.RECORDSIZE  # a tar ends in zeros
    log(
        f"tried {num_tried} of {sum(map(len, splits))} videos, {num_rejected} unusable: expect about"
        f" {format_bytes(num_bytes)}, {format_number(num_frames)} frames and"
        f" {format_duration(seconds / num_workers)} with {num_workers} workers"
    )


def _bytes_in_tar(size: int) -> int:
    """Count the header of one block, and the last block, which is filled up."""
    return tarfile.BLOCKSIZE * (1 + -(-size // tarfile.BLOCKSIZE))
