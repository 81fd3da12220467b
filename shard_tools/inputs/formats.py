"""The published formats of lists.

A list with a header (or with keys of JSON) has the first format of FORMATS whose columns it has.
Other lists have the first format of WITHOUT_HEADER that fits. The format gives roles to columns
whose names the vocabulary does not know, or knows as something else; the vocabulary (vocabulary.py)
then says what each role means.

To add a format, write an entry here and a row of HEADS in test_lists.py.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from adamae.shard_tools.inputs.column import Column


class Format(NamedTuple):
    """A published format of lists.

    `columns` are words separated by spaces. A word is a column's name, or `name:role` if the
    vocabulary knows by another name, `role`, what the column holds. A list with a header must have
    all of these columns, and may have more. A list without a header must have exactly these, in
    this order, besides those that options name; a name is then a key of KINDS, which says what the
    cells must hold.
    """

    name: str
    columns: str
    # A regular expression for the list's file name; its group, if any, is the label of all rows.
    list_name: str = ".*"
    # The subset that each value of the column `subset` means.
    subsets: tuple[tuple[str, str], ...] = ()
    # (value, description): rows with this value in the column `exclusion` are skipped, and the
    # description names them in messages.
    left_out: tuple[str, str] | None = None
    # A regular expression for text that is removed from labels, since no label map has it.
    removed: str = ""
    # The length of each segment in seconds, if no column gives an end or a length.
    seconds: float = math.inf
    # Whether frames are counted from 1, unless a segment starts at 0.
    is_numbered: bool = False
    # The reason why lists of this format cannot be read, and what the user can do.
    error: str = ""
    fix: str = (
        "write a list of the videos, or of segments in seconds, with their labels"
        " (path,start,end,label)"
    )

    def list_columns(self) -> list[tuple[str, str]]:
        """Return (name, role) of each column."""
        columns = []
        for word in self.columns.split():
            name, _, role = word.partition(":")
            columns.append((name, role or name))
        return columns

    def matches(self, keys: Sequence[str]) -> bool:
        """Return whether a header (`keys`) has all columns; the names are regular expressions."""
        return all(_has_column(keys, name) for name, _ in self.list_columns())


def _has_column(keys: Sequence[str], name: str) -> bool:
    return any(re.fullmatch(name, key) for key in keys)


FORMATS = [
    Format("boxes", "x1|xmin|bbox|box|bboxes|boxes", error="it has boxes"),
    Format("Kinetics", "label youtubeid timestart timeend split"),
    Format(
        "HACS Clips",
        "classname:label youtubeid subset start end label:exclusion",
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
    # A cell is "c092 11.90 21.20;c147 0.00 12.60": each action with its start and its end.
    Format("Charades", "id script actions", removed=r" +[\d.]+ +[\d.]+$"),
    Format("AudioSet", "ytid startseconds endseconds positivelabels"),
    Format("WebVid", "videoid contenturl"),
    # Its files are cut to the segments already, so the times in the whole video are not used.
    Format("MSR-VTT", "category videoid starttime:whole endtime:whole"),
]
# The format of other lists with a header.
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
# The format of other lists without a header, whose columns the options name.
AS_GIVEN = Format("columns as given", "")


class Kind(NamedTuple):
    """A condition on a column of a list without a header, for a format to fit the list."""

    fits: Callable[[Column], bool] = lambda column: True
    # Whether the column must be the column of paths; columns of other kinds must not be.
    is_path: bool = False
    # A condition on (the number in the column before this one, the number in this column, the
    # number of frames in the folder). All rows whose path is a folder of frames must meet it, and
    # at least one row must have such a path.
    fits_frames: Callable[[float, float, int], bool] | None = None


def _are_named(pattern: str, column: Column) -> bool:
    return all(re.fullmatch(pattern, text, re.DOTALL) for text in column.texts)


def _counts_rows(column: Column) -> bool:
    """Return whether a column numbers the rows: 0, 1, 2, … or 1, 2, 3, …"""
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
    # A length of -1 means a segment that ends with the video.
    "length": Kind(
        lambda column: (
            bool(column.whole_numbers) and all(it == -1 or it > 0 for it in column.whole_numbers)
        )
    ),
    "all": Kind(lambda column: {*column.whole_numbers} == {-1}),
    "start": Kind(lambda column: min(column.whole_numbers, default=-1) >= 0),
    "row": Kind(_counts_rows),
    # The list's author may have extracted frames with another version of FFmpeg, which gives one
    # frame more or less.
    "num_frames": Kind(fits_frames=lambda _, number, count: abs(number - count) <= 1),
    "frames_from_start": Kind(fits_frames=lambda start, number, count: start + number <= count + 1),
}
