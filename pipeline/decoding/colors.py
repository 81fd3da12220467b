"""How a decoded frame's planes are to be read: matrix, range and place of the chroma samples, as the frame declares
them."""

from av.video.frame import VideoFrame

# Matrices by MatrixCoefficients of Rec. ITU-T H.273, §8.3, by FFmpeg's names for them.
BT601, BT709, BT2020 = "smpte170m", "bt709", "bt2020nc"
MATRICES = {1: BT709, 9: BT2020, 10: BT2020}
FULL_RANGE = 2  # AVCOL_RANGE_JPEG
# Where 4:2:0 has its first chroma sample: pixels right of and below the center of the first one of luma.
CHROMA_PLACES = {"left": (0.0, 0.5), "center": (0.5, 0.5)}


def describe(frame: VideoFrame) -> tuple[object, ...]:
    """Return what decides how a frame is to be read: cheap to compare, as frames of a video rarely differ in it."""
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
    return int(frame.color_range) == FULL_RANGE or frame.format.name.startswith("yuvj")


def find_siting(frame: VideoFrame) -> str:
    """Return where chroma lies among the pixels that share it: left (H.264's default, MPEG-2) or center (JPEG).

    PyAV does not tell; like mpv, go by the range.
    """
    return "center" if is_full_range(frame) else "left"
