"""Read off a video's packets, without decoding them, when its frames are shown."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream

from adamae.pipeline.decoding.video import times_tell_frames

# A recorded screen may stand still for this long. A gap that is longer, and longer than MAX_JUMP
# usual ones, is a jump of the clock.
MAX_GAP_S = 600.0
MAX_JUMP = 100
# The highest rate to be believed if only a header declares it.
MAX_DECLARED_FPS = 1000
# The highest rate to be believed by the frames' times; broken ones count units of 1/90,000 s.
MAX_FPS = 60_000
# FFmpeg's AVFMT_NOTIMESTAMPS (libavformat/avformat.h).
NO_TIMESTAMPS = 0x80


class SeekPoint(NamedTuple):
    """A key frame from which a video can be decoded, with its number and tick."""

    number: int
    tick: int
    pts: int
    dts: int


START = SeekPoint(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Timing:
    """When frames are shown, in ticks: units of 1 / `rate` seconds, from 0 at the first frame.

    At a constant rate, frame k is shown at tick k. Where a recorder at 30 frames a second has lost
    the third frame, `ticks` is [0, 1, 3, 4, …], and the second frame is shown at tick 2 too.
    """

    # In frames a second.
    rate: Fraction
    num_packets: int
    # The frames' times in the stream's units, ascending; None if a frame's time does not tell which
    # one it is.
    times: Sequence[int] | None
    # The frames' ticks, ascending; None if frames are evenly spaced, so that counting them will do.
    ticks: Sequence[int] | None = None
    # Ascending.
    seek_points: list[SeekPoint] = field(default_factory=lambda: [START])

    def find_seek_point(self, tick: int) -> SeekPoint:
        """Return the last seek point that is shown at `tick` or before."""
        index = bisect_right(self.seek_points, tick, key=lambda point: point.tick) - 1
        return self.seek_points[max(0, index)]

    def tick(self, time: int | None, count: int) -> int:
        """Return the tick of frame number `count`, shown at `time`."""
        if self.ticks is None:
            return count
        index = count
        if self.times is not None and time is not None:
            index = bisect_left(self.times, time)
        return self.ticks[min(index, len(self.ticks) - 1)]


class _Packet(NamedTuple):
    """What a packet says of the frame that it holds."""

    pts: int | None
    dts: int | None
    is_key: bool
    is_discard: bool

    @property
    def time(self) -> int | None:
        """Return when it is shown or, where that is not known, decoded."""
        return self.dts if self.pts is None else self.pts


def read_timing(container: InputContainer, stream: VideoStream) -> Timing:
    """Read all packets of `stream` without decoding them; leave `container` at its end.

    A video whose frames all fall on their own tick of a constant rate has a constant frame rate,
    however its container rounds. The others keep their clock: a tick without a frame repeats the
    last one. A clock that runs backwards is ignored; where it jumps, it is taken to continue.
    """
    packets = [
        _Packet(packet.pts, packet.dts, packet.is_keyframe, packet.is_discard)
        for packet in container.demux(stream)
        if packet.size
    ]
    shown = [packet for packet in packets if not packet.is_discard]
    times = sorted(packet.time or 0 for packet in shown)
    tells_frames = times_tell_frames(stream, [packet.pts for packet in shown])
    frame_times = times if tells_frames else None
    # Times that FFmpeg makes up for a bare stream mean nothing.
    if container.format.flags & NO_TIMESTAMPS:
        return Timing(_first_plausible(stream.guessed_rate), len(packets), frame_times)
    decoding_times = [packet.dts for packet in packets if packet.dts is not None]
    is_ordered = decoding_times == sorted(decoding_times)
    is_usable = is_ordered and all(packet.time is not None for packet in packets)
    rate = _first_plausible(stream.average_rate, stream.guessed_rate)
    ticks = None
    if is_usable and len(times) > 1 and stream.time_base is not None:
        rate, ticks = _fit_clock(times, stream.time_base, rate)
    timing = Timing(rate, len(packets), frame_times, ticks)
    if is_usable and frame_times:
        timing.seek_points.extend(_find_seek_points(shown, timing, frame_times))
    return timing


def _find_seek_points(
    shown: list[_Packet], timing: Timing, frame_times: list[int]
) -> list[SeekPoint]:
    """Return the key frames behind the first frame; none if that is not one."""
    keys: list[tuple[int, int]] = []
    for packet in shown:
        if packet.is_key and packet.pts is not None:
            dts = packet.pts if packet.dts is None else packet.dts
            keys.append((packet.pts, dts))
    keys.sort()
    if not keys or keys[0][0] != frame_times[0]:
        return []
    points = []
    for pts, dts in keys[1:]:
        number = bisect_left(frame_times, pts)
        points.append(SeekPoint(number, timing.tick(None, number), pts, dts))
    return points


def _fit_clock(
    times: list[int], unit: Fraction, declared: Fraction
) -> tuple[Fraction, list[int] | None]:
    """Return the rate of frames shown at `times`, ascending, and their ticks.

    The ticks are None if every frame has its own. `unit` is what `times` count in, in seconds;
    `declared` is the rate that the file names. Frames at 0, 33, 67, 133 and 167 ms have 30 a
    second, and the ticks 0, 1, 2, 4 and 5: one is missing.
    """
    gaps = np.diff(times) * float(unit)
    if gaps.mean() <= 1 / MAX_FPS:
        return declared, None
    # With frames missing, or a still picture, the usual gap is the true one; rounding to
    # milliseconds evens out.
    median = np.median(gaps)
    typical = gaps[abs(gaps - median) <= median / 2]
    usual = typical.mean() if typical.sum() > 0 else gaps.mean()
    is_jump = gaps > max(MAX_GAP_S, MAX_JUMP * usual)
    gaps[is_jump] = usual
    clock = np.append(0, np.cumsum(gaps))
    # If no frame is missing, the mean of all gaps is the most exact rate.
    for rate in (declared, _round_rate(1 / gaps.mean(), declared)):
        ticks = np.rint(clock * float(rate))
        if (ticks == np.arange(len(times))).all():
            return rate, None
    # Times are whole numbers of units, so the rate is as exact as one unit in the time that it was
    # measured over.
    error = float(unit) / max(typical.sum(), usual)
    rate = _round_rate(1 / usual, declared, error)
    ticks = np.rint(clock * float(rate))
    return rate, ticks.astype(int).tolist()


def _first_plausible(*rates: Fraction | None) -> Fraction:
    """Return the first rate that a video may have, 25 frames a second if none is."""
    for rate in rates:
        if rate and 0 < rate <= MAX_DECLARED_FPS:
            return rate
    return Fraction(25)


def _round_rate(rate: float, declared: Fraction, error: float = 0) -> Fraction:
    """Return the declared rate or a usual one, if `rate` is near it; else `rate` itself.

    Near means within 0.1 % or the relative `error`. If nothing near is declared, 29.96 frames a
    second are taken for 30000/1001, and 29.98 for 30.
    """
    whole = Fraction(round(rate))
    # NTSC's: 24000/1001, 30000/1001, 60000/1001.
    ntsc = Fraction(round(rate * 1.001) * 1000, 1001)
    for candidate in (declared, whole, ntsc):
        deviation = abs(rate / float(candidate or 1) - 1)
        if deviation < max(1e-3, error):
            return candidate
    return Fraction(rate).limit_denominator(1000)
