"""A decode process that hangs in those videos whose hashes $HANGING holds."""

import os
import time
from typing import Any

from pipeline.decoding import process
from pipeline.decoding.sources import CLIP_SOURCES
from pipeline.decoding.video_source import VideoSource
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice


class HangingSource(VideoSource):
    def cut_views(self, video: VideoSlice, sample: Sample, *others: Any) -> int:
        if sample.sha256 in os.environ["HANGING"]:
            time.sleep(600)
        return super().cut_views(video, sample, *others)


def answer(socket: int, file: int) -> None:
    CLIP_SOURCES["video"] = HangingSource()
    process.answer(socket, file)
