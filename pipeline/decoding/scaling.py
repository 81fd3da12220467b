"""The PyAV way from bytes to clips: decode the frames that are needed, crop, flip and scale each in one pass.

FFmpeg's scaler reads the crop straight from the decoded YUV planes and writes RGB at the clip's size: 16 frames of
384×256 take 1.7 ms on one core, where conversion to RGB and DALI's CPU resize take 10 ms. Both scale bilinearly with
antialiasing and read colours as BT.601 whatever the file says, as DALI does, so a clip looks the same either way.
(Shards made by re-encoding are BT.601, properly converted; colours of copied HD videos are a little off.)
"""

from collections.abc import Callable

import av
import av.error
import numpy as np
import torch
from av.filter import Graph
from av.video.format import VideoFormat
from av.video.frame import VideoFrame
from einops import rearrange
from jaxtyping import UInt8
from torch.nn import functional

from pipeline.decoding.video import EIGHT_BIT_420, Video, VideoError, turns
from pipeline.planning.crops import Crop, FrameSize
from pipeline.planning.plan import PlanRow
from pipeline.shards import arrays
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice

BT601 = ("setparams", "colorspace=smpte170m:color_primaries=smpte170m:color_trc=smpte170m")
FATAL = ("yaf32be", "yaf32le")  # pixel formats at which FFmpeg's scaler ends the process, by an assertion (8.1)
CHROMA_CENTRE = 128  # of 8-bit 4:2:0, as FFmpeg's scaler takes it; 1/256 of a pixel from the first pixel's centre
TOGETHER = (3, 4)  # channels that torch scales at once, as bytes and on this thread alone
Store = Callable[[int, int, UInt8[np.ndarray, "H W C"]], None]


def cut_views(cut: VideoSlice, sample: Sample, views: list[PlanRow], size: int | FrameSize, store: Store) -> int:
    """Call store(view, time, image uint8 [height, width, channels]) for every frame of `views`, which share the frames
    of `cut`.

    Returns how many frames were decoded; raises VideoError if one cannot be.
    """
    times: dict[int, list[int]] = {}
    for time, number in enumerate(cut.numbers):
        times.setdefault(number, []).append(time)
    if arrays.is_array(cut.data):
        return _cut_array(cut, sample, views, times, FrameSize.of(size), store)
    if (channels := arrays.count_channels([sample.codec])) != 3:
        raise VideoError(f"it is no array, and the table of samples says that it has {channels} channels")
    scalers = [Scaler(view.crop, view.flip, size, (sample.width, sample.height)) for view in views]
    with Video(cut.data, cut.num_frames) as video:
        for number, frame in video.frames(cut.numbers):
            for index, scaler in enumerate(scalers):
                image = scaler(frame)
                for time in times[number]:
                    store(index, time, image)
        return video.frames_decoded


def _cut_array(
    cut: VideoSlice, sample: Sample, views: list[PlanRow], times: dict[int, list[int]], size: FrameSize, store: Store
) -> int:
    """The same of an array: its own pixels, scaled as a video's are, within a grey level of what FFmpeg makes."""
    frames = arrays.read_array(cut.data, list(times), cut.num_frames)
    said = (sample.height, sample.width, arrays.count_channels([sample.codec]))
    if frames.shape[1:] != said:
        found, told = ("x".join(map(str, shape)) for shape in (frames.shape[1:], said))
        raise VideoError(f"it is of {found} (height, width, channels), and the table of samples says {told}")
    for index, view in enumerate(views):
        box = frames[:, view.crop.y :, view.crop.x :][:, : view.crop.height, : view.crop.width]
        for image, places in zip(_scaled(box[:, :, ::-1] if view.flip else box, size), times.values(), strict=True):
            for time in places:
                store(index, time, image)
    return len(frames)


def _scaled(frames: UInt8[np.ndarray, "T H W C"], size: FrameSize) -> UInt8[np.ndarray, "T height width C"]:
    """Bilinear with antialiasing. All frames at once: to bring them to FFmpeg one by one, and each channel by itself,
    took 1.7 ms for 8 frames of 32x32, this takes .07."""
    channels = frames.shape[-1]
    if channels in TOGETHER:
        clip = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
        return functional.interpolate(clip, size, mode="bilinear", antialias=True).permute(0, 2, 3, 1).numpy()
    planes = rearrange(frames, "t h w c -> (t c) h w")
    filled = np.resize(planes, (len(planes) + -len(planes) % 4, *planes.shape[1:]))  # up with the first ones again
    fours = _scaled(rearrange(filled, "(t c) h w -> t h w c", c=4), size)
    scaled = rearrange(fours, "t h w c -> (t c) h w")[: len(planes)]
    return rearrange(scaled, "(t c) h w -> t h w c", c=channels)


