"""Read lists of videos: a row becomes an item, and `describe` says how a list was read.

Nothing in a list is ignored unless somebody said so: --columns, or the format that a list has.
Other lists are shown, with the readings that are proposed, and not read.
"""

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from adamae.common.commands import command_line, repeat_command
from adamae.common.errors import InputError, QuestionError
from adamae.common.locations import is_remote
from adamae.common.logging import format_count, printable
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs import cells, formats
from adamae.shard_tools.inputs.cells import Row, to_text
from adamae.shard_tools.inputs.class_folders import GROUPS, choose_subset, get_folder_label
from adamae.shard_tools.inputs.classes import is_id
from adamae.shard_tools.inputs.files import Finder
from adamae.shard_tools.inputs.folders import KINDS, classify_name, has_video_extension
from adamae.shard_tools.inputs.formats import Format
from adamae.shard_tools.inputs.item import Item, ListOptions
from adamae.shard_tools.inputs.location import ParquetCell
from adamae.shard_tools.inputs.proposal import Proposer, find_doubt
from adamae.shard_tools.inputs.question import Preview, describe_columns
from adamae.shard_tools.inputs.reading import FIELDS, IGNORED, MARKS, NUM_NAMED, Reading
from adamae.shard_tools.inputs.table_reader import EXTRA, Table, choose_table, list_tables

# A folder is taken for the root of a list's paths if this fraction of the sampled rows is there.
MIN_FOUND = 0.9
# The number of characters of a row that a message quotes.
MAX_NAME = 100


