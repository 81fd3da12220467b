"""A part of a video, as a list asks for it and an encoder cuts it out."""

import math
import re
from typing import NamedTuple


class Segment(NamedTuple):
    """The frames of a video that are shown from `start` on and before `end`.

    Both count seconds since the first frame, or frames from 0. An `end` of infinity is the end of
    the video. `number` counts from 1 and tells equal segments of a video apart.
    """

    start: float
    end: float
    in_frames: bool = False
    number: int = 1

    def __str__(self) -> str:
        """Write it as a media fragment: t=1.5,4 (seconds) or frames=10,50.

        t=1.5,4;2 is the second such segment. Seconds are rounded to microseconds, since the text
        becomes a part of file names.
        """
        unit = "frames" if self.in_frames else "t"
        start = _format_number(self.start)
        end = _format_number(self.end)
        text = f"{unit}={start},{end}"
        if self.number > 1:
            text += f";{self.number}"
        return text

    @classmethod
    def parse(cls, text: str) -> "Segment":
        """Read what __str__ writes."""
        span, _, number = text.partition(";")
        unit, start, end = re.split("[=,]", span)
        return cls(float(start), float(end), unit == "frames", int(number or 1))

    @property
    def problem(self) -> str | None:
        """The reason why no video can have this segment; None if one can."""
        if not 0 <= self.start < math.inf:
            return f"its segment starts at {self.start:g}, which no video has"
        if not self.start < self.end:
            return f"its segment ends at {self.end:g}, not after its start at {self.start:g}"
        if self.in_frames and not (
            float(self.start).is_integer() and _is_whole_or_infinite(self.end)
        ):
            return f"its segment's frames {self.start:g} to {self.end:g} are not whole numbers"
        return None


def _format_number(value: float) -> str:
    """Write a number with at most six decimals, and without a fraction where there is none."""
    return repr(round(value, 6)).removesuffix(".0")


def _is_whole_or_infinite(value: float) -> bool:
    return value == math.inf or float(value).is_integer()
