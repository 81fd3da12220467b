"""A user's video, frame by frame and on time, or the reason why it cannot be used.

Anything that does not decode cleanly makes the whole video unusable: training must never meet a
picture that a decoder had to guess.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from fractions import Fraction
from itertools import dropwhile
from pathlib import Path

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos.opening import list_frames, open_source, require_complete
from adamae.pipeline.videos.segment import Segment
from adamae.pipeline.videos.timing import START, SeekPoint, read_timing

# Each with the tick at which it is shown.
Frames = Iterator[tuple[int, VideoFrame]]
# A frame still belongs to a segment if it is shown by this fraction of a frame before the start:
# times are rounded to milliseconds.
EARLY_FRAMES = 0.05
# By which a segment may end after its video: annotations are rounded.
MAX_EXCESS_S = 0.5


class SourceVideo:
    """A video file of any origin, or a folder of numbered pictures.

    Times are ticks of its frame rate, from 0 at its first frame; see Timing.
    """

    def __init__(self, path: Path, fps: float | None = None) -> None:
        """Read what its packets say, without decoding; `fps` is the rate of a folder of pictures.

        Raise VideoError if it is no video, or not all of it is there.
        """
        self.path = path
        self._fps = fps
        with self.open() as (container, stream):
            self.timing = read_timing(container, stream)
            self.pixel_aspect = stream.sample_aspect_ratio
            self.is_reordered = bool(stream.codec_context.has_b_frames)
            num_packets = self.timing.num_packets
            if path.is_dir():
                self._require_frames(num_packets)
            if num_packets == 0:
                raise VideoError("it holds no frame")
            if container.format.name == "mjpeg" and num_packets == 1:
                raise VideoError("it is a still image")
            if not path.is_dir():
                require_complete(path, container, stream, num_packets)

    def _require_frames(self, num_read: int) -> None:
        """Raise VideoError if not all pictures of the folder were read.

        FFmpeg takes the first one without bytes for the end.
        """
        frames = list_frames(self.path)
        if num_read < len(frames):
            raise VideoError(f"its frame {frames[num_read].name} is empty or cannot be read")

    @property
    def rate(self) -> Fraction:
        """Return how many ticks a second has."""
        return self.timing.rate

    def open(self) -> AbstractContextManager[tuple[InputContainer, VideoStream]]:
        """Open the video at its beginning; see open_source."""
        return open_source(self.path, self._fps)

    def find_ticks(self, segment: Segment | None) -> tuple[int, float]:
        """Return the first tick of a segment and the one after its last.

        None is the whole video, which ends at inf. Raise VideoError if the segment is not in the
        video.
        """
        if segment is None:
            return 0, math.inf
        num_frames = self.timing.num_packets
        num_ticks = self.timing.tick(None, num_frames - 1) + 1
        if segment.in_frames:
            unit = Fraction(1)
            length = num_frames
            length_in_words = f"{num_frames} frames"
        else:
            unit = self.rate
            length = num_ticks
            length_in_words = f"{float(num_ticks / self.rate):.6g} seconds"
        first = _round_up(segment.start, unit)
        end = _round_up(segment.end, unit)
        if first >= length:
            raise VideoError(
                f"its segment starts at {segment.start:g}, and the video has {length_in_words}"
            )
        if end != math.inf and end > length + MAX_EXCESS_S * self.rate:
            raise VideoError(
                f"its segment ends at {segment.end:g}, and the video has {length_in_words}"
            )
        if segment.in_frames:
            first = self.timing.tick(None, int(first))
            end = self.timing.tick(None, int(end)) if end < num_frames else math.inf
        if first >= end:
            raise VideoError(
                f"its segment from {segment.start:g} to {segment.end:g} is shorter than a frame"
            )
        return int(first), end

    def frames(
        self, segment: Segment | None, step: int | Fraction
    ) -> Iterator[tuple[int | Fraction, VideoFrame]]:
        """Yield the frames of a segment that are shown every `step` ticks, each with its tick.

        A tick without a frame of its own repeats the last one. Raise VideoError if the segment is
        not in the video, or at the first frame that is not intact.
        """
        first, end = self.find_ticks(segment)
        for tick, frame in subsample(self.decode(first), step, first):
            if tick >= end:
                return
            yield tick, frame

    def decode(self, first: int) -> Frames:
        """Yield (tick, frame) from a key frame at or before tick `first` on.

        If none can be decoded, start at the beginning. Ticks count from 0, also where a decoder had
        to wait for a key frame, and never decrease. Raise VideoError at the first frame that is not
        intact.
        """
        start = self.timing.find_seek_point(first)
        offset = 0
        last_tick = 0
        number: int | None = None
        try:
            with self.open() as (container, stream):
                for number, frame in enumerate(read_frames(container, stream, start), start.number):
                    tick = self.timing.tick(frame.pts, number)
                    if number == 0:
                        offset = tick
                    last_tick = max(last_tick, tick - offset)
                    yield last_tick, frame
                return
        except VideoError as error:
            if self.path.is_dir():
                picture = list_frames(self.path)[0 if number is None else number + 1]
                raise VideoError(f"its frame {picture.name} cannot be decoded") from error
            if start == START or number is not None:
                raise
        # No seek point is tried again.
        del self.timing.seek_points[1:]
        yield from self.decode(0)


def _round_up(value: float, unit: Fraction) -> float:
    """Return a segment's start or end as a whole number of frames or ticks; inf stays."""
    if value == math.inf:
        return value
    # The digits that were written, not the binary number next to them: 0.1 is a tenth.
    return math.ceil(Fraction(repr(float(value))) * unit - Fraction(EARLY_FRAMES))


