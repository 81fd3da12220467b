"""Which encoder stands behind each codec name, and how it is told to make streams that a training run reads fast."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from av.video.codeccontext import VideoCodecContext

os.environ.setdefault(
    "SVT_LOG", "1"
)  # SVT-AV1 writes to stderr past FFmpeg's log level: errors only
CONTAINER = "mp4"
TUNES = ("decode", "size")
BT601 = 6  # AVCOL_SPC_SMPTE170M
LIMITED, FULL = 1, 2  # AVCOL_RANGE_MPEG, AVCOL_RANGE_JPEG


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to store video. `options` are FFmpeg's for its encoder, in which {gop}, {quality} and {preset} stand.

    `decode_options` join them with --tune decode; without any, --tune has no effect.
    """

    encoder: str
    default_quality: int  # lower is better; each codec has its own scale
    options: dict[str, str]
    decode_options: dict[str, str] = field(default_factory=dict)
    decode_quality: int | None = None  # the default with --tune decode, where it differs
    pixel_format: str = "yuv420p"
    color_range: int = LIMITED

    def fill_options(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Return the encoder's options by what a dataset records of its settings."""
        options = self.options | (self.decode_options if settings.get("tune") == "decode" else {})
        return {name: text.format(**settings) for name, text in options.items()}


# Every encoder runs on one thread: the workers are the parallelism, and one thread gives the same bytes everywhere.
# Every group of pictures is closed and of fixed length, without scene-cut key frames and B-frames: reaching a frame
# costs at most gop - 1 others, and frames come out of the decoder in the order in which they are stored.
X26X = "keyint={gop}:min-keyint={gop}:scenecut=0:bframes=0:open-gop=0"
# x264: CAVLC instead of CABAC, no deblocking, no weighted prediction; x265: no deblocking, no SAO, no weighted
# prediction. The default CRF is one lower, which keeps PSNR at that of --tune size (benchmarks/experiments.md): h264
# decodes in 5.2 instead of 9.9 ms per clip of 16 frames and encodes in 31 instead of 40, for 22 % more bytes; hevc in
# 14.4 instead of 15.3 ms, for 13 % more bytes.
FAST = {"tune": "fastdecode"}
CODECS = {
    # cpu-independent: otherwise mbtree rounds as the processor likes, and one video in a hundred or so comes out a few
    # bytes different, also on the same machine.
    "h264": Codec(
        "libx264",
        23,
        {
            "preset": "{preset}",
            "crf": "{quality}",
            "x264-params": f"{X26X}:threads=1:lookahead-threads=1:cpu-independent=1",
        },
        FAST,
        22,
    ),
    # x265 writes to stderr by itself, past FFmpeg's log level.
    "hevc": Codec(
        "libx265",
        25,
        {
            "preset": "{preset}",
            "crf": "{quality}",
            "x265-params": f"{X26X}:pools=none"
            ":frame-threads=1:wpp=0:lookahead-slices=0:log-level=none",
        },
        FAST,
        24,
    ),
    # Alternate reference frames are VP9's B-frames: without look-ahead there are none.
    "vp9": Codec(
        "libvpx-vp9",
        31,
        {
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
        4,
        {"qmin": "{quality}", "qmax": "{quality}"},
        pixel_format="yuvj420p",
        color_range=FULL,
    ),
    # lp=1 is more than thrift: with several threads a stage, SVT-AV1 4.1 and 4.2 give packets with another frame's time
    # (about one video in a thousand on a busy machine; with lp=1 none of 21,000), which the muxer refuses.
    "av1": Codec(
        "libsvtav1",
        32,
        {
            "preset": "8",
            "crf": "{quality}",
            "g": "{gop}",
            "svtav1-params": "lp=1:pred-struct=1:scd=0",
        },
    ),
    "mpeg4": Codec("mpeg4", 4, {"g": "{gop}", "bf": "0", "qmin": "{quality}", "qmax": "{quality}"}),
}


def open_encoder(context: VideoCodecContext) -> None:
    """Open it now, and leave all threads of this process scheduled as they were.

    Where root runs it, SVT-AV1 makes its caller and its own threads real-time ones of the highest priority, which every
    process inherits that is started from then on: a few encoders leave no core to anything else on the machine.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    context.open()
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            if os.sched_getscheduler(thread) == os.SCHED_FIFO:
                os.sched_setscheduler(thread, policy, parameters)
