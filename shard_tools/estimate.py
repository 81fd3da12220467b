"""Say how large a dataset will become and how long making it takes, from a few of its videos."""

import tarfile
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from shard_tools.inputs import Item
from shard_tools.settings import Settings
from shard_tools.work import Job, Outcome, work
from shard_tools.write import tar_metadata
from terminal import in_bytes, in_time, rounded, say

NUM_TRIED = 12
TAR_BLOCK = 512  # a member has a header of one, and fills its last one


def estimate(items: Sequence[Item], settings: Settings, num_workers: int) -> None:
    """Print the expected size and time; works on a dozen videos of all sizes, one after the other."""
    num_rejected = 0
    num_bytes = num_frames = seconds = 0.0
    groups = by_size([item for item in items if item.problem is None])
    with tempfile.TemporaryDirectory() as folder:
        for number, group in enumerate(groups):
            item = group[len(group) // 2]
            start = time.perf_counter()
            outcome = work(Job(item.source, item.location, None, Path(folder, str(number)), settings))
            if not isinstance(outcome, Outcome):
                raise outcome
            # Videos differ more in length than in what a byte of them costs.
            times = sum(other.size for other in group) / item.size if item.size else len(group)
            seconds += times * (time.perf_counter() - start)
            num_rejected += outcome.reason is not None
            for sample, _ in outcome.samples:
                num_bytes += times * sum(in_tar(size) for size in (sample.size, len(tar_metadata(sample))))
                num_frames += times * sample.num_frames
    num_bytes = -(-num_bytes // tarfile.RECORDSIZE) * tarfile.RECORDSIZE  # a tar ends in zeros
    say(
        f"{len(groups)} of {len(items)} videos tried, {num_rejected} unusable: expect about {in_bytes(num_bytes)},"
        f" {rounded(num_frames)} frames and {in_time(seconds / num_workers)} with {num_workers} workers"
    )


def by_size(items: Sequence[Item]) -> list[list[Item]]:
    """At most NUM_TRIED groups of about as many items each, from the smallest to the largest."""
    ordered = sorted(items, key=lambda item: (item.size, item.source))
    count = min(NUM_TRIED, len(ordered))
    ends = [len(ordered) * number // count for number in range(count + 1)] if count else [0]
    return [ordered[start:end] for start, end in pairwise(ends)]


def in_tar(size: int) -> int:
    """Bytes that a file of this size takes in a tar."""
    return TAR_BLOCK + -(-size // TAR_BLOCK) * TAR_BLOCK
