"""What the columns of a list are: by the names that published sets give them, and by the files that are there."""

import json
import math
import re
from ast import literal_eval
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from common.errors import InputError
from common.logging import printable
from pipeline.reading.storage import is_remote
from shard_tools.inputs.folders import GROUPS, PICTURES, has_video_extension
from shard_tools.inputs.item import Segment
from shard_tools.inputs.sniff import Row, Table, to_text

# Names of columns, without case and all that is no letter or digit; of paths, the most telling first.
PATHS = re.findall(
    r"\w+",
    """path videopath filepath clippath fullpath relativepath relpath filename videofile file videofilename moviefile
    video clip videos framedir framesdir framefolder framepath folder directory videoname clipname vidname videoid
    vidid clipid vid youtubeid ytid youtube uid id name key contenturl videourl url""",
)
LABELS = re.findall(
    r"\w+",
    """label labels labelid labelids labelname labelidx labeltext class classes classname classid classidx classindex
    classlabel category categories categoryname categoryid action actions actionclass actionlabel actionname actionid
    actionclasses target targets targetid tag tags verb verbclass noun nounclass template gesture gestureid activity
    activityname event eventlabel emotion y gt positivelabels""",
)
MULTIPLE = {"labels", "labelids", "classes", "categories", "actions", "actionclasses", "tags", "targets"}
MULTIPLE |= {"positivelabels"}
SUBSETS = {"split", "subset", "set", "partition", "usage", "splits"}
LENGTHS = {"length", "duration", "cliplength", "segmentlength", "numframes", "nframes", "durationseconds"}
UNITS = "(time|timestamp|ts|t|sec|secs|second|seconds|s|ms|msec|frame|frames|idx|index)*"
START = re.compile(f"(t|time|clip|segment|seg|action|frame|video)?(start|begin|onset){UNITS}|from|fromtimestamp")
END = re.compile(f"(t|time|clip|segment|seg|action|frame|video)?(end|stop|finish){UNITS}|to|totimestamp")
PAIRS = {"segment", "timestamp", "timestamps", "times", "interval", "clip"}
NO_LABEL = re.compile(  # what else tables say, and nobody means as a class
    "caption|text|desc|narrat|title|sentence|script|summary|prompt|duration|length|fps|width|height|frame|size|licen|url"
    "|link|author|date|time|source|sha|md5|hash|index|idx|participant|subject|person|user|iscc|dir|page|quality|format"
    "|codec|channel|lang|view|count|num|rate|answer|question|conversation|meta|bytes|unnamed|votes|resolution|aspect"
)
BOXES = {"x1", "y1", "x2", "y2", "xmin", "ymin", "bbox", "box", "bboxes", "boxes"}
MISSING = {"", "nan", "na", "n/a", "null", "<na>", "#n/a"}
FOLDER = "folder"  # --label-column folder: the name of the folder that the file lies in
NONE = "none"  # --start-column none: numbers that look like times are none
NUM_JUDGED = 24
WHOLE = re.compile(r"-?\d+(\.0+)?")
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:[.,]\d+)?)")
TIMED = re.compile(r"(\S+) +([\d.]+) +([\d.]+)")
YOUTUBE_ID = re.compile(r"[\w-]{11}")
BRACKETS = str.maketrans("", "", "[]")


@dataclass(frozen=True)
class Choices:
    """What the user says about a list."""

    root: str | None = None
    suffix: str = ""
    path: str | None = None
    label: str | None = None
    start: str | None = None
    end: str | None = None
    subset: str | None = None
    is_split: bool = False  # the subset is only how the split is called: an input without subsets is taken whole
    unlabeled: bool = False
    has_label_map: bool = False


class Times(NamedTuple):
    """Two columns that say where a segment begins and ends; without a second one, a column of pairs, or a length."""

    start: int
    end: int | None
    scale: float = 1  # seconds (or frames) per unit
    in_frames: bool = False
    is_length: bool = False  # the second column is one
    length: float = math.inf  # where there is no second column


