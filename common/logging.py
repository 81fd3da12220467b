"""Text for people, with untrusted strings escaped: control characters are shown, never obeyed.

A file name may hold any byte but two. Printed raw, an escape sequence could clear or retitle the
terminal, inject input, or start a line that looks like one of this program.
"""

import os
import sys
from typing import TextIO

MAX_NAME_LENGTH = 300


def printable(name: object) -> str:
    """Escape a name and shorten it to MAX_NAME_LENGTH characters."""
    text = str(name)
    if len(text) > MAX_NAME_LENGTH:
        # Both ends of a path are informative: the folder and the name of the file.
        half = MAX_NAME_LENGTH // 2
        text = f"{text[:half]}…{text[-half:]}"
    return escape(text)


def escape(text: str) -> str:
    """Replace unprintable characters by \\x1b, \\u202e or \\udcff.

    They are those of the Unicode categories Other and Separator, but for the space.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def log(line: str, file: TextIO | None = None) -> None:
    """Print an escaped line, to stdout by default. All output of commands goes through here."""
    print(escape(line), file=file or sys.stdout)


def log_note(sentence: str, once_per_node: bool = False) -> None:
    """Tell the user, on stderr, about something that costs speed but stops nothing."""
    if not once_per_node or os.environ.get("LOCAL_RANK", "0") == "0":
        log(f"note: {sentence}", sys.stderr)


def format_count(number: int, noun: str) -> str:
    """Format like 1 video, 1,024 videos or 0 classes."""
    if number != 1:
        noun += "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}"


def format_number(number: float) -> str:
    """Format with three significant digits and thousands separators."""
    value = float(f"{number:.3g}")
    # The format g would write 1,230,000 as 1.23e+06.
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:g}"


def format_duration(seconds: float) -> str:
    """Format like 45 s, 5.6 min, 3.2 h or 31 days, in the largest unit of which there are two."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        count = seconds / length
        if count >= 10:
            return f"{count:.0f} {unit}"
        if count >= 2:
            return f"{count:.1f} {unit}"
    return f"{seconds:.0f} s"


def format_bytes(number: float) -> str:
    """Format like 1.23 GB, in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        # From here on, three digits are rounded to 1000 of the unit.
        if number < 999.5:
            return f"{format_number(number)} {unit}"
        number /= 1000
    return f"{format_number(number)} TB"
