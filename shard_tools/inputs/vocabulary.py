"""What the columns of lists are called, and the keys of JSON.

Names are compared without case, and without all that is no letter or digit: `to_key` makes
videofilename of "Video_File Name".
"""

import re
from typing import Any

# Columns of paths, the most telling first.
PATHS = """
    path videopath filepath clippath fullpath relativepath relpath filename videofile file
    videofilename moviefile video clip videos framedir framesdir framefolder framepath folder
    directory videoname clipname vidname videoid videouid vidid clipid clipuid vid youtubeid ytid
    youtube uid id name key contenturl videourl url""".split()
LABELS = """
    label labels labelid labelids labelname labelidx labeltext class classes classname classid
    classidx classindex classlabel category categories categoryname categoryid action actions
    actionclass actionlabel actionname actionid actionclasses target targets targetid tag tags verb
    verbclass noun nounclass template gesture gestureid activity activityname event eventlabel
    emotion y gt positivelabels""".split()
# Columns with several labels a cell.
MULTIPLE = set(
    "labels labelids classes categories actions actionclasses tags targets positivelabels".split()
)
SUBSETS = "split subset set partition usage splits".split()
# Words for units and numbers, in any order, at the end of the name of a start or an end.
UNITS = "(time|timestamp|ts|t|sec|secs|second|seconds|s|ms|msec|frame|frames|fid|idx|index)*"
PARTS_OF_VIDEO = "(t|time|clip|segment|seg|action|frame|video)?"
STARTS = f"{PARTS_OF_VIDEO}(start|begin|onset){UNITS}|from|fromtimestamp"
ENDS = f"{PARTS_OF_VIDEO}(end|stop|finish){UNITS}|to|totimestamp"
# Ends of the names of columns that number the labels of another column.
NUMBERS = ("id", "idx", "index")
LENGTHS = set("length duration cliplength segmentlength numframes nframes durationseconds".split())
# Columns of [start, end].
PAIRS = set(
    """
    segment segments timestamp timestamps times ts interval intervals clip clips span spans window
    windows moment""".split()
)
# What else tables say of a video, and nobody means as its class.
NO_LABEL = re.compile(
    "caption|text|desc|narrat|title|sentence|script|summary|prompt|duration|length|fps|width|height"
    "|frame|size|licen|url|link|author|date|time|source|sha|md5|hash|index|idx|participant|subject"
    "|person|user|iscc|dir|page|quality|format|codec|channel|lang|view|count|num|rate|answer"
    "|question|conversation|meta|bytes|unnamed|votes|resolution|aspect"
)


def to_key(name: Any) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def is_known(name: str) -> bool:
    """Return whether a cell can be the name of a column."""
    key = to_key(name)
    return key in PATHS or key in LABELS or key in SUBSETS or is_time(key)


def is_time(key: str) -> bool:
    """Return whether a key names a start or an end."""
    return re.fullmatch(f"{STARTS}|{ENDS}", key) is not None


def get_unit(key: str) -> tuple[float, bool]:
    """Return (seconds or frames per unit, whether it is frames) of a column of times.

    It is (1, True) of startframe, (0.001, False) of startms and (1, False) of start.
    """
    if "frame" in key or key.endswith(("fid", "idx", "index")):
        return 1, True
    if key.endswith(("ms", "msec")):
        return 0.001, False
    return 1, False
