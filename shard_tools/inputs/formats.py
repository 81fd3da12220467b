"""The formats of lists: a new one is one entry here, and one row of HEADS in tests/shard_tools/test_lists.py.

A list is of the first format whose columns it has: of FORMATS, if it has a header (or keys of JSON), else of
WITHOUT_HEADER. The format says which columns are not called as in the vocabulary; that then says which is what.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Names are compared without case, and without all that is no letter or digit. Of paths, the most telling come first.
PATHS = """
    path videopath filepath clippath fullpath relativepath relpath filename videofile file videofilename moviefile
    video clip videos framedir framesdir framefolder framepath folder directory videoname clipname vidname videoid
    videouid vidid clipid clipuid vid youtubeid ytid youtube uid id name key contenturl videourl url""".split()
LABELS = """
    label labels labelid labelids labelname labelidx labeltext class classes classname classid classidx classindex
    classlabel category categories categoryname categoryid action actions actionclass actionlabel actionname actionid
    actionclasses target targets targetid tag tags verb verbclass noun nounclass template gesture gestureid activity
    activityname event eventlabel emotion y gt positivelabels""".split()
MULTIPLE = set(
    "labels labelids classes categories actions actionclasses tags targets positivelabels".split()
)
SUBSETS = "split subset set partition usage splits".split()
UNITS = "(time|timestamp|ts|t|sec|secs|second|seconds|s|ms|msec|frame|frames|fid|idx|index)*"
STARTS = (
    f"(t|time|clip|segment|seg|action|frame|video)?(start|begin|onset){UNITS}|from|fromtimestamp"
)
ENDS = f"(t|time|clip|segment|seg|action|frame|video)?(end|stop|finish){UNITS}|to|totimestamp"
NUMBERS = (
    "id",
    "idx",
    "index",
)  # at the end of names of columns that are the numbers of other labels
LENGTHS = set("length duration cliplength segmentlength numframes nframes durationseconds".split())
PAIRS = set(
    """
    segment segments timestamp timestamps times ts interval intervals clip clips span spans window windows
    moment""".split()
)  # [start, end]
NO_LABEL = re.compile(  # what else tables say, and nobody means as a class
    "caption|text|desc|narrat|title|sentence|script|summary|prompt|duration|length|fps|width|height|frame|size|licen|url"
    "|link|author|date|time|source|sha|md5|hash|index|idx|participant|subject|person|user|iscc|dir|page|quality|format"
    "|codec|channel|lang|view|count|num|rate|answer|question|conversation|meta|bytes|unnamed|votes|resolution|aspect"
)


class Format(NamedTuple):
    """A published form of lists: its columns, each `name`, or `name:role` if the vocabulary knows it by another name.
    Lists with a header have all of these columns, and others. Lists without one have no others, and have them in this
    order; what each must hold is its name in KINDS, or in Columns._fits."""

    name: str
    columns: str
    list_name: str = ".*"  # a regular expression; its group, if any, is the label of all rows
    subsets: tuple[tuple[str, str], ...] = ()  # what the values of the column `subset` mean
    left_out: tuple[str, str] | None = (
        None  # rows with this value in the column `sign`, and what they are
    )
    removed: str = ""  # a regular expression: what its label map lacks of labels
    seconds: float = math.inf  # length of all segments, if no column says it
    is_numbered: bool = False  # the first frame is 1, where no segment starts at 0
    error: str = ""  # why it cannot be read
    fix: str = "write a list of the videos, or of segments in seconds, with their labels (path,start,end,label)"

    def list_columns(self) -> list[tuple[str, str]]:
        """Return the names of columns with their roles."""
        return [
            (word.partition(":")[0], word.partition(":")[2] or word)
            for word in self.columns.split()
        ]

    def matches(self, keys: Sequence[str]) -> bool:
        return all(any(re.fullmatch(name, key) for key in keys) for name, _ in self.list_columns())


BOXES = "it names boxes of persons at moments, as AVA's lists do"
FORMATS = [
    Format("boxes", "x1|xmin|bbox|box|bboxes|boxes", error="it has boxes"),
    Format("Kinetics", "label youtubeid timestart timeend split"),
    Format(
        "HACS Clips",
        "classname:label youtubeid subset start end label:sign",
        left_out=("-1", "HACS' negatives"),
    ),
    Format("ActivityNet, Kinetics (JSON)", "id label segment subset"),
    Format("ActivityNet Captions, YouCook2", "id timestamps|segment sentences?"),
    Format("Panda-70M", "videoid timestamp caption desirablefiltering"),
    Format("Charades-STA", "id start end sentence"),
    Format("DiDeMo", "video times numsegments", error="its times count pieces of 5 seconds"),
    Format("Something-Something V2", "id label:caption template:label", removed=r"[\[\]]"),
    Format("EPIC-KITCHENS-100", "narrationid videoid verb verbclass:verbid noun nounclass:nounid"),
    Format("Diving48", "vidname label startframe endframe"),
    Format(
        "Charades", "id script actions", removed=r" +[\d.]+ +[\d.]+$"
    ),  # when each begins and ends
    Format("AudioSet", "ytid startseconds endseconds positivelabels"),
    Format("WebVid", "videoid contenturl"),
    Format(
        "MSR-VTT", "category videoid starttime:whole endtime:whole"
    ),  # the files are cut out already
]
BY_NAME = Format("columns by their names", "")
WITHOUT_HEADER = [
    Format(
        "THUMOS14",
        "thumos:path time:starttime time:endtime",
        list_name=r"(?:.*/)?(?!Ambiguous)(.+?)_(?:val|test)\.txt",
    ),
    Format(
        "HMDB51",
        "path code:subset",
        list_name=r"(?:.*/)?(.+)_test_split\d\.txt",
        subsets=(("1", "train"), ("2", "test"), ("0", "neither")),
    ),
    Format("VGGSound", "youtubeid start name:label", seconds=10),
    Format("Moments in Time", "path name:label number:votes number:votes"),
    Format("VideoMAEv2, mmaction2: segments", "path start:startframe length number:label"),
    Format("VideoMAEv2 for pre-training", "path start:startframe all:length"),
    Format("folders of frames, their number, label", "path num_frames number:label"),
    Format(
        "folders of frames, start, number",
        "path start:startframe frames_from_start:length",
        is_numbered=True,
    ),
    Format("paths", "path"),
    Format("numbers of rows, paths", "row:index path"),
    Format("numbers of rows, paths, labels", "row:index path label"),
    Format("paths and labels", "path label"),
    Format("labels and paths", "label path"),
    Format("AVA", "path time fraction fraction fraction fraction time", error=BOXES),
    Format("AVA", "path time fraction fraction fraction fraction time time", error=BOXES),
    Format(
        "starts and ends",
        "path time time label",
        error="columns 2 and 3 may be the start and the end of segments",
        fix="give --start-column 2 --end-column 3, or --label-column",
    ),
]
AS_GIVEN = Format("columns as given", "")
KINDS: dict[
    str, Callable[[Any], bool]
] = {  # what a column without a header must hold, as columns.Column
    "label": lambda column: True,
    "name": lambda column: not column.is_number,
    "time": lambda column: column.is_number,
    "fraction": lambda column: column.is_number and not column.whole,
    "number": lambda column: bool(column.whole),
    "code": lambda column: bool(column.whole) and {*column.whole} <= {0, 1, 2},
    "length": lambda column: (
        bool(column.whole) and all(number == -1 or number > 0 for number in column.whole)
    ),
    "all": lambda column: {*column.whole} == {-1},
    "start": lambda column: min(column.whole, default=-1) >= 0,
    "row": lambda column: (
        len(it := column.whole) > 2
        and it[0] in (0, 1)
        and it == [it[0] + n for n in range(len(it))]
    ),
}


def to_key(name: Any) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def is_known(name: str) -> bool:
    """Whether a cell can be the name of a column."""
    key = to_key(name)
    return key in (*PATHS, *LABELS, *SUBSETS) or is_time(key)


def is_time(key: str) -> bool:
    return re.fullmatch(f"{STARTS}|{ENDS}", key) is not None


def get_unit(key: str) -> tuple[float, bool]:
    """Return (seconds or frames per unit, whether it is frames) of a column of times."""
    if "frame" in key or key.endswith(("fid", "idx", "index")):
        return 1, True
    return (0.001 if key.endswith(("ms", "msec")) else 1), False