class ListReader:
    """Reads one list; call `describe` after all items of `read` were taken.

    Raise QuestionError if the list has no published format and the options do not name its columns.
    """

    def __init__(self, path: Path, options: ListOptions, where: str) -> None:
        self.where = where
        self.options = options
        roots = [path.parent, path.parent.parent, Path()]
        if options.root:
            roots = [Path(options.root)]
            if not roots[0].is_dir():
                fix = "give the one that the list's paths are relative to"
                raise InputError(f"--root {options.root} is no folder: {fix}")
        self.finder, self.table = self._find_root(
            list_tables(path, where), list(dict.fromkeys(roots))
        )
        if not self.table.sample:
            raise InputError(f"{where} has no rows but its header")
        # The number of rows by label, if a cell is one label, and by split.
        self.num_labels = Counter[str]()
        self.num_splits = Counter[str]()
        self.num_rows = 0
        self.num_left_out = 0
        # Parsed cells are cached: 10 million rows have a few hundred different labels.
        self._parse_labels = lru_cache(maxsize=100_000)(cells.read_labels)
        self.constant_label: str | None = None
        # The number of the first frame in columns of frames.
        self.first_frame = 0
        self.format = formats.AS_GIVEN
        self.format, self.reading = self._choose_reading()
        if self.format.is_numbered:
            self.first_frame = self._find_first_frame()
        match = re.fullmatch(self.format.list_name, where)
        if match and match.re.groups:
            self.constant_label = match[1]
        self.subset = options.subset
        if options.is_split:
            splits = {self._read_split(row) for row in self._list_rows(self.table.sample)}
            if self.subset not in splits:
                self.subset = None
        elif self.subset not in (None, "all") and "split" not in self.reading.columns:
            what = f"{where} has no column of splits, and --subset {self.subset} needs one"
            raise InputError(f"{what}: name it (--columns …,split=NAME)")
        names = {self._read_name(row) for row in self._list_rows(self.table.sample)}
        urls = {name for name in names if is_remote(name)}
        # A URL stands for a downloaded file of its last part only if no two URLs end in the same
        # part, as …/1/video.mp4 and …/2/video.mp4 do.
        self.finder.finds_urls = len({url.rpartition("/")[2] for url in urls}) == len(urls)

    def _find_root(self, tables: list[Table], roots: list[Path]) -> tuple[Finder, Table]:
        """Return a finder below the first root where most of the sampled rows are files.

        If there is no such root, take the one with the most files, and index it: this walks through
        all of its folders.
        """
        pairs = []
        for root in roots:
            finder = Finder(root, self.options.suffix)
            table = choose_table(tables, finder.has)
            if table.num_found >= MIN_FOUND * table.num_scored:
                return finder, table
            pairs.append((finder, table))
        finder, table = max(pairs, key=lambda pair: pair[1].num_found)
        finder.index()
        indexed_table = choose_table(tables, finder.has)
        return finder, max(table, indexed_table, key=lambda table: table.num_found)

    def _choose_reading(self) -> tuple[Format, Reading]:
        """Return what the options say, or else the format that the list has.

        Raise QuestionError if it has none, or a doubtful one.
        """
        names = self.table.names
        if self.options.columns is not None:
            reading = Reading.parse(self.options.columns).resolve(names, self.where)
            return formats.AS_GIVEN, reading
        if self.options.format is not None:
            return self._force_format(self.options.format)
        entry, readings = self._match_formats()
        if entry.error:
            fix = "write a list of the videos, or of segments in seconds, with their labels"
            raise InputError(f"{self.where}: {entry.error}: {fix} (path,start,end,label)")
        if len(readings) == 1 and entry in formats.PUBLISHED:
            return entry, readings[0]
        # The column of the contract is one of videos, whatever is found of these.
        if entry is not formats.CONTRACT or not readings:
            self._require_videos()
        if len(readings) == 1:
            doubts = self._find_doubts(readings[0])
            if doubts:
                raise self._ask("; ".join(doubts), [])
            return entry, readings[0]
        if readings:
            why = f"it is a list of {entry.name}, of which several columns may be the label"
        else:
            roles = ", ".join(("path", *formats.CONTRACT_ROLES))
            why = f"it is no published format and has other columns than {roles}"
        raise self._ask(why, readings)

    def _force_format(self, name: str) -> tuple[Format, Reading]:
        entries = {}
        for entry in (*formats.FORMATS, *formats.WITHOUT_HEADER):
            if not entry.error:
                entries[entry.name] = entry
        if name not in entries:
            nearest = difflib.get_close_matches(name, entries, 1, cutoff=0.3) or entries
            raise InputError(f"--format {name} is not known: did you mean {', '.join(nearest)}?")
        entry = entries[name]
        reading = Reading.parse(entry.readings[0])
        reading = replace(reading, rest=reading.rest or FIELDS)
        return entry, reading.resolve(self.table.names, self.where)

    def _match_formats(self) -> tuple[Format, list[Reading]]:
        """Return the format that the list has, with its readings; none if it has none."""
        table = self.table
        if table.is_named:
            for entry in formats.FORMATS:
                readings = entry.match_header(table.names)
                if readings:
                    return entry, readings
            reading = formats.match_contract(table.names)
            return formats.CONTRACT, [reading] if reading else []
        num_frames = [0] * len(table.sample)
        if len(table.names) > 1:
            paths = (cells.to_path(row.get(table.path)) for row in table.sample)
            num_frames = [self.finder.count_frames(path) for path in paths]
        for entry in formats.WITHOUT_HEADER:
            has_name = re.fullmatch(entry.list_name, self.where)
            if has_name and entry.match_rows(table.sample, table.path, num_frames):
                return entry, [Reading.parse(entry.readings[0])]
        return formats.CONTRACT, []

    def _require_videos(self) -> None:
        """Raise InputError if no cell names a file, or could by its extension."""
        table = self.table
        if not table.num_found and not table.num_similar:
            names = ", ".join(map(printable, table.names[:NUM_NAMED]))
            first = printable(", ".join(map(to_text, table.sample[0].values())))
            what = f"{self.where} ({table.form}) names no video below {self.finder.root}"
            fix = "give --root or --suffix, or a list with a column of paths"
            raise InputError(f"{what}; its columns are {names} (the first row: {first}): {fix}")

    def _find_first_frame(self) -> int:
        """Return 1 if the list counts the frames of folders from 1, else 0."""
        starts = [
            cells.parse_time(self.reading.get("start", row))
            for row in self.table.sample
            if self.finder.count_frames(self._read_name(row))
        ]
        return int(bool(starts) and 0 not in starts)

    @property
    def _has_labels(self) -> bool:
        """Whether labels are read from a column."""
        return not (self.options.unlabeled or self.options.label_folder)

    def _find_doubts(self, reading: Reading) -> list[str]:
        """Return the reasons to ask before a list of paths, or of paths and labels, is taken."""
        reasons = []
        name = reading.columns.get("label")
        if name and self._has_labels:
            doubt = find_doubt(self.table.cells[name], self.finder.has)
            if doubt:
                reasons.append(f"{self.table.title(name)} {doubt.reason}")
        preview = self._preview(reading)
        if preview.num_differing:
            reasons.append(preview.describe_differing())
        return reasons

    def _preview(self, reading: Reading) -> Preview:
        """Return what a reading makes of the sampled rows."""
        self.reading = reading
        items = list(map(self._make_item, self._list_rows(self.table.sample)))
        self.num_labels.clear()
        return Preview(items)

    def _ask(self, why: str, readings: list[Reading]) -> QuestionError:
        """Return the question about a list, with these readings or those that are proposed."""
        table = self.table
        proposer = Proposer(table, self.finder.has)
        readings = readings or proposer.list_readings(self._has_labels)
        readings = sorted(readings, key=self._count_unusable)
        settled = list(dict.fromkeys(self._settle(reading) for reading in readings))
        lines = describe_columns(table, settled[0])
        lines += self._preview(settled[0]).describe()
        lines += [f"  {remark}" for remark in proposer.list_remarks()]
        if settled[0] != readings[0]:
            lines.append(f"  {self._preview(readings[0]).describe_differing()}")
        lines += [f"  {self._repeat_command(str(reading))}" for reading in settled]
        what = f"{self.where} ({table.form}) is shown before it is read, as {why}"
        return QuestionError(what, lines)

    def _count_unusable(self, reading: Reading) -> int:
        return self._preview(reading).num_unusable

    def _settle(self, reading: Reading) -> Reading:
        """Return a reading without what rows of one whole video contradict each other in."""
        preview = self._preview(reading)
        if preview.num_conflicts:
            reading = reading.drop("label")
        if preview.num_differing:
            reading = replace(reading.drop("caption", "group"), rest=IGNORED)
        return reading

    def _repeat_command(self, columns: str) -> str:
        if self.options.takes_columns:
            return repeat_command("--columns", columns)
        return command_line("shards", self.where, "OUTPUT", "--columns", columns)

    def read(self) -> Iterator[Item]:
        """Yield an item for each row that is in the subset and not left out.

        Raise InputError at the end if it is not clear which subset to take, or if some labels are
        numbers and others names.
        """
        for row in self._list_rows(self.table.read_rows()):
            self.num_rows += 1
            if self._is_left_out(row):
                self.num_left_out += 1
            elif self._is_in_subset(row):
                yield self._make_item(row)
        # Subsets are made for training with labels. Without labels, features or figures may be
        # made of all rows.
        subset = self.subset or ("all" if self.options.unlabeled else None)
        groups = dict(zip(self._list_splits(), sorted(self.num_splits), strict=True))
        choose_subset(groups, subset, self.where)
        self._require_equal_labels()

    def _list_rows(self, records: Iterable[Row]) -> Iterator[Row]:
        """Yield a row for each segment or video that a row, or an object of JSON, may hold."""
        lists = self.reading.choose_lists(self.table.lists)
        is_flat = not lists and not any("." in name for name in self.table.names)
        for record in records:
            for row in [record] if is_flat else cells.unfold(record, lists):
                yield from self.reading.list_parts(row)

    def _is_left_out(self, row: Row) -> bool:
        if self.format.left_out is None:
            return False
        column, mark, _ = self.format.left_out
        return to_text(row.get(column)) == mark

    def _is_in_subset(self, row: Row) -> bool:
        """Return whether a row is of the subset to take, and count it."""
        if "split" not in self.reading.columns:
            return True
        split = self._read_split(row)
        self.num_splits[split] += 1
        return self.subset in (None, "all", split)

    def _read_split(self, row: Row) -> str:
        """Return the split of a row: train, val or test, or else the text of its cell."""
        text = cells.read_label(self.reading.get("split", row)) or "no split"
        return dict(self.format.splits).get(text) or GROUPS.get(text.lower(), text)

    def _reject(self, row: Row, problem: str) -> Item:
        text = ",".join(map(to_text, row.values()))[:MAX_NAME]
        return Item(f"{self.where}, row {self.num_rows}: {text}", "", problem=problem)

    def _read_name(self, row: Row) -> str:
        """Return the name of a row's video, with the suffix; "" if the row has no name."""
        name = cells.to_path(self.reading.get("path", row))
        return name and name + self.options.suffix

    def _make_item(self, row: Row) -> Item:
        num_extra = self._count_extra(row)
        if num_extra:
            what = f"its row has {num_extra} cells more than there are columns"
            return self._reject(row, f"{what}: quote the one that holds a separator")
        name = self._read_name(row)
        if not name:
            return self._reject(row, "this row names no video")
        labels = self._read_labels(row)
        fields = self.reading.dump_fields(row, self.table.title)
        first = self.first_frame
        segment, problem = self.reading.read_segment(row, first, self.format.seconds)
        cell = self.reading.get("path", row)
        if isinstance(cell, ParquetCell):
            return Item(cell.name, cell, labels, 0, problem, str(segment or ""), fields)
        endings = _list_endings(segment)
        path, ending = self.finder.find(name, endings)
        # A file that is called by its times, in the folder or in the row already, is cut to them.
        if ending or os.path.splitext(name)[0].endswith(endings[1:3]):
            segment = None
        if path is None and is_remote(name):
            if cells.HALF_A_PAIR.search(name):
                problem = "no file can have its name"
            return Item(name, name, labels, 0, problem, str(segment or ""), fields)
        source, location = self.finder.locate(path or name)
        if path is None:
            segment = None
            problem = self.finder.explain(name)
        else:
            problem = problem or _explain_kind(path)
        if self.options.label_folder:
            labels = get_folder_label(source.rpartition("/")[0], self.options.label_folder)
        return Item(source, location, labels, 0, problem, str(segment or ""), fields)

    def _count_extra(self, row: Row) -> int:
        """Return how many cells of a row are in no column that the reading accounts for."""
        if EXTRA in row:
            return len(row[EXTRA])
        if self.reading.rest:
            return 0
        return max(0, len(row) - len(self.reading.columns))

    def _read_labels(self, row: Row) -> tuple[str, ...] | None:
        if self.constant_label is not None:
            return (self.constant_label,)
        cell = self.reading.get("label", row)
        mark = MARKS.get(self.reading.units.get("label", ""))
        # Lists of JSON are not hashable.
        read_labels = self._parse_labels if isinstance(cell, str) else cells.read_labels
        labels = read_labels(cell, mark)
        # Class ids of Hugging Face and pseudo-labels are -1 where there is no label.
        if labels == ("-1",):
            labels = None
        if labels and self.format.removed:
            labels = tuple(re.sub(self.format.removed, "", label) for label in labels)
        if labels and len(labels) == 1:
            self.num_labels[labels[0]] += 1
        return labels

    def _require_equal_labels(self) -> None:
        """Raise InputError if some labels are numbers and others names.

        Columns that the user names, and a label map, turn this off.
        """
        is_decided = self.options.columns is not None or self.options.has_label_map
        numbers = Counter({label: n for label, n in self.num_labels.items() if is_id(label)})
        names = self.num_labels - numbers
        if is_decided or not numbers or not names:
            return
        counts = f"a number in {_count_rows(numbers)} and a name in {_count_rows(names)}"
        fix = f"write all alike, or give --label-map, or --columns {self.reading}"
        raise InputError(f"{self.where}: {self.reading.columns['label']} is {counts}: {fix}")

    def _list_splits(self) -> list[str]:
        return [f"{printable(name)} ({count})" for name, count in sorted(self.num_splits.items())]

    def describe(self) -> str:
        """Return a sentence that says how the list was read, and which format it has."""
        parts = []
        for role, name in self.reading.columns.items():
            parts.append(f"{self.reading.describe(role)} = {printable(self.table.title(name))}")
        if self.constant_label is not None:
            parts.append(f"label = {self.constant_label}")
        elif self.options.label_folder:
            parts.append(f"label = folder {self.options.label_folder} of the path")
        elif "label" not in self.reading.columns:
            parts.append("no labels")
        if self.num_splits:
            splits = ", ".join(self._list_splits())
            parts.append(f"splits: {splits}; taken: {self.subset or 'all'}")
        if self.format.left_out:
            rows = format_count(self.num_left_out, "row")
            parts.append(f"{rows} of {self.format.left_out[2]} left out")
        parts.append(f"format: {self.format.name}; below {self.finder.root}")
        rows = format_count(self.num_rows, "row")
        return f"{rows} in {self.where} ({self.table.form}): {', '.join(parts)}"


def _list_endings(segment: Segment | None) -> tuple[str, ...]:
    """Return what the name of a row's file may end in, where it is cut to the segment.

    Kinetics' files are <id>_000010_000020.mp4, those of other datasets <id>_10_20.mp4, and
    VGGSound's <id>_000010.mp4, which does not tell the end: whole videos may be called so.
    """
    if segment is None:
        return ("",)
    start = f"_{segment.start:06.0f}"
    whole_seconds = f"{start}_{segment.end:06.0f}"
    return "", whole_seconds, f"_{segment.start:g}_{segment.end:g}", start


def _explain_kind(path: str) -> str | None:
    """Return why the name of a file shows that it is not a video; None if it may be one."""
    if has_video_extension(path):
        return None
    kind = classify_name(path.rpartition("/")[2])
    # A file with another name is examined later, by its first bytes.
    return f"by its name it is one of the {kind}" if kind in KINDS else None


def _count_rows(counts: Counter[str]) -> str:
    return f"{format_count(counts.total(), 'row')} ({printable(next(iter(counts)))})"