def read_frames(
    container: InputContainer, stream: VideoStream, start: SeekPoint = START
) -> Iterator[VideoFrame]:
    """Yield the frames in display order, from `start` on.

    Raise VideoError at the first one that is not intact.
    """
    count = start.number
    try:
        packets = container.demux(stream)
        if start != START:
            container.seek(start.dts, stream=stream)
            # Seeking may lead to an earlier packet.
            packets = dropwhile(lambda packet: packet.pts != start.pts, packets)
        for packet in packets:
            if packet.is_corrupt:
                raise VideoError(f"the file is cut off or damaged after frame {count}")
            for frame in packet.decode():
                if start != START and count == start.number and frame.pts != start.pts:
                    # It is shown before the key frame, and needs frames that are not decoded.
                    if frame.pts is not None and frame.pts < start.pts:
                        continue
                    raise VideoError(f"it cannot be decoded from frame {count} on")
                if frame.is_corrupt:
                    raise VideoError(f"frame {count} is damaged")
                yield frame
                count += 1
    except av.error.FFmpegError as error:
        raise VideoError(f"frame {count} cannot be decoded ({error.strerror})") from error
    if count == start.number:
        raise VideoError("it holds no frame that can be decoded")


def with_end_ticks(frames: Frames) -> Frames:
    """Turn (tick, frame) into (end, frame): the frame is shown until tick `end`.

    That tick has a frame of its own. Frames at ticks 0, 1 and 3 end at 1, 3 and 4: the second one
    is shown at tick 2, too.
    """
    tick = 0
    shown = None
    for tick, frame in frames:
        if shown is not None:
            yield tick, shown
        shown = frame
    if shown is not None:
        yield tick + 1, shown


def subsample(
    frames: Frames, step: int | Fraction, first: int = 0
) -> Iterator[tuple[int | Fraction, VideoFrame]]:
    """Yield (tick, frame) at ticks first, first + step, …

    A tick without a frame of its own repeats the last one.
    """
    tick: int | Fraction = first
    for end, frame in with_end_ticks(frames):
        while tick < end:
            yield tick, frame
            tick += step
