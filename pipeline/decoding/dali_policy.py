"""Which videos DALI decodes (NVDEC on a GPU); PyAV decodes all others."""

import math
from typing import NamedTuple

from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice


class DaliPolicy(NamedTuple):
    """A pure function of video and place, so that the same videos go to the same decoder in every run with the same
    configuration, except after failures of DALI, which a resumed run does not remember."""

    codecs: frozenset[str] = frozenset()  # that DALI decodes, and is to decode
    share: float = 0.0  # of the videos, spread evenly over all decodes
    side_step: int = 1  # sides must be multiples of this: see format.SIDE_STEP

    def suits_dali(self, sample: Sample, decode: int, video: VideoSlice) -> bool:
        """Return whether DALI decodes a video; `decode`: number of the decode in the run."""
        if sample.codec not in self.codecs or sample.width % self.side_step or sample.height % self.side_step:
            return False
        if math.floor((decode + 1) * self.share) == math.floor(decode * self.share):
            return False
        # What was re-encoded for training has groups; decoders may not agree about other videos.
        return video.in_groups
