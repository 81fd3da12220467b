"""Files of other programs that name no video in each row: what they are, and what to do instead."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from adamae.common.errors import InputError

# The beginning of a file by which it is recognized.
NUM_BYTES = 2**16
BY_HAND = "write a list with a row for each segment, path,start,end,label"
BORIS = "export aggregated events as TSV (Observations > Export events)"


class Foreign(NamedTuple):
    """A kind of file that is no list."""

    what: str
    fix: str
    # Extensions, and what is in the text: regular expressions.
    extension: str = "(?!)"
    content: str = "(?!)"


# The first that matches decides.
FOREIGN = [
    Foreign(
        "a Git LFS pointer, not the list itself",
        "run `git lfs pull`",
        content=r"^version https://git-lfs",
    ),
    Foreign(
        "subtitles of one video",
        "write a list with a row for each subtitle, path,start,end,caption",
        "srt|vtt|ass|ssa|sbv|lrc",
        r"^WEBVTT|^\s*\d+\s*\n[\d:]+[,.]\d+ --> ",
    ),
    Foreign(
        "a document of ELAN",
        "export tab-delimited text with the file path and times in ss.msec (File > Export As)",
        "eaf|pfsx",
        "<ANNOTATION_DOCUMENT",
    ),
    Foreign("a TextGrid of Praat", BY_HAND, "textgrid", r'^File type = "ooTextFile'),
    Foreign("a project of BORIS", BORIS, "boris|boris.gz", r'^\s*{[\s\S]*"behaviors_conf"'),
    Foreign(
        "a table of BORIS with a row for each start and stop",
        BORIS,
        content=r"^Observation id\b.*\s*\nMedia file|^Time\b.*\bMedia file path\b.*\bStatus\b",
    ),
    Foreign(
        "raw data of EthoVision with a row for each sample of time",
        BY_HAND,
        content=r'^"?Number of header lines',
    ),
    Foreign(
        "a project or markers of Premiere, which name no video",
        BY_HAND,
        "prproj",
        r"^Marker Name\tDescription\tIn\tOut",
    ),
    Foreign(
        "a timeline of an editor", BY_HAND, "edl|aaf|otio|fcpxml", r"^TITLE:.*\s+(FCM:|\d{3}\s)"
    ),
    Foreign("a document of Datavyu, ANVIL or CHAT", BY_HAND, "opf|anvil|cha"),
    Foreign(
        "a project of VIA (VGG)",
        BY_HAND,
        content=r'^\s*{[\s\S]*("vid_list"|"_via_|software/via)|^# Exported using VGG',
    ),
    Foreign("a playlist", "write a list with one path a line", "m3u8?|pls|xspf|mpd", r"^#EXTM3U"),
    Foreign(
        "a web page, often a login or an error",
        "download the list again",
        content=r"(?i)^\s*<(!doctype )?html",
    ),
    Foreign("XML", BY_HAND, content=r"^\s*<[?!a-zA-Z]"),
]


def refuse_foreign(path: Path, where: str) -> None:
    """Raise InputError, which names what to export, if a file is another program's and no list."""
    with path.open("rb") as file:
        head = file.read(NUM_BYTES)
    text = head.decode(json.detect_encoding(head), "replace")
    for kind in FOREIGN:
        is_called_so = re.search(rf"\.({kind.extension})$", path.name, re.IGNORECASE)
        if is_called_so or re.search(kind.content, text):
            raise InputError(f"{where} is {kind.what}: {kind.fix}")
