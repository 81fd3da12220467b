"""What the headers of videos say, before anything is decoded."""

import io
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import av
import fsspec
import numpy as np

from model.config import ModelConfig
from pipeline.decoding.containers import main_stream, open_video
from pipeline.planning.plan import largest_stride
from shard_tools.inputs import Item, Location, Segment
from shard_tools.settings import Settings

THREADS = 16  # they wait for the disk, or for the network
MAX_PROBED = 1000  # videos whose lengths are looked at: a second


class Header(NamedTuple):
    seconds: float = 0.0  # 0: it does not say, or is no video
    fps: float = 0.0  # likewise


def probe_header(location: Location, fps: float | None = None) -> Header:
    """Read a video's header; a folder of frames has `fps` of them a second."""
    try:
        if fps and isinstance(location, str) and os.path.isdir(location):
            return Header(len(os.listdir(location)) / fps, fps)
        file = fsspec.open(location) if isinstance(location, str) else io.BytesIO(location.read())
        with file as content, open_video(content) as container:
            stream = main_stream(container)
            rate = float((stream and (stream.average_rate or stream.guessed_rate)) or 0)
            if container.duration is None and stream and rate:  # as recorders write WebM
                return Header(sum(packet.size > 0 for packet in container.demux(stream)) / rate, rate)
            return Header((container.duration or 0) / av.time_base, rate)
    except (av.error.FFmpegError, OSError, ValueError):
        return Header()


def warn_of_short_videos(items: Iterable[Item], settings: Settings) -> list[str]:
    """Return a sentence if many of these videos, and the segments of them, would be stored with fewer frames than a
    clip has by default, and a smaller stride would help."""
    tried, num_frames = list(items), ModelConfig.num_frames
    with ThreadPoolExecutor(THREADS) as threads:
        headers = threads.map(probe_header, (item.location for item in tried))
        counts = [count_source_frames(*each, settings.clip_seconds) for each in zip(tried, headers, strict=True)]
    frames = np.array([count for count in counts if count], dtype=np.int64)
    stride = settings.to_json()["frame_stride"]  # 1 where bytes are copied
    if settings.fps or not len(frames) or (wanted := largest_stride(frames, num_frames)) >= stride:
        return []
    short = int((-(-frames // stride) < num_frames).sum())
    return [
        f"WARNING: {short} of {len(frames)} videos would have fewer than {num_frames} frames, of which one of every"
        f" {stride} is stored: give --frame-stride {wanted}, and train with data.frame_stride={wanted}"
    ]


def count_source_frames(item: Item, header: Header, clip_seconds: float | None) -> int:
    """Return the frames of a video, a segment or a piece by the header; 0 if it does not say."""
    start, end, in_frames, _ = item.segment or Segment(0, clip_seconds or math.inf)
    rate = 1 if in_frames else header.fps
    length = min(end * rate, header.seconds * header.fps or math.inf) - start * rate if rate else 0
    return round(length) if 0 < length < math.inf else 0
