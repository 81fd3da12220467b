"""Say how large a dataset will become and how long making it takes, from a few of its videos."""

import heapq
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common.logging import format_bytes, format_duration, format_number, log
from shard_tools.inputs import Inputs, Item
from shard_tools.settings import Settings
from shard_tools.work import Job, Outcome, process_job
from shard_tools.write import tar_metadata

NUM_TRIED = 12
TAR_BLOCK = 512  # a member has a header of one, and fills its last one


def estimate(splits: Sequence[Inputs], settings: Settings, num_workers: int) -> None:
    """Print the expected size and time; works on a dozen videos of all sizes, one after the other."""
    num_rejected = num_tried = 0
    num_bytes = num_frames = seconds = 0.0
    ordered = heapq.merge(*(inputs.by_size() for inputs in splits), key=lambda item: (item.size, item.source))
    with tempfile.TemporaryDirectory() as folder:
        for group in by_size(ordered, sum(inputs.num_usable for inputs in splits)):
            item = group.middle
            start = time.perf_counter()
            outcome = process_job(Job(item.source, item.location, None, Path(folder, str(num_tried)), settings))
            if not isinstance(outcome, Outcome):
                raise outcome
            num_tried += 1
            # Videos differ more in length than in what a byte of them costs.
            times = group.num_bytes / item.size if item.size else group.num_videos
            seconds += times * (time.perf_counter() - start)
            num_rejected += outcome.reason is not None
            for sample, _ in outcome.samples:
                num_bytes += times * sum(in_tar(size) for size in (sample.size, len(tar_metadata(sample))))
                num_frames += times * sample.num_frames
    num_bytes = -(-num_bytes // tarfile.RECORDSIZE) * tarfile.RECORDSIZE  # a tar ends in zeros
    log(
        f"{num_tried} of {sum(map(len, splits))} videos tried, {num_rejected} unusable: expect about"
        f" {format_bytes(num_bytes)}, {format_number(num_frames)} frames and"
        f" {format_duration(seconds / num_workers)} with {num_workers} workers"
    )


class Group(NamedTuple):
    """Videos of about one size."""

    middle: Item
    num_videos: int
    num_bytes: int


def by_size(ordered: Iterable[Item], total: int) -> Iterator[Group]:
    """At most NUM_TRIED groups of about as many items each, of `total` items that come by size."""
    items, num_groups = iter(ordered), min(NUM_TRIED, total)
    for number in range(num_groups):
        count = total * (number + 1) // num_groups - total * number // num_groups
        num_bytes = 0
        for place, item in enumerate(islice(items, count)):
            num_bytes += item.size
            if place == count // 2:
                middle = item
        yield Group(middle, count, num_bytes)


def in_tar(size: int) -> int:
    """Bytes that a file of this size takes in a tar."""
    return TAR_BLOCK + -(-size // TAR_BLOCK) * TAR_BLOCK
