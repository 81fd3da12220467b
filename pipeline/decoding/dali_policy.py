"""Which videos DALI decodes (NVDEC on a GPU); PyAV decodes all others."""

import math
from typing import NamedTuple

from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice

SHARE_STEP = 1 / 16
MIN_WAIT_S = 0.002  # shorter waits say nothing


class DaliPolicy(NamedTuple):
    """A pure function of video and place, so that the same videos go to the same decoder in every run with the same
    configuration, except after failures of DALI, which a resumed run does not remember."""

    codecs: frozenset[str] = frozenset()  # that DALI decodes, and is to decode
    share: float = 0.0  # of the videos, spread evenly over all decodes; of what a chunk may leave to DALI
    side_step: int = 1  # sides must be multiples of this: see format.SIDE_STEP

    def suits_dali(self, sample: Sample, decode: int, video: VideoSlice) -> bool:
        """Return whether DALI decodes a video; `decode`: number of the decode in the run."""
        if sample.codec not in self.codecs or sample.width % self.side_step or sample.height % self.side_step:
            return False
        if math.floor((decode + 1) * self.share) == math.floor(decode * self.share):
            return False
        # What was re-encoded for training has groups; decoders may not agree about other videos.
        return video.in_groups


class BalancedShare:
    """Which chunks are left to DALI, so that it and the workers are equally far ahead: none while the workers alone
    keep up, then more after every batch for which they are waited for longer than DALI is, and fewer after others."""

    def __init__(self) -> None:
        self.share, self._due = 0.0, 0.0

    def takes_chunk(self) -> bool:
        """Return whether the next chunk is left to DALI."""
        self._due += self.share
        is_due = self._due >= 1
        self._due -= is_due
        return is_due

    def adjust(self, workers_s: float, dali_s: float) -> None:
        """Adjust the share to how long the workers and DALI were waited for."""
        if abs(workers_s - dali_s) >= MIN_WAIT_S:
            change = SHARE_STEP if workers_s > dali_s else -SHARE_STEP
            self.share = min(1.0, max(0.0, self.share + change))
