"""The formats of lists: a new one is an entry here, and a row of HEADS in test_lists.py.

A list is of the first format whose columns it has: of FORMATS, if it has a header (or keys of
JSON), else of WITHOUT_HEADER. The format says which columns are not called as in the vocabulary;
that then says which is what.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from adamae.shard_tools.inputs.column import Column


class Format(NamedTuple):
    """A published form of lists.

    `columns` are words, each a name, or `name:role` if the vocabulary knows what it holds by
    another name. Lists with a header have all of these columns, and others. Lists without one have
    these in this order, and no others; their names are those of KINDS, which says what each holds.
    """

    name: str
    columns: str
    # A regular expression; its group, if it has one, is the label of all rows.
    list_name: str = ".*"
    # What the values of the column `subset` mean.
    subsets: tuple[tuple[str, str], ...] = ()
    # Rows with this value in the column `sign` are left out, and this is what they are.
    left_out: tuple[str, str] | None = None
    # A regular expression for what labels hold and their label map lacks.
    removed: str = ""
    # The length of all segments, if no column says it.
    seconds: float = math.inf
    # The first frame is 1, where no segment starts at 0.
    is_numbered: bool = False
    # The reason why it cannot be read.
    error: str = ""
    fix: str = (
        "write a list of the videos, or of segments in seconds, with their labels"
        " (path,start,end,label)"
    )

    def list_columns(self) -> list[tuple[str, str]]:
        """Return the names of columns with their roles."""
        columns = []
        for word in self.columns.split():
            name, _, role = word.partition(":")
            columns.append((name, role or name))
        return columns

    def matches(self, keys: Sequence[str]) -> bool:
        """Return whether a header has all of the columns; their names are regular expressions."""
        return all(_has_column(keys, name) for name, _ in self.list_columns())


def _has_column(keys: Sequence[str], name: str) -> bool:
    return any(re.fullmatch(name, key) for key in keys)


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
    # Labels are templates with their objects filled in, and classes are the templates without [].
    Format("Something-Something V2", "id label:caption template:label", removed=r"[\[\]]"),
    Format("EPIC-KITCHENS-100", "narrationid videoid verb verbclass:verbid noun nounclass:nounid"),
    Format("Diving48", "vidname label startframe endframe"),
    # Behind each action stand the times at which it begins and ends.
    Format("Charades", "id script actions", removed=r" +[\d.]+ +[\d.]+$"),
    Format("AudioSet", "ytid startseconds endseconds positivelabels"),
    Format("WebVid", "videoid contenturl"),
    # The files are cut out already, so the times of the whole video are of no use.
    Format("MSR-VTT", "category videoid starttime:whole endtime:whole"),
]
# Of lists with a header that have no published form.
BY_NAME = Format("columns by their names", "")

BOXES = "it names boxes of persons at moments, as AVA's lists do"
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
# Of lists without a header whose columns the options name.
AS_GIVEN = Format("columns as given", "")


class Kind(NamedTuple):
    """What a column of a list without a header must hold to be what a format says of it."""

    fits: Callable[[Column], bool] = lambda column: True
    # It is the column of paths, which no other kind is.
    is_path: bool = False
    # What must hold of all rows of folders of frames, of which there must be some: of the number in
    # the column before this one, the number in this one, and the number of frames in the folder.
    fits_frames: Callable[[float, float, int], bool] | None = None


def _are_named(pattern: str, column: Column) -> bool:
    return all(re.fullmatch(pattern, text, re.DOTALL) for text in column.texts)


def _counts_rows(column: Column) -> bool:
    """Return whether a column holds 0, 1, 2, … or 1, 2, 3, …"""
    numbers = column.whole_numbers
    if len(numbers) < 3 or numbers[0] not in (0, 1):
        return False
    return numbers == [numbers[0] + row for row in range(len(numbers))]


KINDS = {
    "path": Kind(is_path=True),
    "youtubeid": Kind(partial(_are_named, r"[\w-]{11}"), is_path=True),
    "thumos": Kind(partial(_are_named, r"video_(validation|test)_\d{7}"), is_path=True),
    "label": Kind(),
    "name": Kind(lambda column: not column.is_number),
    "time": Kind(lambda column: column.is_number),
    "fraction": Kind(lambda column: column.is_number and not column.whole_numbers),
    "number": Kind(lambda column: bool(column.whole_numbers)),
    "code": Kind(
        lambda column: bool(column.whole_numbers) and {*column.whole_numbers} <= {0, 1, 2}
    ),
    # -1: up to the end of the video.
    "length": Kind(
        lambda column: (
            bool(column.whole_numbers) and all(it == -1 or it > 0 for it in column.whole_numbers)
        )
    ),
    "all": Kind(lambda column: {*column.whole_numbers} == {-1}),
    "start": Kind(lambda column: min(column.whole_numbers, default=-1) >= 0),
    "row": Kind(_counts_rows),
    # Lists were made from frames that another FFmpeg has extracted: their number differs by 1.
    "num_frames": Kind(fits_frames=lambda _, number, count: abs(number - count) <= 1),
    "frames_from_start": Kind(fits_frames=lambda start, number, count: start + number <= count + 1),
}
