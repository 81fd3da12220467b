"""How the planes of a decoded frame are to be read, as the frame declares it.

That is the matrix, the range of the samples, and where those of chroma lie.
"""

from av.video.frame import VideoFrame

# The matrices that clips can be made with, by FFmpeg's names, and where they are declared: the
# number is MatrixCoefficients of Rec. ITU-T H.273, section 8.3. 9 and 10 are BT.2020 with constant
# and non-constant luminance; like most players, read both as the latter.
BT601 = "smpte170m"
BT709 = "bt709"
BT2020 = "bt2020nc"
MATRICES = {1: BT709, 9: BT2020, 10: BT2020}
# FFmpeg's AVCOL_RANGE_JPEG.
FULL_RANGE = 2
# Where the first chroma sample of 4:2:0 lies: pixels to the right of and below the center of the
# first luma sample.
CHROMA_OFFSETS = {"left": (0.0, 0.5), "center": (0.5, 0.5)}


def describe(frame: VideoFrame) -> tuple[object, ...]:
    """Return what decides how a frame is to be read.

    Comparing it is cheap, and the frames of a video rarely differ in it, so what follows from it is
    worked out once per video.
    """
    return (
        frame.format.name,
        frame.width,
        frame.height,
        frame.rotation,
        frame.colorspace,
        frame.color_range,
    )


def find_matrix(frame: VideoFrame) -> str:
    """Return the matrix that a frame declares; BT601 if it declares none, or none of the three."""
    return MATRICES.get(int(frame.colorspace), BT601)


def is_full_range(frame: VideoFrame) -> bool:
    """Return whether samples use their whole range.

    In 8 bits that is 0 to 255 (JPEG) instead of 16 to 235 for luma and 16 to 240 for chroma.
    """
    return int(frame.color_range) == FULL_RANGE or frame.format.name.startswith("yuvj")


def find_siting(frame: VideoFrame) -> str:
    """Return where chroma lies among its pixels: left (H.264's default, MPEG-2) or center (JPEG).

    PyAV does not tell what a frame declares. Like mpv, go by the range.
    """
    return "center" if is_full_range(frame) else "left"
