"""What is said to people: names that others chose are shown with their control characters written out, never obeyed.

A file name may hold any byte but two: one with an escape sequence would otherwise colour, clear or retitle a terminal,
answer it with what looks like typing, or begin a line that looks like ours.
"""

import sys
from typing import TextIO

MOST_CHARACTERS = 300  # of one name: a line of a list may be as long as its writer likes


def printable(name: object) -> str:
    """The text with all that is no picture of itself as \\x1b, \\u202e or \\udcff; a name too long to read is cut."""
    text = str(name)
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}…{text[-half:]}"
    return escape(text)


def escape(text: str) -> str:
    """Like repr() without quotes: what is not printable, of Unicode's categories Other and Separator, as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def log(sentence: str, file: TextIO | None = None) -> None:
    """Print one line, on stdout unless `file` says otherwise: all that commands say to people goes through here."""
    print(escape(sentence), file=file or sys.stdout)


def format_number(number: float) -> str:
    """Three digits, with commas between thousands."""
    value = float(f"{number:.3g}")
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def format_bytes(number: float) -> str:
    """Like 1.23 GB: units of 1,000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{format_number(number)} {unit}"
        number /= 1000
    return f"{format_number(number)} TB"


def format_duration(seconds: float) -> str:
    """Like 45 s, 3 min 20 s, 2 h 5 min or 3 days 4 h: the two largest units, and no fractions above 10 s."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    units = (("days", 86400), ("h", 3600), ("min", 60), ("s", 1))
    first = next(i for i, (_, length) in enumerate(units) if whole >= length)
    parts = [(whole // units[first][1], units[first][0])]
    if first + 1 < len(units):
        parts.append((whole % units[first][1] // units[first + 1][1], units[first + 1][0]))
    return " ".join(f"{count} {unit if count != 1 or unit != 'days' else 'day'}" for count, unit in parts if count)
