"""What is said to people: names that others chose are shown with their control characters written out, never obeyed.

A file name may hold any byte but two: one with an escape sequence would otherwise colour, clear or retitle a terminal,
answer it with what looks like typing, or begin a line that looks like ours.
"""

import sys
from typing import TextIO

MOST_CHARACTERS = 300  # of one name: a line of a list may be as long as its writer likes


def shown(name: object) -> str:
    """The text with all that is no picture of itself as \\x1b, \\u202e or \\udcff; a name too long to read is cut."""
    text = str(name)
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}…{text[-half:]}"
    return written_out(text)


def written_out(text: str) -> str:
    """Like repr() without quotes: what is not printable, of Unicode's categories Other and Separator, as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(sentence: str, file: TextIO | None = None) -> None:
    """Print one line, on stdout unless `file` says otherwise: all that commands say to people goes through here."""
    print(written_out(sentence), file=file or sys.stdout)
