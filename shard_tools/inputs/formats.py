"""The formats of lists: a new one is one entry here, and one row of HEADS in tests/shard_tools/test_lists.py.

Lists with names of columns (a header, keys of JSON) are the first of FORMATS whose columns they have, others BY_NAME,
with the vocabulary of all; lists without names are the first of LAYOUTS whose columns hold what it says.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

# Names are compared without case, and without all that is no letter or digit. Of paths, the most telling come first.
PATHS = """
    path videopath filepath clippath fullpath relativepath relpath filename videofile file videofilename moviefile
    video clip videos framedir framesdir framefolder framepath folder directory videoname clipname vidname videoid
    vidid clipid vid youtubeid ytid youtube uid id name key contenturl videourl url"""
LABELS = """
    label labels labelid labelids labelname labelidx labeltext class classes classname classid classidx classindex
    classlabel category categories categoryname categoryid action actions actionclass actionlabel actionname actionid
    actionclasses target targets targetid tag tags verb verbclass noun nounclass template gesture gestureid activity
    activityname event eventlabel emotion y gt positivelabels"""
MULTIPLE = set("labels labelids classes categories actions actionclasses tags targets positivelabels".split())
SUBSETS = "split subset set partition usage splits"
UNITS = "(time|timestamp|ts|t|sec|secs|second|seconds|s|ms|msec|frame|frames|idx|index)*"
STARTS = f"(t|time|clip|segment|seg|action|frame|video)?(start|begin|onset){UNITS}|from|fromtimestamp"
ENDS = f"(t|time|clip|segment|seg|action|frame|video)?(end|stop|finish){UNITS}|to|totimestamp"
NUMBERS = ("id", "idx", "index")  # at the end of names of columns that are the numbers of other labels
LENGTHS = set("length duration cliplength segmentlength numframes nframes durationseconds".split())
PAIRS = set("segment timestamp timestamps times interval clip".split())  # [start, end]
NO_LABEL = re.compile(  # what else tables say, and nobody means as a class
    "caption|text|desc|narrat|title|sentence|script|summary|prompt|duration|length|fps|width|height|frame|size|licen|url"
    "|link|author|date|time|source|sha|md5|hash|index|idx|participant|subject|person|user|iscc|dir|page|quality|format"
    "|codec|channel|lang|view|count|num|rate|answer|question|conversation|meta|bytes|unnamed|votes|resolution|aspect"
)


class Format(NamedTuple):
    """A list with names of columns: it has one of the names that are given for each role, separated by spaces."""

    name: str
    path: str = ""
    label: str = ""  # if it has several of these, --label-column must decide
    start: str = ""  # a regular expression, as is `end`; the unit follows from the name, see get_unit
    end: str = ""  # of lists whose start is a column of pairs: nothing
    subset: str = ""
    other: str = ""  # by what else it is recognized
    left_out: tuple[str, str, str] | None = None  # rows: column, value, and what they are
    removed: str = ""  # characters of labels that its label map lacks
    error: str = ""  # why it cannot be read

    def matches(self, keys: Sequence[str]) -> bool:
        fields = [self.path, self.label, self.subset, self.other]
        names = [field.replace(" ", "|") for field in fields] + [self.start, self.end]
        return all(any(re.fullmatch(name, key) for key in keys) for name in filter(None, names))


FORMATS = [
    Format("boxes", other="x1 xmin bbox box bboxes boxes", error="it has boxes"),
    Format("Kinetics", "youtubeid", "label", "timestart", "timeend", "split"),
    Format("HACS Clips", "youtubeid", "classname", "start", "end", "subset", "label",
           left_out=("label", "-1", "HACS' negatives")),
    Format("ActivityNet, Kinetics (JSON)", "id", "label", "segment", subset="subset"),
    Format("ActivityNet Captions", "id", start="segment", other="sentences"),
    Format("Something-Something V2", "id", "template", removed="[]"),
    Format("EPIC-KITCHENS-100", "videoid", "verb noun", "starttimestamp", "stoptimestamp", other="narrationid"),
    Format("Diving48", "vidname", "label", "startframe", "endframe"),
    Format("Charades", "id", "actions", other="script"),
    Format("AudioSet", "ytid", "positivelabels", "startseconds", "endseconds"),
    Format("WebVid", "videoid", other="contenturl"),
]  # fmt: skip
BY_NAME = Format("columns by their names", PATHS, LABELS, STARTS, ENDS, SUBSETS)


class Layout(NamedTuple):
    """A list without names of columns: what each holds, in order, see KINDS and ColumnDetector.matches_kind."""

    name: str
    columns: str
    seconds: float = math.inf  # length of the segments, if no column says it
    list_name: str = ".*"  # a regular expression; its group, if any, is the label of all rows
    subsets: tuple[tuple[str, str], ...] = ()  # what the values of a column `split_code` mean


LAYOUTS = [
    Layout("HMDB51", "path split_code", list_name=r"(?:.*/)?(.+)_test_split\d\.txt",
           subsets=(("1", "train"), ("2", "test"), ("0", "neither"))),
    Layout("VGGSound", "youtube_id second name", seconds=10),
    Layout("Moments in Time", "path name number number"),
    Layout("VideoMAEv2 or mmaction2: path, start, length, label", "path start length label"),
    Layout("VideoMAEv2 for pre-training", "path start all"),
    Layout("folders of frames: path, number, label", "path num_frames label"),
    Layout("folders of frames: path, start, number", "path start frames_from_start"),
]  # fmt: skip
KINDS = {  # of whole numbers
    "split_code": lambda numbers: {*numbers} <= {0, 1, 2},
    "length": lambda numbers: all(number == -1 or number > 0 for number in numbers),
    "all": lambda numbers: {*numbers} == {-1},
    "start": lambda numbers: min(numbers) >= 0,
}


def to_key(name: Any) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def is_known(name: str) -> bool:
    """Whether a cell can be the name of a column."""
    key = to_key(name)
    words = " ".join([PATHS, LABELS, SUBSETS]).split()
    return key in words or re.fullmatch(f"{STARTS}|{ENDS}", key) is not None


def get_unit(key: str) -> tuple[float, bool]:
    """Return (seconds or frames per unit, whether it is frames) of a column of times."""
    if "frame" in key or key.endswith(("idx", "index")):
        return 1, True
    return (0.001 if key.endswith(("ms", "msec")) else 1), False
