"""What the columns of a list are: by the names that published sets give them, and by the files that are there."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from common.errors import InputError
from common.logging import printable
from pipeline.reading.storage import is_remote
from shard_tools.inputs.cells import (
    NUMBERS,
    TIMED,
    WHOLE,
    Roles,
    Row,
    Times,
    is_missing,
    parse_list,
    parse_pair,
    parse_time,
    to_key,
    to_path,
    to_text,
)
from shard_tools.inputs.files import Finder
from shard_tools.inputs.folders import GROUPS, PICTURES, has_video_extension
from shard_tools.inputs.item import ParquetCell
from shard_tools.inputs.sniff import Table

# Names of columns, without case and all that is no letter or digit; of paths, the most telling first.
PATHS = """
    path videopath filepath clippath fullpath relativepath relpath filename videofile file videofilename moviefile
    video clip videos framedir framesdir framefolder framepath folder directory videoname clipname vidname videoid
    vidid clipid vid youtubeid ytid youtube uid id name key contenturl videourl url""".split()
LABELS = """
    label labels labelid labelids labelname labelidx labeltext class classes classname classid classidx classindex
    classlabel category categories categoryname categoryid action actions actionclass actionlabel actionname actionid
    actionclasses target targets targetid tag tags verb verbclass noun nounclass template gesture gestureid activity
    activityname event eventlabel emotion y gt positivelabels""".split()
MULTIPLE = set("labels labelids classes categories actions actionclasses tags targets positivelabels".split())
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
FOLDER = "folder"  # --label-column folder: the name of the folder that the file lies in
GIVE_LABEL = "give --label-column (a name, or a number from 1), or --unlabeled"
NONE = "none"  # --start-column none: numbers that look like times are none
NUM_JUDGED = 24
YOUTUBE_ID = re.compile(r"[\w-]{11}")


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


LAYOUTS = {  # of published lists without a header: what each column holds, see RoleChooser._holds
    "HMDB51, a file a class": "path split_code",
    "VGGSound": "youtube_id second name",
    "VideoMAEv2; mmaction2, frames with offset": "path start length label",
    "VideoMAEv2 for pre-training": "path start all",
    "folders of frames": "path num_frames label",
    "folders of frames, parts of them": "path start frames_from_there",
}
HMDB51 = re.compile(r"(?:.*/)?(.+)_test_split\d\.txt")
VGGSOUND_S = 10.0


class Judgement(NamedTuple):
    """Of rows: in which column how many cells are files, or look like files."""

    num_found: int
    num_looks: int
    column: int
    num_rows: int
    has_header: bool
    num_known: int  # cells of the first row that are names of columns


def is_known(name: str) -> bool:
    key = to_key(name)
    return key in LABELS or key in PATHS or key in SUBSETS or bool(START.fullmatch(key) or END.fullmatch(key))


def judge_rows(rows: Sequence[Row], is_file: Callable[[str], bool]) -> Judgement:
    """Find the column that names videos, and whether the first row is a header."""
    chosen = rows[:: max(1, len(rows) // NUM_JUDGED)]
    width = max(map(len, rows))
    if not width:
        return Judgement(0, 0, 0, len(rows), False, 0)
    counts = []
    for column in range(width):
        cells = [str(row[column]).strip() for row in chosen if column < len(row) and row[column] is not None]
        looks = sum(has_video_extension(cell) or is_remote(cell) for cell in cells)
        counts.append((sum(map(is_file, cells)), looks, -column))
    found, looks, column = max(counts)
    first = [str(cell).strip().lstrip("#").strip() for cell in rows[0]]
    cell = first[-column] if -column < len(first) else ""
    num_known = sum(map(is_known, first)) if len({*first}) == len(first) else 0
    is_named = is_file(cell) or has_video_extension(cell) or "/" in cell
    others, num_others = found - is_file(cell), len(chosen) - 1
    is_index = (first[0] == "" and len(first) > 1) or first[:2] == ["0", "1"]
    if is_named or (WHOLE.fullmatch(cell) and not is_index and first[0] != ""):
        has_header = False
    elif len(rows) == 1:
        has_header = num_known >= 2 or (num_known == 1 and len(first) == 1)
    elif num_known:
        has_header = is_known(cell) or num_known >= 2 or 2 * others >= num_others
    else:
        has_header = is_index or (num_others >= 2 and others == num_others)
    return Judgement(found, looks, -column, len(chosen) - has_header, has_header, num_known if has_header else 0)


class RoleChooser:
    """Says which column is what; raises InputError where that is not clear, with the columns that there are."""

    def __init__(self, table: Table, sample: list[Row], choices: Choices, finder: Finder) -> None:
        self.table, self.sample, self.choices, self.finder = table, sample, choices, finder
        width = len(table.columns) if table.columns else max(map(len, sample), default=0)
        self.names = [*map(str, table.columns)] if table.columns else [f"column {n}" for n in range(1, width + 1)]
        self.keys = [to_key(name) for name in table.columns] if table.columns else [""] * width

    def cells(self, column: int) -> list[Any]:
        return [row[column] for row in self.sample if column < len(row) and not is_missing(row[column])]

    def texts(self, column: int) -> list[str]:
        return [to_text(cell) for cell in self.cells(column)]

    def is_whole(self, column: int) -> bool:
        return bool(self.cells(column)) and all(map(WHOLE.fullmatch, self.texts(column)))

    def is_number(self, column: int) -> bool:
        return bool(self.cells(column)) and all(parse_time(cell) is not None for cell in self.cells(column))

    def refuse(self, what: str, fix: str) -> InputError:
        columns = ", ".join(map(printable, self.names[:30]))
        example = f" (the first row: {printable(', '.join(map(to_text, self.sample[0])))})"
        return InputError(f"{self.table.where}: {what}; its columns are {columns}{example}: {fix}")

    def resolve(self, given: str, option: str) -> int:
        """Return the column that an option names, by its name or its number from 1."""
        for name, names in ((given, self.names), (to_key(given), self.keys)):
            if name and name in names:
                return names.index(name)
        if given.isdecimal() and 1 <= int(given) <= len(self.names):
            return int(given) - 1
        raise self.refuse(f"there is no column {given}", f"give {option} one of them, or a number from 1")

    def choose(self) -> Roles:
        if not self.names:
            raise InputError(f"{self.table.where} has no columns")
        self.path = self._choose_path()
        roles = Roles(self.path)
        if self.choices.start or self.choices.end:
            roles.times = self._resolve_times()
        if self.table.columns:
            self._choose_by_name(roles)
        else:
            self._choose_by_content(roles)
        texts = self.texts(roles.path)
        if sum(text.lower().endswith(PICTURES) for text in texts) > len(texts) // 2:
            fix = "give a row per video or folder of frames"
            raise self.refuse(f"{self.names[roles.path]} names pictures, one a row", fix)
        return roles

    def _choose_path(self) -> int:
        if self.choices.path:
            return self.resolve(self.choices.path, "--path-column")
        if not self.table.columns:
            return judge_rows([self.sample[0], *self.sample], self.finder.has).column
        videos = [n for n in range(len(self.names)) if any(isinstance(cell, ParquetCell) for cell in self.cells(n))]
        if len(videos) == 1:
            return videos[0]
        named = [self.keys.index(key) for key in PATHS if key in self.keys]
        named += [n for n, key in enumerate(self.keys) if key.endswith(("filename", "filepath")) and n not in named]
        found = {}
        for n in range(len(self.names)):
            cells = self.cells(n)
            found[n] = sum(self.finder.has(to_path(cell)) for cell in cells[:: max(1, len(cells) // NUM_JUDGED)])
        if any(found[n] for n in named):
            return max(named, key=found.__getitem__)
        whole = [n for n, count in found.items() if count and 2 * count >= min(len(self.sample), NUM_JUDGED)]
        if len(whole) == 1:
            return whole[0]
        if not named:
            looked = "looked for path, video, file_name, video_id, id, …"
            raise self.refuse(f"no column names videos ({looked})", "give --path-column, --root or --suffix")
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
        if BOXES & set(self.keys):
            raise self.refuse("it has boxes", "only labels of videos and segments are read, not detections")
        free = [n for n in range(len(self.names)) if n != roles.path]
        if not self.choices.start:
            roles.times = self._find_named_times(free)
            named = [n for n in free if self.keys[n] in PAIRS and self.cells(n)]
            roles.pair = next((n for n in named if None not in map(parse_pair, self.cells(n))), None)
        roles.subset = next((n for n in free if self.keys[n] in SUBSETS), None)
        taken = {roles.subset, roles.pair, *(n for times in roles.times for n in times[:2])}
        free = [n for n in free if n not in taken]
        if self.choices.unlabeled or self._takes_given_label(roles):
            return
        named = self._merge([n for n in free if self.keys[n] in LABELS and self.cells(n)])
        if "template" in self.keys:  # SSv2's "label" is a caption
            named = [self.keys.index("template")]
        if {"classname", "label"} <= {*self.keys}:
            sign = self.keys.index("label")
            if self.is_whole(sign) and {float(text) for text in self.texts(sign)} <= {1.0, -1.0}:
                roles.skip = sign, "-1", "of HACS' negatives"
                named = [self.keys.index("classname")]
        if len(named) > 1:
            names = ", ".join(self.names[n] for n in named)
            raise self.refuse(f"{names} may each be the label", GIVE_LABEL)
        if named:
            self._set_label(roles, named[0])
        elif unknown := [n for n in free if self._may_be_label(n)]:
            looked = "looked for label, class, class_name, category, action, target, verb, …"
            names = ", ".join(self.names[n] for n in unknown)
            raise self.refuse(f"no column is known as the label ({looked}), and {names} may be", GIVE_LABEL)

    def _find_named_times(self, free: list[int]) -> list[Times]:
        starts = {get_unit(self.keys[n]): n for n in reversed(free) if START.fullmatch(self.keys[n])}
        ends = {get_unit(self.keys[n]): n for n in reversed(free) if END.fullmatch(self.keys[n])}
        lengths = [n for n in free if self.keys[n] in LENGTHS]
        times = [Times(starts[unit], ends[unit], *unit) for unit in sorted(starts) if unit in ends]
        if starts and not times:
            unit, start = next(iter(starts.items()))
            if ends or not lengths:
                fix = "give --start-column and --end-column, or none"
                raise self.refuse(f"{self.names[start]} has no end", fix)
            return [Times(start, lengths[0], *unit, is_length=True)]
        if ends and not times:
            raise self.refuse("there is an end without a start", "give --start-column and --end-column")
        return times

    def _takes_given_label(self, roles: Roles) -> bool:
        if self.choices.label == FOLDER and FOLDER not in self.names:
            roles.label_is_folder = True
        elif self.choices.label:
            self._set_label(roles, self.resolve(self.choices.label, "--label-column"))
        return self.choices.label is not None

    def _set_label(self, roles: Roles, column: int) -> None:
        """Take a column of labels: of several a cell if there are lists, or separators and it is called labels."""
        cells = self.cells(column)
        if any(isinstance(cell, dict) for cell in cells):
            raise self.refuse(f"{self.names[column]} holds objects, not labels", GIVE_LABEL)
        if self.choices.label is None and self.is_number(column) and not self.is_whole(column):
            raise self.refuse(f"{self.names[column]} holds fractions, not classes", GIVE_LABEL)
        lists = [parse_list(cell) is not None for cell in cells]
        marked = (TIMED.match(str(cell)) or re.search("[|;,]", str(cell)) for cell in cells)
        texts = self.texts(column)
        has_numbers = all(map(NUMBERS.fullmatch, texts)) and any(" " in text for text in texts)  # mmaction2's
        if has_numbers and any(self.finder.count_frames(to_path(cell)) for cell in self.cells(roles.path)):
            raise self.refuse("its folders have several labels behind the number of frames", "give CSV or JSON")
        has_lists = any(lists) if self.keys[column] else all(lists) or has_numbers
        roles.label, roles.is_multiple = column, has_lists or (self.keys[column] in MULTIPLE and any(marked))

    def _merge(self, columns: list[int]) -> list[int]:
        """Keep one of columns that say the same, and are called alike or are names and their numbers: the names."""
        kept: list[int] = []
        for n in sorted(columns, key=self.is_whole):
            for other in kept:
                is_number_of = self.is_whole(n) and not self.is_whole(other)
                is_alike = self.keys[n][:4] == self.keys[other][:4] != ""
                if (is_number_of or is_alike) and self._say_the_same(n, other):
                    break
            else:
                kept.append(n)
        return sorted(kept)

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

    def _choose_by_content(self, roles: Roles) -> None:
        """Choose the label among columns without names: what is left when all else has been explained."""
        taken = {roles.path, *(n for times in roles.times for n in times[:2])}
        free = [n for n in range(len(self.names)) if n not in taken and self.cells(n)]
        free = [n for n in free if not (n < roles.path and self._counts_rows(n))]
        groups = [n for n in free if {text.lower() for text in self.texts(n)} <= GROUPS.keys()]
        roles.subset = groups[0] if groups else None
        free = [n for n in free if n not in groups]
        if self.choices.unlabeled or self._takes_given_label(roles):
            roles.unused = [n for n in free if n != roles.label]
            return
        numbers, texts = [n for n in free if self.is_number(n)], [n for n in free if not self.is_number(n)]
        fractions = [n for n in numbers if not self.is_whole(n)]
        if len(fractions) >= 4 and not texts:
            fix = "only labels of videos and segments are read"
            raise self.refuse("it names boxes of persons at moments, as AVA's lists do", fix)
        if self._choose_published(roles, free):
            return
        if not self.choices.start and (pair := self._find_times(numbers)):
            first, second = pair
            raise self.refuse(
                f"columns {first + 1} and {second + 1} may be the start and the end of segments",
                f"give --start-column {first + 1} --end-column {second + 1}, or --start-column none",
            )
        whole = [n for n in numbers if n not in fractions]
        candidates = self._merge([*texts, *whole]) if len(texts) == 1 == len(whole) else texts or whole
        if len(candidates) == 1:
            self._set_label(roles, candidates[0])
            roles.unused = [n for n in free if n != roles.label]
        elif candidates or fractions:
            names = " and ".join(self.names[n] for n in candidates or fractions)
            says = "say" if len(candidates or fractions) > 1 else "says"
            raise self.refuse(f"it has no header, and what {names} {says} is not clear", GIVE_LABEL)

    def _choose_published(self, roles: Roles, free: list[int]) -> bool:
        """Know the layouts of published lists; return whether this is one."""
        columns = [roles.path, *free]
        for layout in LAYOUTS.values():
            kinds = layout.split()
            if len(kinds) == len(columns) and columns == sorted(columns) and all(map(self._holds, kinds, columns)):
                break
        else:
            return False
        found = dict(zip(kinds, columns, strict=True))
        roles.label = found.get("label", found.get("name"))
        roles.unused = [column for kind, column in found.items() if kind == "num_frames"]
        if "start" in found:
            # VideoMAEv2's starts are numbers of pictures, from 1, and 0 for whole videos; mmaction2's are offsets.
            starts = {
                parse_time(row[found["start"]]) for row, _ in self._list_frame_folders() if len(row) == len(columns)
            }
            is_numbered = "frames_from_there" in found and 0 not in starts
            roles.times = [Times(found["start"], columns[2], in_frames=True, is_length=True, first=int(is_numbered))]
        elif "second" in found:
            roles.times = [Times(found["second"], None, length=VGGSOUND_S)]
        elif (match := HMDB51.fullmatch(self.table.where)) and "split_code" in found:
            roles.subset, roles.subset_codes = found["split_code"], {"1": "train", "2": "test", "0": "neither"}
            roles.label_of_all = match[1]
        return True

    def _holds(self, kind: str, column: int) -> bool:
        """Whether a column may be what a layout says of it."""
        if kind in ("path", "youtube_id"):
            return kind == "path" or all(map(YOUTUBE_ID.fullmatch, self.texts(column) or [""]))
        if kind == "name" or not self.is_whole(column):
            return kind == "name" and not self.is_number(column)
        values = [int(float(text)) for text in self.texts(column)]
        if kind in ("num_frames", "frames_from_there"):
            return self._counts_frames(column, column - 1 if kind == "frames_from_there" else None)
        checks = {
            "split_code": {*values} <= {0, 1, 2} and HMDB51.fullmatch(self.table.where) is not None,
            "length": all(value == -1 or value > 0 for value in values),
            "all": {*values} == {-1},
            "start": min(values) >= 0,
        }
        return checks.get(kind, True)

    def _counts_frames(self, column: int, start_column: int | None) -> bool:
        """Whether folders of frames have as many as a column says, or as many from a start on."""
        known = []
        for row, count in self._list_frame_folders():
            number = parse_time(row[column]) if len(row) > column else None
            start = 0.0 if start_column is None else parse_time(row[start_column]) or 0.0
            if number is not None:
                known.append(start + number <= count + 1 and (start_column is not None or number >= count - 1))
        return bool(known) and all(known)

    def _list_frame_folders(self) -> list[tuple[Row, int]]:
        """Return the rows of folders of frames, with the number of these."""
        rows = [(row, self.finder.count_frames(to_path(row[self.path]))) for row in self.sample if len(row) > self.path]
        return [(row, count) for row, count in rows if count]

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


def get_unit(key: str) -> tuple[float, bool]:
    """Return (seconds or frames per unit, whether it is frames) of a column of times."""
    if "frame" in key or key.endswith(("idx", "index")):
        return 1, True
    return (0.001 if key.endswith(("ms", "msec")) else 1), False
