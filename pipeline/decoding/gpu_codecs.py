"""Which codecs of a dataset DALI decodes on a device: it is tried on a few videos of each."""

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice

import numpy as np
import torch

from adamae.common.errors import InputError
from adamae.common.logging import log_note
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.dali_jpeg import JpegGraph
from adamae.pipeline.decoding.dali_video import DaliGraph
from adamae.pipeline.decoding.encoded import MJPEG, EncodedPictures, GpuCodecs
from adamae.pipeline.decoding.joining import Cut, JoinedVideo
from adamae.pipeline.planning.crops import Crop, FrameSize
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import SIDE_STEP
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.video_error import VideoError

# The first samples of a dataset, among which some of each codec are looked for.
MAX_PROBED_SAMPLES = 1000
# Videos of a codec that are tried, as one may be corrupt.
MAX_PROBES = 3
# The clip that is made of their first frame.
PROBE_SIZE = FrameSize(16, 16)
PROBE_ROW = PlanRow(0, 0, (0,), Crop(0, 0, 16, 16), flip=False)
NVDEC = "libnvcuvid.so.1"
# For so long, speeds of NVDEC are not measured. It opens a session when a pipeline first meets a
# size of frames, and nobody tells when the last one is open: about 43 for 36 videos (by a
# simulation), of 50 ms or more each (docs/shards.md).
SESSION_SECONDS = 10.0


def find_gpu_codecs(dataset: ShardDataset, device: torch.device, config: DataConfig) -> GpuCodecs:
    """Return the codecs of a dataset that DALI is to decode on a device.

    There are none if data.decoder is pyav. Raise InputError if data.decoder is dali and DALI lacks
    one of them.
    """
    if config.decoder == "pyav":
        return GpuCodecs()
    side_step = SIDE_STEP if device.type == "cuda" else 1
    errors: dict[str, str] = {}
    for codec in sorted(dataset.info.codecs):
        error = _probe_codec(dataset, codec, device, side_step)
        if error:
            errors[codec] = error
    if errors:
        reasons = "; ".join(dict.fromkeys(errors.values()))
        sentence = (
            f"DALI cannot decode {', '.join(errors)} on {device.type} ({reasons}),"
            f" which {dataset.folder} contains"
        )
        if config.decoder == "dali":
            raise InputError(f"{sentence}: set data.decoder to auto")
        log_note(f"{sentence}: PyAV decodes it, in {config.workers} processes", once_per_node=True)
    return GpuCodecs(frozenset(dataset.info.codecs) - errors.keys(), side_step)


def _probe_codec(dataset: ShardDataset, codec: str, device: torch.device, side_step: int) -> str:
    """Decode videos of a codec with DALI until one succeeds.

    Return the error if none does, otherwise "".
    """
    if codec == MJPEG:
        # Decoders of JPEGs take any size.
        side_step = 1
    error = ""
    for index in islice(_list_probes(dataset, codec, side_step), MAX_PROBES):
        with suppress(VideoError):
            sample = dataset.samples[index]
            sides = sample.width, sample.height
            error = try_decoding(dataset.read_clip(index, (0,)), codec, sides, device)
            if not error:
                break
    return error


def _list_probes(dataset: ShardDataset, codec: str, side_step: int) -> Iterator[int]:
    """Yield the indices of samples of a codec whose sides suit the decoder."""
    for index, sample in enumerate(islice(dataset.samples, MAX_PROBED_SAMPLES)):
        sides_fit = sample.width % side_step == 0 and sample.height % side_step == 0
        if sample.codec == codec and sides_fit:
            yield index


# A run opens several loaders.
@lru_cache(maxsize=16)
def try_decoding(
    video: VideoSlice, codec: str, sides: tuple[int, int], device: torch.device
) -> str:
    """Decode the first frame of a video. Return the error, "" if there is none."""
    try:
        if codec == MJPEG:
            decode_picture(video, sides, device)
        else:
            decode_frame(video, device)
    except (RuntimeError, ImportError, OSError) as error:
        # DALI raises the first, Python's import the second, and the third is of a library that is
        # not there.
        advice = ""
        if NVDEC in str(error):
            advice = "; containers have it with NVIDIA_DRIVER_CAPABILITIES=compute,video,utility"
        return shorten(error) + advice
    return ""


def decode_frame(video: VideoSlice, device: torch.device) -> None:
    if device.type == "cuda":
        ctypes.CDLL(NVDEC)
    graph = DaliGraph(device, 1, PROBE_SIZE, max_videos=1)
    data = np.frombuffer(video.data, np.uint8)
    graph.feed([JoinedVideo(data, [0], [Cut(0, PROBE_ROW, 0, [0])])])
    graph.take()


def decode_picture(video: VideoSlice, sides: tuple[int, int], device: torch.device) -> None:
    pictures = EncodedPictures.find(video, [PROBE_ROW], sides)
    # Of copied videos, no picture is found; these are PyAV's in any case.
    if pictures is not None:
        graph = JpegGraph(device, 1, PROBE_SIZE, pictures.num_frames, num_threads=1)
        graph.feed({0: pictures}, np.frombuffer(video.data, np.uint8)).take()


def shorten(error: Exception) -> str:
    """Return DALI's message, which has many lines and stack traces, as one."""
    reason = str(error).rpartition("encountered:")[2].partition("C++ context:")[0]
    return " ".join(reason.split())[:400]
