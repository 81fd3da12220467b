"""How far clips are from FFmpeg's own conversion to RGB, for every pixel format that its scaler reads, wherever cut.

    python benchmarks/data/pixel_formats.py

A picture whose colours change evenly is put into each format, and boxes are cut out of it at even and odd places and
scaled to half by `pipeline.decoding.scaling.Scaler`: from the planes, and from the whole picture after FFmpeg has made
it RGB.
What differs is an error in grey levels. (tests/pipeline/test_pixel_formats.py holds RGB against arithmetic.)
"""

import argparse
from pathlib import Path

import av
import numpy as np
import torch
from av.filter import Graph
from av.video.format import VideoFormat, names  # type: ignore[attr-defined]
from av.video.frame import VideoFrame
from jaxtyping import Float, UInt8

from benchmarks.harness import RESULTS, Row, machine, write_results
from common.errors import run_command
from pipeline.decoding.scaling import BT601, FATAL, Scaler
from pipeline.decoding.video import VideoError
from pipeline.planning.crops import Crop

WIDTH, HEIGHT, SIDE = 96, 64, 24
CASES: dict[str, list[tuple[Crop, bool]]] = {
    "even": [(Crop(4, 4, 48, 48), False), (Crop(8, 0, 48, 48), True)],
    "odd_x": [(Crop(3, 4, 48, 48), False), (Crop(5, 0, 48, 48), True)],
    "odd_y": [(Crop(4, 3, 48, 48), False)],
    "odd_x_and_y": [(Crop(7, 5, 48, 48), False), (Crop(1, 9, 48, 48), True)],
    "same_size": [(Crop(4, 4, SIDE, SIDE), False), (Crop(3, 5, SIDE, SIDE), False)],
    "odd_sides": [(Crop(4, 4, 47, 45), False), (Crop(3, 7, 45, 47), True)],
}


NOTES = [
    "Grey levels, the worst pixel of a kind of place, without the border. Both results are rounded, the whole picture's"
    " twice: a chroma sample's level is 1.8 levels of blue.",
]


def picture() -> Float[np.ndarray, "H W 3"]:
    """Colours that change by at most two grey levels a pixel."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([40 + 1.5 * x, 60 + 2 * y, 220 - x - 0.5 * y], -1)


def frame_in(name: str) -> VideoFrame | None:
    """The picture in a pixel format; None where FFmpeg's scaler reads none such."""
    if name in FATAL:
        return None
    image = VideoFrame.from_ndarray(picture().round().astype(np.uint8), format="rgb24")
    if name == "pal8":
        grey, ramp = image.to_ndarray(format="gray"), np.arange(256, dtype=np.uint8)
        palette = np.stack([np.full_like(ramp, 255), ramp, ramp, ramp], 1)
        return VideoFrame.from_ndarray((grey, palette), format="pal8")  # type: ignore[arg-type]
    try:
        frame = VideoFrame(WIDTH, HEIGHT, name)
        frame.reformat(format="gbrp")
        lines = _lines(frame.format, image)
        if lines is None:
            return image.reformat(format=name, dst_colorspace="ITU601")
    except (ValueError, av.error.FFmpegError):  # one of hardware, or unknown to the scaler
        return None
    for plane, content in zip(frame.planes, lines, strict=True):
        padded = np.zeros((HEIGHT, plane.line_size), np.uint8)
        padded[:, : content.shape[1]] = content
        plane.update(padded.tobytes())
    return frame


def _lines(form: VideoFormat, image: VideoFrame) -> list[UInt8[np.ndarray, "H bytes"]] | None:
    """The picture's planes in the formats that FFmpeg's scaler reads and does not write; None for the others."""
    order, rgb = ">" if form.is_big_endian else "<", image.to_ndarray()
    if form.is_bayer:
        mosaic = np.empty((HEIGHT, WIDTH))
        for place, channel in enumerate(form.name.split("_")[1][:4]):
            at = np.s_[place // 2 :: 2, place % 2 :: 2]
            mosaic[at] = rgb[(*at, "rgb".index(channel))]
        return [(mosaic * 257).astype(order + "u2").view(np.uint8) if "16" in form.name else mosaic.astype(np.uint8)]
    if "f16" in form.name or "f32" in form.name:
        kind = order + ("f2" if "f16" in form.name else "f4")
        grey = image.to_ndarray(format="gray")
        channels = dict(zip("rgbya", (*np.moveaxis(rgb, -1, 0), grey, np.full_like(grey, 255)), strict=True))
        wanted = [channels[letter] / 255 for letter in form.name.partition("f")[0].replace("gray", "y").rstrip("p")]
        packed = wanted if form.is_planar else [np.stack(wanted, -1).reshape(HEIGHT, -1)]
        return [values.astype(kind).view(np.uint8) for values in packed]
    if form.name == "uyyvyy411":
        luma, *chroma = _planes(image.reformat(format="yuv411p", dst_colorspace="ITU601"))
        y0, y1, y2, y3 = (luma[:, start::4] for start in range(4))
        return [np.stack([chroma[0], y0, y1, chroma[1], y2, y3], -1).reshape(HEIGHT, -1)]
    return None


def _planes(frame: VideoFrame) -> list[UInt8[np.ndarray, "H W"]]:
    return [
        np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, -1)[:, : plane.width] for plane in frame.planes
    ]


def converted(frame: VideoFrame) -> VideoFrame:
    """The whole frame, made RGB by FFmpeg; planar, since its short cuts to packed RGB read some formats wrongly."""
    graph = Graph()
    size = f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1"
    steps = [("buffer", size), BT601, ("scale", "flags=bilinear+full_chroma_int+accurate_rnd")]
    graph.link_nodes(*(graph.add(*step) for step in [*steps, ("format", "gbrp")]), graph.add("buffersink")).configure()
    graph.vpush(frame)
    return graph.vpull()


def error(frame: VideoFrame, whole: VideoFrame, crop: Crop, flip: bool) -> float:
    """Grey levels between a cut of `frame` and the same cut of the `whole` picture in RGB, without the border of a
    pixel, where the one sees colours that the other has been cut from."""
    scaler = Scaler(crop, flip, SIDE, (WIDTH, HEIGHT))
    apart = np.abs(scaler(frame).astype(int) - scaler(whole))
    return float(apart[1:-1, 1:-1].max())


def errors_of(name: str) -> Row | None:
    """The worst errors in a pixel format, in grey levels by kind of place; None where the scaler does not read it.
    Raises VideoError where it fails to."""
    frame = frame_in(name)
    if frame is None:
        return None
    whole = converted(frame)
    worst = {case: round(max(error(frame, whole, *cut) for cut in cuts), 2) for case, cuts in CASES.items()}
    return {"pixel_format": name} | worst


def _row(name: str) -> Row | None:
    try:
        return errors_of(name)
    except VideoError:  # FFmpeg's scaler says that it reads these, and does not
        return {"pixel_format": name} | dict.fromkeys(CASES, "refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu")
    arguments = parser.parse_args()
    av.logging.set_level(None)
    rows = [row for row in map(_row, sorted(names)) if row is not None]
    for row in rows:
        print(*row.values())
    write_results(arguments.output, "pixel_formats", rows, machine(torch.device("cpu"), ["av"]), NOTES)


if __name__ == "__main__":
    run_command(main)
