"""Which encoder stands behind each codec name, and how it is told to make streams that a training run reads fast."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from av.video.codeccontext import VideoCodecContext

os.environ.setdefault("SVT_LOG", "1")  # SVT-AV1 writes to stderr past FFmpeg's log level: errors only


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to store video. `options(gop, quality, preset)` are FFmpeg's options for its encoder."""

    encoder: str
    container: str
    options: Callable[[int, int, str], dict[str, str]]
    default_quality: int  # lower is better; each codec has its own scale
    pixel_format: str = "yuv420p"
    full_range: bool = False


# Every encoder runs on one thread: the workers are the parallelism, and one thread gives the same bytes everywhere.
# Every group of pictures is closed and of fixed length, without scene-cut key frames and B-frames: reaching a frame
# costs at most gop - 1 others, and frames come out of the decoder in the order in which they are stored.


def _x264(gop: int, quality: int, preset: str) -> dict[str, str]:
    # cpu-independent: otherwise mbtree rounds as the processor likes, and one video in a hundred or so comes out a few
    # bytes different, also on the same machine.
    return {
        "preset": preset,
        "crf": str(quality),
        "x264-params": f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes=0:open-gop=0:threads=1:lookahead-threads=1"
        ":cpu-independent=1",
    }


def _x265(gop: int, quality: int, preset: str) -> dict[str, str]:
    keys = f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes=0:open-gop=0"
    # x265 writes to stderr by itself, past FFmpeg's log level.
    threads = "pools=none:frame-threads=1:wpp=0:lookahead-slices=0:log-level=none"
    return {"preset": preset, "crf": str(quality), "x265-params": f"{keys}:{threads}"}


def _vp9(gop: int, quality: int, preset: str) -> dict[str, str]:
    # Alternate reference frames are VP9's B-frames: without look-ahead there are none.
    quick = {"deadline": "good", "cpu-used": "4", "row-mt": "0", "auto-alt-ref": "0", "lag-in-frames": "0"}
    return {"crf": str(quality), "b": "0", "g": str(gop), "keyint_min": str(gop), **quick}


def _av1(gop: int, quality: int, preset: str) -> dict[str, str]:
    # lp=1 is more than thrift: with several threads a stage, SVT-AV1 4.1 and 4.2 give packets with another frame's time
    # (about one video in a thousand on a busy machine; with lp=1 none of 21,000), which the muxer refuses.
    return {"preset": "8", "crf": str(quality), "g": str(gop), "svtav1-params": "lp=1:pred-struct=1:scd=0"}


def _mjpeg(gop: int, quality: int, preset: str) -> dict[str, str]:
    return {"qmin": str(quality), "qmax": str(quality)}


def _mpeg4(gop: int, quality: int, preset: str) -> dict[str, str]:
    return {"g": str(gop), "bf": "0", "qmin": str(quality), "qmax": str(quality)}


CODECS = {
    "h264": Codec("libx264", "mp4", _x264, default_quality=23),
    "hevc": Codec("libx265", "mp4", _x265, default_quality=25),
    "vp9": Codec("libvpx-vp9", "mp4", _vp9, default_quality=31),
    "mjpeg": Codec("mjpeg", "mp4", _mjpeg, default_quality=4, pixel_format="yuvj420p", full_range=True),
    "av1": Codec("libsvtav1", "mp4", _av1, default_quality=32),
    "mpeg4": Codec("mpeg4", "mp4", _mpeg4, default_quality=4),
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
