"""What the video decoder of this GPU (NVDEC) takes, as its driver says."""

import ctypes
from dataclasses import dataclass

import torch

from pipeline.shards.format import SIDE_STEP

LIBRARY = "libnvcuvid.so.1"
# By FFmpeg's names, cudaVideoCodec of NVIDIA's cuviddec.h. These are what `fn.decoders.video` hands to NVDEC: the
# documentation of DALI 2.4 lists MJPEG too, but its FramesDecoderGpu::SelectVideoStream turns it away.
CODECS = {"mpeg4": 2, "h264": 4, "hevc": 8, "vp8": 9, "vp9": 10, "av1": 11}
YUV_420 = 1  # cudaVideoChromaFormat


class NvdecError(Exception):
    """NVDEC is out of reach; the message is the reason."""


@dataclass(frozen=True)
class Limits:
    """Sizes of video, in pixels, that a decoder takes, and how many such decoders there are."""

    min_width: int = 1
    min_height: int = 1
    max_width: int = 2**31
    max_height: int = 2**31
    max_area: int = 2**62
    step: int = 1  # sides are multiples of it
    num_decoders: int = 0  # engines of the GPU; 0: threads of the CPU

    def admit(self, width: int, height: int) -> bool:
        fits = self.min_width <= width <= self.max_width and self.min_height <= height <= self.max_height
        return fits and width * height <= self.max_area and width % self.step == height % self.step == 0


class _Capabilities(ctypes.Structure):
    """CUVIDDECODECAPS of cuviddec.h: the driver fills in what follows `reserved1`."""

    _fields_ = (
        ("codec", ctypes.c_int),
        ("chroma", ctypes.c_int),
        ("bits_above_8", ctypes.c_uint),
        ("reserved1", ctypes.c_uint * 3),
        ("is_supported", ctypes.c_ubyte),
        ("num_decoders", ctypes.c_ubyte),
        ("output_formats", ctypes.c_ushort),
        ("max_width", ctypes.c_uint),
        ("max_height", ctypes.c_uint),
        ("max_macroblocks", ctypes.c_uint),
        ("min_width", ctypes.c_ushort),
        ("min_height", ctypes.c_ushort),
        ("histogram", ctypes.c_ubyte),
        ("histogram_bits", ctypes.c_ubyte),
        ("histogram_bins", ctypes.c_ushort),
        ("reserved3", ctypes.c_uint * 10),
    )


def read_limits(device: torch.device) -> dict[str, Limits]:
    """Codecs that NVDEC decodes as 8-bit 4:2:0, with the sizes it takes by way of DALI (see shards.SIDE_STEP).

    Raises NvdecError if it cannot be asked.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        raise NvdecError(
            f"{LIBRARY} is not here (a container gets it from the host if NVIDIA_DRIVER_CAPABILITIES includes video)"
        ) from None
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # gives this thread the CUDA context that the driver asks for
        asked = {codec: _ask(library, number) for codec, number in CODECS.items()}
    answered = {codec: found for codec, (error, found) in asked.items() if not error}
    if not answered:
        errors = ", ".join(str(error) for error in sorted({error for error, _ in asked.values()}))
        raise NvdecError(f"its driver answers CUDA error {errors} when asked what it decodes")
    return {codec: _limits(found) for codec, found in answered.items() if found.is_supported}


def _limits(found: _Capabilities) -> Limits:
    return Limits(
        found.min_width,
        found.min_height,
        found.max_width,
        found.max_height,
        found.max_macroblocks * 256,
        SIDE_STEP,
        found.num_decoders,
    )


def _ask(library: ctypes.CDLL, codec: int) -> tuple[int, _Capabilities]:
    """CUDA's error, 0 if there is none, and what the driver has filled in."""
    capabilities = _Capabilities(codec=codec, chroma=YUV_420)
    return library.cuvidGetDecoderCaps(ctypes.byref(capabilities)), capabilities
