"""When the frames of a video are shown: the constant rate it is brought to, and which frame stands at which tick."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from statistics import median

from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

MAX_GAP_S = 10.0  # a longer gap between two frames is a broken clock, not a still picture
MAX_FPS = 1000
NO_TIMESTAMPS = 0x80  # AVFMT_NOTIMESTAMPS


@dataclass(frozen=True, slots=True)
class Timing:
    """`rate` in frames per second. Without `origin` frames are evenly spaced and are simply counted."""

    rate: Fraction
    gops: list[int]  # packets from each key frame to the next
    origin: Fraction | None = None  # time of the first frame, in seconds

    @property
    def num_packets(self) -> int:
        return sum(self.gops)

    def tick(self, time: Fraction | None, count: int) -> int:
        """Return the tick, counted from 0 at `rate`, of frame number `count`, shown at `time`."""
        if self.origin is None or time is None:
            return count
        return round((time - self.origin) * self.rate)


def read_timing(container: InputContainer, stream: VideoStream) -> Timing:
    """Read all packets of `stream` without decoding them; leave `container` at its end.

    A video whose frames all fall on their own tick of a constant rate has a constant frame rate, however its container
    rounds. The others keep their clock: a tick without a frame repeats the last one. A clock that runs backwards or
    jumps is ignored.
    """
    times: list[int] = []
    gops: list[int] = []
    is_usable = True
    last_decode_time = None
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if packet.is_keyframe or not gops:
            gops.append(0)
        gops[-1] += 1
        is_usable = is_usable and _is_in_order(packet, last_decode_time)
        last_decode_time = packet.dts
        if not packet.is_discard:
            times.append((packet.dts if packet.pts is None else packet.pts) or 0)
    if container.format.flags & NO_TIMESTAMPS:  # those that FFmpeg makes up for a bare stream mean nothing
        return Timing(_first_plausible(stream.guessed_rate), gops)
    declared = _first_plausible(stream.average_rate, stream.guessed_rate)
    if not is_usable or len(times) < 2 or stream.time_base is None:
        return Timing(declared, gops)
    times.sort()
    unit = float(stream.time_base)
    gaps = [(later - earlier) * unit for earlier, later in pairwise(times)]
    mean, middle = sum(gaps) / len(gaps), median(gaps)
    if mean <= 1 / MAX_FPS or max(gaps) > MAX_GAP_S:
        return Timing(declared, gops)
    origin = times[0] * stream.time_base
    for rate in (declared, _round_rate(1 / mean, declared)):
        clock = Timing(rate, gops, origin)
        if all(clock.tick(time * stream.time_base, 0) == count for count, time in enumerate(times)):
            return Timing(rate, gops)
    # With a few frames missing, the usual gap is the true one; with gaps of all sizes, only their mean makes sense.
    usual = middle if mean / 1.5 < middle else mean
    return Timing(_round_rate(1 / usual, declared), gops, origin)


def _is_in_order(packet: Packet, last_decode_time: int | None) -> bool:
    """Whether the packet has a time, and its decoding time is not before the last one's."""
    if packet.dts is None:
        return packet.pts is not None and last_decode_time is None
    return last_decode_time is None or packet.dts >= last_decode_time


def _first_plausible(*rates: Fraction | None) -> Fraction:
    return next((rate for rate in rates if rate and 0 < rate <= MAX_FPS), Fraction(25))


def _round_rate(rate: float, declared: Fraction) -> Fraction:
    """Return the declared rate or a usual one if it is within 0.1 %; else `rate` as a fraction."""
    for candidate in (declared, Fraction(round(rate)), Fraction(round(rate * 1.001) * 1000, 1001)):
        if abs(rate / float(candidate or 1) - 1) < 1e-3:
            return candidate
    return Fraction(rate).limit_denominator(1000)
