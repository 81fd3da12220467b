"""Say how large a dataset will become and how long making it takes, from a few of its videos."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shard_tools.inputs import Item
from shard_tools.layout import shuffled_by
from shard_tools.settings import Settings
from shard_tools.work import Job, Outcome, work
from terminal import say

NUM_TRIED = 12


def estimate(items: Sequence[Item], settings: Settings, num_workers: int) -> None:
    """Print the expected size and time; works on a dozen random videos, one after the other."""
    usable = [item for item in items if item.problem is None]
    tried = shuffled_by(usable, lambda item: item.source)[:NUM_TRIED]
    source_bytes = stored_bytes = num_rejected = num_frames = 0
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number, item in enumerate(tried):
            outcome = work(Job(item.source, item.location, None, Path(folder, str(number)), settings))
            if not isinstance(outcome, Outcome):
                raise outcome
            num_rejected += outcome.reason is not None
            source_bytes += item.size
            stored_bytes += sum(sample.size for sample, _ in outcome.samples)
            num_frames += sum(sample.num_frames for sample, _ in outcome.samples)
    seconds = time.perf_counter() - start
    # Videos differ more in length than in what a byte of them costs.
    factor = sum(item.size for item in usable) / source_bytes if source_bytes else len(usable) / max(len(tried), 1)
    say(
        f"{len(tried)} of {len(items)} videos tried, {num_rejected} unusable: expect about "
        f"{stored_bytes * factor / 1e9:.3g} GB, {num_frames * factor:.3g} frames and "
        f"{seconds * factor / num_workers / 60:.3g} minutes with {num_workers} workers"
    )