class Scaler:
    """Crops, flips and scales frames to `size`, a square's side or height and width in pixels."""

    def __init__(self, crop: Crop, flip: bool, size: int | FrameSize, stored: tuple[int, int]) -> None:
        """`crop` is a box in upright frames of `stored` = (width, height) pixels."""
        self._crop, self._flip, self._size, self._stored = crop, flip, FrameSize.of(size), stored
        self._layout: tuple[object, ...] | None = None

    def __call__(self, frame: VideoFrame) -> UInt8[np.ndarray, "H W 3"]:
        layout = (frame.width, frame.height, frame.format.name, frame.rotation)
        try:
            if layout != self._layout:  # also when a stream changes its size on the way
                self._graph, self._layout = self._build(frame), layout
            self._graph.vpush(frame)
            return self._graph.vpull().to_ndarray()
        except av.error.FFmpegError as error:
            raise VideoError(f"a frame of {layout} cannot be scaled: {error.strerror}") from error

    def _build(self, frame: VideoFrame) -> Graph:
        if frame.format.name in FATAL:
            raise VideoError(f"pictures of format {frame.format.name} cannot be scaled")
        graph = Graph()
        graph.threads = 1  # clips are cut side by side, one a thread
        turned = turns(frame) % 2 == 1
        width, height = (frame.height, frame.width) if turned else (frame.width, frame.height)
        across, down = width / self._stored[0], height / self._stored[1]
        crop = self._crop
        box = Crop(round(crop.x * across), round(crop.y * down), round(crop.width * across), round(crop.height * down))
        steps = [
            BT601,
            *UPRIGHT[turns(frame)],
            *_cut(frame.format, box, (width, height)),
            *([("hflip", "")] if self._flip else []),
            self._scaling(frame.format, box),
            ("format", "rgb24"),
            ("buffersink", ""),
        ]
        # The graph passes frames through one by one: it never looks at their time.
        source = f"{frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1"
        last = graph.add("buffer", f"video_size={source}")
        for name, options in steps:
            step = graph.add(name, options or None)
            last.link_to(step)
            last = step
        graph.configure()
        return graph

    def _scaling(self, form: VideoFormat, box: Crop) -> tuple[str, str]:
        flags = "bilinear+full_chroma_int"
        if (box.height, box.width) == self._size:
            flags += "+accurate_rnd"  # where the size stays, FFmpeg's short cut gives pixels a neighbour's colour
        options = f"{self._size.width}:{self._size.height}:flags={flags}"
        if form.name in EIGHT_BIT_420:
            across = _chroma_shift(box.x, box.width, self._flip)
            down = _chroma_shift(box.y, box.height, flip=False)
            for axis, shift in (("h", across), ("v", down)):
                options += f":in_{axis}_chr_pos={CHROMA_CENTRE + round(256 * shift)}"
        return "scale", options


def _cut(form: VideoFormat, box: Crop, size: tuple[int, int]) -> list[tuple[str, str]]:
    """Filters that cut `box` out of upright frames of `size`.

    FFmpeg's crop counts on boxes of whole chroma samples: where one begins or ends inside, planes of more than a byte a
    sample are read from the middle of one on, which is another colour altogether. There, whole samples are cut out
    first, and each pixel gets its own colour before the rest goes. 8-bit 4:2:0, which nearly all videos have, is spared
    that: it is enough to tell the scaler where its chroma lies. Patterns of one colour a pixel, and colours of less
    than a byte, which FFmpeg fills up in several ways, are made RGB before anything else.
    """
    if form.is_bayer or any(component.bits < 8 for component in form.components):
        return [("format", "rgb24|rgb48le" if form.is_bayer else "gbrp"), ("format", "gbrp|gbrp16le"), _crop(box)]
    step = max(64 // form.chroma_width(64), 64 // form.chroma_height(64))
    (left, right), (top, bottom) = (
        (start // step * step, min(-(-(start + length) // step) * step, end))
        for start, length, end in zip(box[:2], box[2:], size, strict=True)
    )
    whole = Crop(left, top, right - left, bottom - top)
    if form.name in EIGHT_BIT_420 or whole == box:
        return [_crop(box)]
    return [_crop(whole), ("format", "yuv444p|yuv444p16le"), _crop(box._replace(x=box.x - left, y=box.y - top))]


def _chroma_shift(start: int, length: int, flip: bool) -> float:
    """Pixels by which 8-bit 4:2:0's chroma lies after its usual place in a piece of a line that was cut and flipped."""
    shift = -(start % 2)  # crop takes the sample that the first pixel has a part in
    if flip:
        shift = -shift - length % 2
    return shift + length % 2 / 2  # the scaler draws half a sample more over an odd length: here, half of that a side


def _crop(box: Crop) -> tuple[str, str]:
    return "crop", f"{box.width}:{box.height}:{box.x}:{box.y}:exact=1"


# What turns a frame upright, by the number of quarter turns counter-clockwise.
UPRIGHT: tuple[list[tuple[str, str]], ...] = (
    [],
    [("transpose", "cclock")],
    [("hflip", ""), ("vflip", "")],
    [("transpose", "clock")],
)