@dataclass
class Roles:
    """Which column holds what; numbers of columns from 0."""

    path: int
    label: int | None = None
    is_multiple: bool = False
    times: list[Times] = field(default_factory=list)
    pair: int | None = None
    subset: int | None = None
    subset_codes: dict[str, str] = field(default_factory=dict)
    skip: tuple[int, str, str] | None = None  # column, value and kind of rows that are no samples
    label_of_all: str | None = None
    label_is_folder: bool = False
    unused: list[int] = field(default_factory=list)


class Judgement(NamedTuple):
    """Of rows: in which column how many cells are files, or look like files."""

    num_found: int
    num_looks: int
    column: int
    num_rows: int
    has_header: bool
    num_known: int  # cells of the first row that are names of columns


def to_key(name: Any) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def is_known(name: str) -> bool:
    key = to_key(name)
    return key in LABELS or key in PATHS or key in SUBSETS or bool(START.fullmatch(key) or END.fullmatch(key))


def judge_rows(rows: Sequence[Row], is_file: Callable[[str], bool]) -> Judgement:
    """Find the column that names videos, and whether the first row is a header."""
    step = max(1, len(rows) // NUM_JUDGED)
    chosen = rows[::step]
    width = max(map(len, rows))
    if not width:
        return Judgement(0, 0, 0, len(rows), False, 0)
    counts = []
    for column in range(width):
        cells = [str(row[column]).strip() for row in chosen if column < len(row) and row[column] is not None]
        found = sum(map(is_file, cells))
        looks = sum(has_video_extension(cell) or is_remote(cell) for cell in cells)
        counts.append((found, looks, -column))
    found, looks, column = max(counts)
    first = [str(cell).strip().lstrip("#").strip() for cell in rows[0]]
    cell = first[-column] if -column < len(first) else ""
    num_known = sum(map(is_known, first)) if len({*first}) == len(first) else 0
    is_named = is_file(cell) or has_video_extension(cell) or "/" in cell
    others, num_others = found - is_file(cell), len(chosen) - 1
    if is_named or (WHOLE.fullmatch(cell) and first[0] != "" and first[:2] != ["0", "1"]):
        has_header = False
    elif len(rows) == 1:
        has_header = num_known >= 2 or (num_known == 1 and len(first) == 1)
    elif num_known:
        has_header = is_known(cell) or num_known >= 2 or 2 * others >= num_others
    else:
        is_index = (first[0] == "" and len(first) > 1) or first[:2] == ["0", "1"]
        has_header = (num_others >= 2 and others == num_others) or is_index
    return Judgement(found, looks, -column, len(chosen) - has_header, has_header, num_known if has_header else 0)


class RoleChooser:
    """Says which column is what; raises InputError where that is not clear, with the columns that there are.

    `is_file` says whether a video has a name, `count_frames` how many pictures are in the folder of this name.
    """

    def __init__(
        self,
        table: Table,
        sample: list[Row],
        is_file: Callable[[str], bool],
        choices: Choices,
        count_frames: Callable[[str], int],
    ) -> None:
        self.table, self.sample, self.choices = table, sample, choices
        self.is_file, self.count_frames = is_file, count_frames
        width = len(table.columns) if table.columns else max(map(len, sample), default=0)
        self.names = [*map(str, table.columns)] if table.columns else [f"column {n}" for n in range(1, width + 1)]
        self.keys = [to_key(name) for name in table.columns] if table.columns else [""] * width

    def cells(self, column: int) -> list[Any]:
        return [row[column] for row in self.sample if column < len(row) and not is_missing(row[column])]

    def texts(self, column: int) -> list[str]:
        return [to_text(cell) for cell in self.cells(column)]

    def is_whole(self, column: int) -> bool:
        return all(WHOLE.fullmatch(text) for text in self.texts(column)) and bool(self.cells(column))

    def is_number(self, column: int) -> bool:
        return bool(self.cells(column)) and all(parse_time(cell) is not None for cell in self.cells(column))

    def count_files(self, column: int) -> int:
        cells = self.cells(column)
        return sum(self.is_file(to_path(cell)) for cell in cells[:: max(1, len(cells) // NUM_JUDGED)])

    def refuse(self, what: str, fix: str) -> InputError:
        columns = ", ".join(map(printable, self.names[:30]))
        example = f" (the first row: {printable(', '.join(to_text(cell) for cell in self.sample[0]))})"
        return InputError(f"{self.table.where}: {what}; its columns are {columns}{example}: {fix}")

    def resolve(self, given: str, option: str) -> int:
        """Return the column that an option names, by its name or its number from 1."""
        if given in self.names:
            return self.names.index(given)
        if to_key(given) in self.keys and to_key(given):
            return self.keys.index(to_key(given))
        if given.isdecimal() and 1 <= int(given) <= len(self.names):
            return int(given) - 1
        raise self.refuse(f"there is no column {given}", f"give {option} one of them, or a number from 1")

    def choose(self) -> Roles:
        if not self.names:
            raise InputError(f"{self.table.where} has no columns")
        roles = Roles(self._choose_path())
        if self.choices.start or self.choices.end:
            roles.times = self._resolve_times()
        if self.table.columns:
            self._choose_by_name(roles)
        else:
            self._choose_by_content(roles)
        self._require_videos(roles)
        return roles

    def _choose_path(self) -> int:
        if self.choices.path:
            return self.resolve(self.choices.path, "--path-column")
        if not self.table.columns:
            return judge_rows([self.sample[0], *self.sample], self.is_file).column
        named = [self.keys.index(key) for key in PATHS if key in self.keys]
        named += [n for n, key in enumerate(self.keys) if key.endswith(("filename", "filepath")) and n not in named]
        found = {column: self.count_files(column) for column in named}
        if any(found.values()):
            return max(named, key=lambda column: found[column])
        others = {n: self.count_files(n) for n in range(len(self.names)) if n not in named}
        judged = min(len(self.sample), NUM_JUDGED)
        whole = [column for column, count in others.items() if 2 * count >= judged and count]
        if len(whole) == 1:
            return whole[0]
        if not named:
            looked = ", ".join(("path", "video", "file_name", "video_id", "id", "…"))
            raise self.refuse(f"no column names videos (looked for {looked})", "give --path-column, --root or --suffix")
        return named[0]

    def _resolve_times(self) -> list[Times]:
        if NONE in (self.choices.start, self.choices.end):
            return []
        if not (self.choices.start and self.choices.end):
            raise self.refuse("a segment has a start and an end", "give both --start-column and --end-column")
        start = self.resolve(self.choices.start, "--start-column")
        end = self.resolve(self.choices.end, "--end-column")
        return [Times(start, end, *get_unit(self.keys[start]), is_length=self.keys[end] in LENGTHS)]

    def _choose_by_name(self, roles: Roles) -> None:
        free = [n for n in range(len(self.names)) if n != roles.path]
        if BOXES & set(self.keys):
            raise self.refuse("it has boxes", "only labels of videos and segments are read, not detections")
        if not self.choices.start:
            starts = {get_unit(self.keys[n]): n for n in reversed(free) if START.fullmatch(self.keys[n])}
            ends = {get_unit(self.keys[n]): n for n in reversed(free) if END.fullmatch(self.keys[n])}
            lengths = [n for n in free if self.keys[n] in LENGTHS]
            roles.times = [Times(starts[unit], ends[unit], *unit) for unit in sorted(starts) if unit in ends]
            if starts and not roles.times:
                unit, start = next(iter(starts.items()))
                if ends or not lengths:
                    raise self.refuse(
                        f"{self.names[start]} has no end", "give --start-column and --end-column, or none"
                    )
                roles.times = [Times(start, lengths[0], *unit, is_length=True)]
            elif ends and not roles.times:
                raise self.refuse("there is an end without a start", "give --start-column and --end-column")
            roles.pair = next((n for n in free if self.keys[n] in PAIRS and self._holds_pairs(n)), None)
        roles.subset = next((n for n in free if self.keys[n] in SUBSETS), None)
        taken = {roles.subset, roles.pair, *(n for times in roles.times for n in times[:2])}
        free = [n for n in free if n not in taken]
        if self.choices.unlabeled or self._takes_given_label(roles):
            return
        named = [n for n in free if self.keys[n] in LABELS and self.cells(n)]
        if "template" in self.keys and self.keys.index("template") in named:  # SSv2's "label" is a caption
            named = [self.keys.index("template")]
        if "classname" in self.keys and "label" in self.keys:
            sign = self.keys.index("label")
            if {float(text) for text in self.texts(sign) if WHOLE.fullmatch(text)} <= {1.0, -1.0} and self.is_whole(
                sign
            ):
                roles.skip = sign, "-1", "of HACS' negatives"
                named = [self.keys.index("classname")]
        named = self._merge_pairs(named)
        if len(named) > 1:
            names = ", ".join(self.names[n] for n in named)
            raise self.refuse(f"{names} may each be the label", "choose with --label-column, or give --unlabeled")
        if named:
            roles.label = named[0]
            roles.is_multiple = self._holds_several(named[0])
            return
        unknown = [n for n in free if self._may_be_label(n)]
        if unknown:
            looked = "looked for label, class, class_name, category, action, target, verb, …"
            names = ", ".join(self.names[n] for n in unknown)
            raise self.refuse(
                f"no column is known as the label ({looked}), and {names} may be", "give --label-column, or --unlabeled"
            )

    def _takes_given_label(self, roles: Roles) -> bool:
        if self.choices.label == FOLDER and FOLDER not in self.names:
            roles.label_is_folder = True
        elif self.choices.label:
            roles.label = self.resolve(self.choices.label, "--label-column")
            roles.is_multiple = self._holds_several(roles.label)
        return self.choices.label is not None

    def _merge_pairs(self, named: list[int]) -> list[int]:
        """Keep one of columns that say the same: names rather than numbers."""
        if len(named) < 2:
            return named
        merged = []
        stems: dict[str, list[int]] = {}
        for n in named:
            stems.setdefault(get_stem(self.keys[n]), []).append(n)
        for columns in stems.values():
            texts = [n for n in columns if not self.is_whole(n)]
            same = all(self._say_the_same(columns[0], n) for n in columns[1:])
            merged += [(texts or columns)[0]] if same else columns
        texts, numbers = [n for n in merged if not self.is_whole(n)], [n for n in merged if self.is_whole(n)]
        if len(texts) == 1 and all(self._say_the_same(texts[0], n) for n in numbers):
            return texts
        return merged

    def _say_the_same(self, one: int, other: int) -> bool:
        pairs = {(to_text(row[one]), to_text(row[other])) for row in self.sample if max(one, other) < len(row)}
        return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})

    def _may_be_label(self, column: int) -> bool:
        texts = self.texts(column)
        if not texts or NO_LABEL.search(self.keys[column]) or self.keys[column] in (*PATHS, ""):
            return False
        is_scalar = all(isinstance(cell, (str, int)) and not isinstance(cell, bool) for cell in self.cells(column))
        repeats = len(set(texts)) < len(texts) or len(texts) < 10
        return is_scalar and repeats and (self.is_whole(column) or not self.is_number(column))

    def _holds_several(self, column: int) -> bool:
        """Whether cells hold several labels: lists, or text with separators in a column that is called labels."""
        cells = self.cells(column)
        if any(isinstance(cell, list) or looks_like_list(cell) for cell in cells):
            return True
        texts = [str(cell) for cell in cells]
        if any(TIMED.match(text) for text in texts) and self.keys[column] in MULTIPLE:
            return True
        return self.keys[column] in MULTIPLE and any(re.search("[|;,]", text) for text in texts)

    def _holds_pairs(self, column: int) -> bool:
        return bool(self.cells(column)) and all(parse_pair(cell) is not None for cell in self.cells(column))

    def _choose_by_content(self, roles: Roles) -> None:
        """Choose the label among columns without names: what is left when all else has been explained."""
        free = [n for n in range(len(self.names)) if n != roles.path and self.cells(n)]
        free = [n for n in free if not (n < roles.path and self._counts_rows(n))]
        taken = {n for times in roles.times for n in times[:2]}
        groups = [n for n in free if n not in taken and {text.lower() for text in self.texts(n)} <= GROUPS.keys()]
        roles.subset = groups[0] if groups else None
        free = [n for n in free if n not in taken and n not in groups]
        if self.choices.unlabeled or self._takes_given_label(roles):
            roles.unused = [n for n in free if n != roles.label]
            return
        numbers, texts = [n for n in free if self.is_number(n)], [n for n in free if not self.is_number(n)]
        fractions = [n for n in numbers if not self.is_whole(n)]
        if len(fractions) >= 4 and not texts:
            raise self.refuse(
                "it names boxes of persons at moments, as AVA's lists do",
                "only labels of videos and segments are read",
            )
        if self._choose_published(roles, numbers, texts):
            return
        if not self.choices.start and (pair := self._find_times(numbers)):
            first, second = pair
            raise self.refuse(
                f"columns {first + 1} and {second + 1} may be the start and the end of segments",
                f"give --start-column {first + 1} --end-column {second + 1}, or --start-column none",
            )
        whole = [n for n in numbers if self.is_whole(n)]
        merged = self._merge_pairs([*texts, *whole]) if len(texts) == 1 and len(whole) == 1 else texts
        candidates = merged if texts else whole
        if len(candidates) == 1:
            roles.label = candidates[0]
            roles.unused = [n for n in free if n != roles.label]
        elif candidates or fractions:
            names = " and ".join(self.names[n] for n in candidates or fractions)
            raise self.refuse(
                f"it has no header, and what {names} say{'s' * (len(candidates or fractions) == 1)} is not clear",
                "give --label-column (a number from 1), or --unlabeled",
            )

    def _choose_published(self, roles: Roles, numbers: list[int], texts: list[int]) -> bool:
        """Know the layouts of published lists without headers; return whether this is one."""
        whole = [n for n in numbers if self.is_whole(n)]
        values = {n: [int(float(text)) for text in self.texts(n)] for n in whole}
        match = re.fullmatch(r"(?:.*/)?(.+)_test_split\d\.txt", self.table.where)
        if match and len(whole) == 1 and not texts and set(values[whole[0]]) <= {0, 1, 2}:  # HMDB51's, a file a class
            roles.subset, roles.subset_codes = whole[0], {"1": "train", "2": "test", "0": "neither"}
            roles.label_of_all = match[1]
            return True
        if texts or len(whole) != len(numbers) or len(whole) < 2 or whole != sorted(whole):
            names = self.texts(roles.path)
            if len(texts) == len(whole) == 1 and whole[0] == roles.path + 1 and all(map(YOUTUBE_ID.fullmatch, names)):
                roles.label, roles.times = texts[0], [Times(whole[0], None, length=10.0)]  # VGGSound's
                return True
            return False
        first, second, *rest = whole
        if len(whole) == 3 and all(length == -1 or length > 0 for length in values[second]):
            roles.times = [Times(first, second, in_frames=True, is_length=True)]  # VideoMAEv2's
            roles.label = rest[0]
            return True
        if len(whole) == 2 and set(values[second]) == {-1} and min(values[first]) >= 0:  # VideoMAEv2's for pre-training
            roles.times = [Times(first, second, in_frames=True, is_length=True)]
            return True
        counts = [self.count_frames(to_path(cell)) for cell in self.cells(roles.path)]
        known = [(count, *pair) for count, *pair in zip(counts, values[first], values[second], strict=False) if count]
        if len(whole) == 2 and known:
            if all(abs(count - length) <= 1 for count, length, _ in known):  # folder, frames, label
                roles.label, roles.unused = second, [first]
                return True
            if all(start + length <= count + 1 for count, start, length in known):  # folder, start, frames
                roles.times = [Times(first, second, in_frames=True, is_length=True)]
                return True
        return False

    def _counts_rows(self, column: int) -> bool:
        """Whether a column in front of the paths is an index."""
        texts = self.texts(column)
        return any(texts == [str(number) for number in range(start, len(texts) + start)] for start in (0, 1))

    def _find_times(self, numbers: list[int]) -> tuple[int, int] | None:
        """Return two neighbours of which the second is always the larger one, as ends of segments are."""
        for first, second in pairwise(numbers):
            pairs = [(parse_time(row[first]), parse_time(row[second])) for row in self.sample if len(row) > second]
            if second == first + 1 and all(a is not None and b is not None and a < b for a, b in pairs):
                return first, second
        return None

    def _require_videos(self, roles: Roles) -> None:
        texts = self.texts(roles.path)
        if texts and sum(text.lower().endswith(PICTURES) for text in texts) > len(texts) // 2:
            raise self.refuse(
                f"{self.names[roles.path]} names pictures, one a row",
                "give a row per video or folder of frames",
            )


def get_unit(key: str) -> tuple[float, bool]:
    """Return (seconds or frames per unit, whether it is frames) of a column of times."""
    if "frame" in key or key.endswith(("idx", "index")):
        return 1, True
    return (0.001 if key.endswith(("ms", "msec")) else 1), False


def get_stem(key: str) -> str:
    """Return the word that label, labels, label_id and label_name have in common."""
    key = {"classes": "class", "categories": "category", "activities": "activity"}.get(key, key)
    stem = re.sub("(names?|ids?|idx|index|class|label|text|classes)$", "", key)
    return re.sub("(?<!s)s$", "", stem) or key


def to_path(cell: Any) -> str:
    """Return a cell as a path, with the very bytes of the list."""
    return cell.strip() if isinstance(cell, str) else "" if cell is None else to_text(cell)


def is_missing(cell: Any) -> bool:
    if isinstance(cell, str):
        return cell.strip().lower() in MISSING
    return cell is None or cell != cell  # NaN alone differs from itself


def parse_time(cell: Any) -> float | None:
    """Read seconds, a frame's number or hh:mm:ss.mmm; None if it is none of them."""
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return float(cell)
    text = str(cell).strip()
    if match := CLOCK.fullmatch(text):
        hours, minutes, seconds = match.groups(default="0")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
    try:
        return float(text)
    except ValueError:
        return None


def looks_like_list(cell: Any) -> bool:
    return isinstance(cell, str) and cell.startswith("[") and cell.endswith("]") and parse_list(cell) is not None


def parse_list(cell: Any) -> list[Any] | None:
    """Read a list, or the text of one as JSON or Python write it."""
    if isinstance(cell, list):
        return cell
    try:
        value = literal_eval(cell)
        return list(value) if isinstance(value, (list, tuple)) else None
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def parse_pair(cell: Any) -> tuple[float, float] | None:
    values = parse_list(cell)
    if values is None or len(values) != 2:
        return None
    start, end = map(parse_time, values)
    return None if start is None or end is None else (start, end)


def read_label(cell: Any) -> str | None:
    """Return a label as text; None if there is none. pandas makes 1.0 of 1 in columns that lack some."""
    if is_missing(cell):
        return None
    text = to_text(cell)
    return text.partition(".")[0] if WHOLE.fullmatch(text) else text


def read_labels(cell: Any, is_multiple: bool) -> tuple[str, ...] | None:
    if not is_multiple:
        label = read_label(cell)
        return None if label is None else (label,)
    parts = parse_list(cell) if isinstance(cell, list) or looks_like_list(cell) else None
    if parts is None:
        if is_missing(cell):
            return None
        text = str(cell)
        separator = next((mark for mark in "|;," if mark in text), "\n")
        parts = [match[1] if (match := TIMED.fullmatch(part.strip())) else part for part in text.split(separator)]
    parts = [part[0] if isinstance(part, list) and part else part for part in parts]
    labels: Iterable[str | None] = map(read_label, parts)
    return tuple(sorted({label for label in labels if label is not None}))


def read_segment(row: Row, times: Times) -> Segment | str | None:
    """Return the segment of a row, None if it is the whole video, or why it has none."""
    cells = row[times.start], row[times.end] if times.end is not None and times.end < len(row) else None
    if is_missing(cells[0]) and is_missing(cells[1]):
        return None
    start = 0.0 if is_missing(cells[0]) else parse_time(cells[0])
    end = math.inf if is_missing(cells[1]) else parse_time(cells[1])
    if start is None or end is None:
        return f"its segment from {to_text(cells[0])!r} to {to_text(cells[1])!r} is no time"
    start *= times.scale
    if times.end is None:
        end = start + times.length
    elif end == -1:  # to the end, as VideoMAEv2 writes
        end = math.inf
    else:
        end = end * times.scale + (start if times.is_length else 0)
    return None if (start, end) == (0, math.inf) else Segment(start, end, times.in_frames)


def dump_fields(names: list[str], row: Row, columns: list[int]) -> str:
    values = {names[n]: row[n] for n in columns if n < len(row) and not is_missing(row[n])}
    values = {name: to_text(value) if isinstance(value, str) else value for name, value in values.items()}
    return json.dumps(values, ensure_ascii=False, default=str) if values else ""
