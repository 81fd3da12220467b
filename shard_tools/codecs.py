"""The encoder behind each codec name, with the options that make its streams fast to read."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from av.video.codeccontext import VideoCodecContext

# SVT-AV1 writes to stderr whatever FFmpeg's log level is. At level 1 it writes errors alone.
os.environ.setdefault("SVT_LOG", "1")

CONTAINER = "mp4"
TUNES = ("decode", "size")
# FFmpeg's AVCOL_SPC_SMPTE170M.
BT601 = 6
# FFmpeg's AVCOL_RANGE_MPEG and AVCOL_RANGE_JPEG.
LIMITED = 1
FULL = 2


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to store video.

    `options` are those of FFmpeg's encoder, with {gop}, {quality} and {preset} to be filled in.
    `decode_options` are added with --tune decode; without any, --tune has no effect.
    """

    encoder: str
    # Lower is better, on a scale of the codec's own.
    default_quality: int
    options: dict[str, str]
    decode_options: dict[str, str] = field(default_factory=dict)
    # The default quality with --tune decode, where it differs.
    decode_quality: int | None = None
    pixel_format: str = "yuv420p"
    color_range: int = LIMITED

    def fill_options(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Return the encoder's options for settings as `dataset.json` records them."""
        options = dict(self.options)
        if settings.get("tune") == "decode":
            options |= self.decode_options
        return {name: text.format(**settings) for name, text in options.items()}


# Every encoder runs on one thread: the workers are the parallelism, and one thread gives the same
# bytes everywhere. Every group of pictures is closed and of fixed length, without scene-cut key
# frames and B-frames: reaching a frame costs at most gop - 1 others, and frames come out of the
# decoder in the order in which they are stored.
X26X = "keyint={gop}:min-keyint={gop}:scenecut=0:bframes=0:open-gop=0"
# x264: CAVLC instead of CABAC, no deblocking, no weighted prediction; x265: no deblocking, no SAO,
# no weighted prediction. The default CRF is one lower, which keeps PSNR at that of --tune size
# (benchmarks/experiments.md): h264 decodes in 5.2 instead of 9.9 ms per clip of 16 frames and
# encodes in 31 instead of 40, for 22 % more bytes; hevc decodes in 14.4 instead of 15.3 ms, for
# 13 % more bytes.
FAST = {"tune": "fastdecode"}
CODECS = {
    # cpu-independent: otherwise mbtree rounds as the processor likes, and one video in a hundred
    # or so comes out a few bytes different, even on the same machine.
    "h264": Codec(
        "libx264",
        default_quality=23,
        options={
            "preset": "{preset}",
            "crf": "{quality}",
            "x264-params": f"{X26X}:threads=1:lookahead-threads=1:cpu-independent=1",
        },
        decode_options=FAST,
        decode_quality=22,
    ),
    # x265 writes to stderr by itself, whatever FFmpeg's log level is.
    "hevc": Codec(
        "libx265",
        default_quality=25,
        options={
            "preset": "{preset}",
            "crf": "{quality}",
            "x265-params": f"{X26X}:pools=none"
            ":frame-threads=1:wpp=0:lookahead-slices=0:log-level=none",
        },
        decode_options=FAST,
        decode_quality=24,
    ),
    # VP9's alternate reference frames play the part of B-frames. Without look-ahead there are none.
    "vp9": Codec(
        "libvpx-vp9",
        default_quality=31,
        options={
            "crf": "{quality}",
            "b": "0",
            "g": "{gop}",
            "keyint_min": "{gop}",
            "deadline": "good",
            "cpu-used": "4",
            "row-mt": "0",
            "auto-alt-ref": "0",
            "lag-in-frames": "0",
        },
    ),
    "mjpeg": Codec(
        "mjpeg",
        default_quality=4,
        options={"qmin": "{quality}", "qmax": "{quality}"},
        pixel_format="yuvj420p",
        color_range=FULL,
    ),
    # lp=1 is needed for correctness too: with several threads per stage, SVT-AV1 4.1 and 4.2 give
    # packets with another frame's time (about one video in a thousand on a busy machine; with lp=1
    # none of 21,000), which the muxer refuses.
    "av1": Codec(
        "libsvtav1",
        default_quality=32,
        options={
            "preset": "8",
            "crf": "{quality}",
            "g": "{gop}",
            "svtav1-params": "lp=1:pred-struct=1:scd=0",
        },
    ),
    "mpeg4": Codec(
        "mpeg4",
        default_quality=4,
        options={"g": "{gop}", "bf": "0", "qmin": "{quality}", "qmax": "{quality}"},
    ),
}


def open_encoder(context: VideoCodecContext) -> None:
    """Open an encoder, and leave all threads of this process scheduled as they were.

    Where root runs it, SVT-AV1 gives its caller and its own threads the highest real-time priority,
    which every process inherits that is started from then on: a few encoders leave no core to
    anything else on the machine.
    """
    policy = os.sched_getscheduler(0)
    parameters = os.sched_getparam(0)
    context.open()
    for thread in map(int, os.listdir("/proc/self/task")):
        # A thread may have ended since it was listed.
        with suppress(ProcessLookupError):
            if os.sched_getscheduler(thread) == os.SCHED_FIFO:
                os.sched_setscheduler(thread, policy, parameters)
