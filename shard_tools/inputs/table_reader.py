"""Read a list in any common file format as rows of cells; the file's bytes show the format.

`csv.Sniffer` misses the separator of 1 of 26 public lists: it does not know that paths may hold
spaces, nor which files exist. Therefore this module tries all ways to split a line, and takes
the one under which the most rows name a video.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, takewhile
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.shard_tools.inputs.cells import (
    WHOLE,
    Row,
    is_list_of_objects,
    is_missing,
    list_cells,
    parse_nested,
)
from adamae.shard_tools.inputs.folders import has_video_extension
from adamae.shard_tools.inputs.formats import COLUMN_NAMES
from adamae.shard_tools.inputs.location import ParquetCell, import_pyarrow

# The most characters of a cell: a quote that is never closed must not swallow the rest of the list.
MAX_CELL = 2**20
# The number of bytes at the beginning of a file that are searched for its encoding.
NUM_BYTES = 2**20
SAMPLE_ROWS = 1000
# The characters of a value that a message quotes.
MAX_EXAMPLE = 80
# About how many of the sampled rows are searched for names of files.
NUM_SCORED = 24
# The most cells of a line that is split at spaces.
MAX_WORDS = 9
SEPARATORS = {
    "\t": "tabs",
    ";": "semicolons",
    ",": "commas",
    "|": "bars",
    ":": "colons",
    "~": "tildes",
    "^": "carets",
}
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z",
}
# Control characters that no text file holds.
CONTROL = re.compile("[\0-\x08\x0b\x0e-\x1a\x1f]")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
JSON_LINES_SUFFIXES = JSON_SUFFIXES[1:]
# An object of JSON with more keys has a video a key.
MAX_WRAPPER_KEYS = 20
# Hugging Face's types of columns that may hold videos; other types are pictures and sounds.
VIDEO_TYPES = (None, "Value", "Video")
# The key of what a row has beyond its columns.
EXTRA = "cells without a column"
FORMS = "give a list as CSV, JSON, JSON lines or Parquet"

# Returns whether a cell names a video that exists.
IsFile = Callable[[str], bool]
ReadLines = Callable[[], Iterator[str]]
ReadRows = Callable[[], Iterator[Row]]
# Splits lines into cells; the second argument names the list in messages.
Split = Callable[[Iterable[str], str], Iterator[list[str]]]


class Table(NamedTuple):
    """One way to read a list, with counts by which `choose_table` compares the ways."""

    where: str
    # How the list is read, for messages: "UTF-8, commas, header".
    form: str
    # Returns a new iterator over all rows, from the first; the rows are not held in memory.
    read_rows: ReadRows
    sample: list[Row]
    # The sampled cells of each column that are not missing, and the lists of objects that it lies
    # in; columns are called as list_cells does.
    cells: dict[str, list[Any]]
    lists: dict[str, tuple[str, ...]]
    # The cells of each line if it is text whose header, if any, is still a row.
    read_cells: Callable[[], Iterator[list[str]]] | None = None
    # Whether the columns have names of their own, not the numbers "1", "2", …
    is_named: bool = True
    # The fraction of the sampled rows that have the most common number of cells.
    fraction: float = 1
    # The column that names the most videos.
    path: str = ""
    # The number of cells of this column that name files that exist, or hold videos.
    num_found: int = 0
    # The number of names that some published list has, too.
    num_published: int = 0
    # The number of cells of this column with a video's extension or a URL.
    num_similar: int = 0
    # The number of rows that were searched for these counts.
    num_scored: int = 1

    @property
    def rank(self) -> tuple[int, int, int, float]:
        return self.num_found, self.num_published, self.num_similar, self.fraction

    @property
    def names(self) -> list[str]:
        return list(self.cells)

    def title(self, name: str) -> str:
        """Return what messages and fields call a column."""
        return name if self.is_named else f"column {name}"


def list_tables(path: Path, where: str) -> list[Table]:
    """List the ways in which a list may be read. Raise InputError if there is none."""
    require_uncompressed(path)
    with path.open("rb") as file:
        head = file.read(NUM_BYTES)
    if head.startswith(b"PAR1"):
        return [_read_parquet(path, where)]
    encoding = _find_encoding(head, where)
    read_lines = partial(_read_lines, path, encoding, where)
    first = next((line for line in read_lines() if line.strip()), "").strip()
    tables = []
    if first.startswith(("[", "{")):
        tables = _read_json(path, where, read_lines)
    if not tables:
        tables = list(_list_splits(read_lines, where, encoding.removesuffix("-sig").upper()))
    if not tables:
        raise InputError(f"{where} is empty")
    return tables


def _find_encoding(head: bytes, where: str) -> str:
    """Return the encoding of a text that begins with `head`. Raise InputError if it is binary."""
    encoding = json.detect_encoding(head)
    text = head.decode(encoding, "replace")
    if len(CONTROL.findall(text)) > len(text) // 20 + 1:
        raise InputError(f"{where} is binary: {FORMS}")
    return encoding


def choose_table(tables: Iterable[Table], is_file: IsFile) -> Table:
    """Return the table under which the most rows name a video; `Table.rank` decides between equals.

    If its first row is a header, the header becomes the names of its columns.
    """
    table = max((_score(table, is_file) for table in tables), key=lambda table: table.rank)
    if table.read_cells:
        if _has_header(table, is_file):
            table = _apply_header(table)
        else:
            table = table._replace(form=f"{table.form}, no header")
    nested: set[str] = set()
    for row in table.sample:
        nested.update(name for name, cell in row.items() if parse_nested(cell) is not cell)
    if nested:
        # Other columns are left alone, since each look at a cell costs time in every row.
        read_rows = partial(_parse_cells, table.read_rows, nested)
        sample = list(islice(read_rows(), SAMPLE_ROWS))
        table = table._replace(read_rows=read_rows, sample=sample)
    return _score(table, is_file)


def _parse_cells(read_rows: ReadRows, names: set[str]) -> Iterator[Row]:
    """Yield rows in which the texts of lists and objects are these."""
    for row in read_rows():
        yield {name: parse_nested(cell) if name in names else cell for name, cell in row.items()}


def _score(table: Table, is_file: IsFile) -> Table:
    """Find the names of the columns, and the column that names videos."""
    cells: dict[str, list[Any]] = {}
    lists: dict[str, tuple[str, ...]] = {}
    num_found = Counter[str]()
    num_similar = Counter[str]()
    step = max(1, len(table.sample) // NUM_SCORED)
    for number, row in enumerate(table.sample):
        for name, cell, inner in list_cells(row):
            if name == EXTRA:
                continue
            lists[name] = inner
            values = cells.setdefault(name, [])
            if not is_missing(cell):
                values.append(cell)
            if number % step:
                continue
            for part in cell if isinstance(cell, list) else [cell]:
                if isinstance(part, ParquetCell):
                    num_found[name] += 1
                elif isinstance(part, (str, int)):
                    text = str(part).strip()
                    num_found[name] += is_file(text)
                    num_similar[name] += is_like_path(text)
    # The first of several equal columns is taken.
    path = max(cells, key=lambda name: (num_found[name], num_similar[name]), default="")
    header = cells if table.is_named else map(_to_name, table.sample[0].values())
    return table._replace(
        cells=cells,
        lists=lists,
        path=path,
        num_found=num_found[path],
        num_published=len(COLUMN_NAMES.intersection(map(str.lower, header))),
        num_similar=num_similar[path],
        num_scored=len(table.sample[::step]),
    )


def is_like_path(text: str) -> bool:
    """Return whether a text has the extension of a video, or is a URL."""
    # No URL holds a space: behind one stands another column, such as the label.
    is_url = is_remote(text) and " " not in text
    return is_url or has_video_extension(text)


def _to_name(cell: Any) -> str:
    return str(cell).strip().lstrip("#").strip()


def _has_header(table: Table, is_file: IsFile) -> bool:
    """Return whether the first row of a table holds the names of its columns."""
    path = _to_name(table.sample[0].get(table.path, ""))
    if is_file(path) or has_video_extension(path) or "/" in path:
        return False
    names = list(map(_to_name, table.sample[0].values()))
    # The first row of pandas' tables is ",path,label" or ",0,1".
    if (len(names) > 1 and names[0] == "") or names[:2] == ["0", "1"]:
        return True
    # Columns without a name, which spreadsheets add at the end, are empty.
    filled = list(filter(None, names))
    if WHOLE.fullmatch(path) or len(set(filled)) < len(filled):
        return False
    all_others_are_files = 2 <= table.num_found == table.num_scored - 1
    return all_others_are_files or path.lower() in COLUMN_NAMES or table.num_published >= 2


def _apply_header(table: Table) -> Table:
    """Return a table whose columns are called as its first row says."""
    assert table.read_cells is not None
    names = list(map(_to_name, table.sample[0].values()))
    for number, name in enumerate(names):
        cells = [row.get(str(number + 1), "") for row in table.sample[1:]]
        # pandas writes the numbers of rows first, and a separator too many ends in no cells.
        is_index = number == 0 and cells == list(map(str, range(len(cells))))
        if not name and any(cells) and not is_index:
            names[number] = f"column {number + 1}"
    header_names = list(filter(None, names))
    is_named = header_names != [str(number) for number in range(len(header_names))]
    if not is_named:
        # pandas counts columns without names from 0.
        names = [name and str(int(name) + 1) for name in names]
    read_rows = partial(_read_rows, table.read_cells, names, 1)
    return table._replace(
        form=f"{table.form}, header",
        read_rows=read_rows,
        sample=list(islice(read_rows(), SAMPLE_ROWS)),
        is_named=is_named,
    )


def _read_rows(
    read_cells: Callable[[], Iterator[list[str]]], names: Sequence[str], first: int
) -> Iterator[Row]:
    """Yield rows from the row `first` on; cells of columns without a name are left out."""
    width = len(names)
    has_unnamed = "" in names
    for cells in islice(read_cells(), first, None):
        row: dict[str, Any] = dict(zip(names, cells, strict=False))
        if has_unnamed:
            del row[""]
        if len(cells) > width and any(cells[width:]):
            row[EXTRA] = cells[width:]
        yield row


def require_uncompressed(path: Path) -> None:
    """Raise InputError if a file is a workbook or compressed."""
    with path.open("rb") as file:
        head = file.read(2**16)
    is_zipped_workbook = head.startswith(b"PK") and (b"xl/" in head or b"opendocument" in head)
    if head.startswith(b"\xd0\xcf\x11\xe0") or is_zipped_workbook:
        raise InputError(f"{path} is a workbook (Excel or OpenDocument): save its sheet as CSV")
    for magic, name in COMPRESSED.items():
        if head.startswith(magic):
            fix = "unpack it, only plain tars and lists are read"
            raise InputError(f"{path} is compressed ({name}): {fix}")


def _read_lines(path: Path, encoding: str, where: str) -> Iterator[str]:
    # File names may hold any byte. Bytes that are not UTF-8 are read as surrogates, from which
    # Python makes the same bytes when it opens the file.
    errors = "strict"
    if encoding.startswith("utf-8"):
        errors = "surrogateescape"
    try:
        with path.open(encoding=encoding, errors=errors, newline="") as file:
            yield from file
    except UnicodeDecodeError as error:
        what = f"is binary, or no text in {encoding.upper()} ({error.reason})"
        raise InputError(f"{where} {what}: {FORMS}") from error


def _split_csv(separator: str, lines: Iterable[str], where: str) -> Iterator[list[str]]:
    """Yield the cells of each line; skip empty lines. Raise InputError if a quote is not closed."""
    csv.field_size_limit(MAX_CELL)
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    line_number = 0
    try:
        for row in reader:
            line_number = reader.line_num
            if any(row):
                yield row
    except csv.Error as error:
        what = f"line {line_number + 1}, cannot be split at {SEPARATORS[separator]} ({error})"
        raise InputError(f"{where}, {what}: a quote there is not closed, or not doubled") from error


def _split_lines(
    split: Callable[[str], list[str]], lines: Iterable[str], where: str
) -> Iterator[list[str]]:
    for line in lines:
        text = line.strip()
        if text:
            yield [cell.strip('"') for cell in split(text)]


class Splitter(NamedTuple):
    """A way to split lines, and the number of cells that most lines must give (None: 2 or more)."""

    name: str
    num_cells: int | None
    split: Split


SPLITTERS = [
    # Charades-STA writes: AO8RW 0.0 6.9##a person runs.
    Splitter("##", 4, partial(_split_lines, re.compile(r"##|\s+(?=.*##)").split)),
    *(Splitter(name, None, partial(_split_csv, mark)) for mark, name in SEPARATORS.items()),
    Splitter("one path a line", 1, partial(_split_lines, methodcaller("split", None, 0))),
    # Paths may hold spaces, and the numbers behind paths do not: these split from the right.
    *(
        Splitter("spaces", n + 1, partial(_split_lines, methodcaller("rsplit", None, n)))
        for n in range(1, MAX_WORDS)
    ),
    # Labels may hold spaces, behind paths without spaces: this splits at the first one.
    Splitter("spaces", 2, partial(_split_lines, methodcaller("split", None, 1))),
]


def _list_splits(read_lines: ReadLines, where: str, encoding: str) -> Iterator[Table]:
    """Yield a table for each splitter that gives at least half of the rows the same width."""
    num_skipped = _count_remarks(read_lines())
    lines = list(islice(read_lines(), num_skipped, num_skipped + SAMPLE_ROWS))
    has_tabs = False
    for name, num_cells, split in SPLITTERS:
        rows: list[list[str]] = []
        # A row that cannot be split ends the sample here; `read_rows` raises the error later.
        with suppress(InputError):
            rows.extend(split(lines, where))
        if not rows:
            continue
        ((width, count),) = Counter(map(len, rows)).most_common(1)
        is_expected = width > 1 if num_cells is None else width == num_cells
        if not is_expected or 2 * count < len(rows):
            continue
        if name == "tabs" and count == len(rows):
            has_tabs = True
        elif name == "spaces" and has_tabs:
            # Names of columns, and labels, hold spaces.
            continue

        def read_cells(split: Split = split) -> Iterator[list[str]]:
            return split(islice(read_lines(), num_skipped, None), where)

        names = [str(number) for number in range(1, max(map(len, rows)) + 1)]
        is_named = name == "##"
        if is_named:
            names = ["id", "start", "end", "sentence"]
        yield Table(
            where,
            f"{encoding}, {name}",
            partial(_read_rows, read_cells, names, 0),
            [dict(zip(names, row, strict=False)) for row in rows],
            {},
            {},
            None if is_named else read_cells,
            is_named,
            count / len(rows),
        )


def _count_remarks(lines: Iterable[str]) -> int:
    """Return the number of lines before the list: "sep=;", and "# …" but for the last of them.

    The last one is the header. AudioSet's lists begin with "# Segments csv created …",
    "# num_ytids=…" and "# YTID, …".
    """
    remarks = list(takewhile(re.compile("# |sep=.$").match, map(str.strip, lines)))
    if remarks and remarks[0].startswith("sep="):
        return 1
    return max(0, len(remarks) - 1)


def _read_json(path: Path, where: str, read_lines: ReadLines) -> list[Table]:
    """List the ways to read JSON or JSON lines: objects, lists of cells, or names of videos.

    Return none if the file is neither: a list in another format may begin with a bracket. Raise
    InputError if its extension says JSON and its text cannot be read.
    """
    lines = list(islice(filter(str.strip, read_lines()), 2))
    with suppress(ValueError, RecursionError):
        json.loads(lines[0])
        if len(lines) > 1 or path.suffix in JSON_LINES_SUFFIXES:
            return [_make_table(where, "JSON lines", lambda: _parse_lines(read_lines(), where))]
    try:
        value = json.loads("".join(read_lines()))
    except (ValueError, RecursionError) as error:
        if path.suffix not in JSON_SUFFIXES:
            return []
        raise InputError(f"{where} is not a list of videos ({error})") from error
    if isinstance(value, list):
        return [_make_table(where, "JSON", lambda: iter(value))]
    return _list_object_tables(value, where)


def _list_object_tables(value: dict[str, Any], where: str) -> list[Table]:
    """List the ways to read an object: a list in it, an entry a video, or all of it as one video.

    An entry is a row with the columns `key` and `value`, or those of the object that it holds.
    Raise InputError if the object holds several lists that differ in their columns.
    """
    lists = {name: entries for name, entries in value.items() if is_list_of_objects(entries)}
    tables = []
    if len(value) <= MAX_WRAPPER_KEYS:
        if len({tuple(entries[0]) for entries in lists.values()}) > 1:
            what = f"{where} holds several lists ({', '.join(lists)})"
            raise InputError(f"{what}: give one in a file of its own")
        for name, entries in value.items():
            form = f"JSON, the entry {name}"
            if name in lists and len(lists) == 1:
                tables.append(_make_table(where, form, partial(iter, entries)))
            elif isinstance(entries, dict) and entries:
                # ActivityNet, HACS, THUMOS and COIN wrap their videos so.
                tables.append(_make_table(where, form, partial(_list_entries, entries)))
    tables.append(_make_table(where, "JSON, an object by key", partial(_list_entries, value)))
    whole = _make_table(where, "JSON, one object", lambda: iter([value]))
    # Of tables in which as many videos are found, the first is taken.
    if any(isinstance(entry, (dict, list)) for entry in value.values()):
        return [*tables, whole]
    return [whole, *tables]


def _list_entries(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key, entry in value.items():
        inner = entry if isinstance(entry, dict) else {"value": entry}
        yield {"key": key, **inner}


def _parse_lines(lines: Iterator[str], where: str) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}, line {number}, is not JSON ({error})") from error


def _read_parquet(path: Path, where: str) -> Table:
    """Read a Parquet file; class ids become class names.

    A video is a binary cell, or {bytes, path}, as Hugging Face writes it. Cells with videos become
    ParquetCells, which say where the bytes are. The bytes of other cells (pictures, sounds) are not
    read; their {bytes, path} becomes the path. Raise InputError if the file is damaged.
    """
    parquet = import_pyarrow(where)
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{where} is damaged or no Parquet ({error})") from error
    features = _list_features(file.schema_arrow.metadata or {})
    classes = _list_classes(features)
    values, packed = _list_leaves(file)
    may_be_videos = [it for it in packed if features.get(it, {}).get("_type") in VIDEO_TYPES]
    videos = {name for name in may_be_videos if _has_bytes(file, path, packed[name])}
    form = "Parquet"
    if len(videos) < len(packed):
        form += f" without the bytes of {', '.join(it for it in packed if it not in videos)}"

    def read_records() -> Iterator[dict[str, Any]]:
        number = 0
        for group in range(file.num_row_groups):
            batches = file.iter_batches(row_groups=[group], columns=values)
            records = chain.from_iterable(batch.to_pylist() for batch in batches)
            for row, record in enumerate(records):
                for name, names in classes.items():
                    # Hugging Face writes -1 for no class.
                    record[name] = names.get(record.get(name))
                for name, leaf in packed.items():
                    cell = (record.get(name) or {}).get("path")
                    if name in videos:
                        base = (cell or "video.mp4").rpartition("/")[2]
                        source = f"{path.name}/{number:06d}-{base}"
                        cell = ParquetCell(str(path.absolute()), group, row, leaf, source)
                    record[name] = cell
                yield record
                number += 1

    return _make_table(where, form, read_records)


def _list_features(metadata: dict[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """Return the features that Hugging Face writes into a file's metadata, by column."""
    info = json.loads(metadata.get(b"huggingface", "{}")).get("info", {})
    features = info.get("features", {})
    # The feature of a column of lists is itself a list; such columns hold no videos.
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}


def _list_classes(features: dict[str, dict[str, Any]]) -> dict[str, dict[Any, str]]:
    """Return the names of classes by id, for each column that holds class ids."""
    classes = {}
    for name, feature in features.items():
        if feature.get("_type") == "ClassLabel":
            classes[name] = dict(enumerate(feature["names"]))
    return classes


def _list_leaves(file: Any) -> tuple[list[str], dict[str, str]]:
    """Return the paths of the leaves that hold values, and by column those that hold bytes.

    Bytes lie in a column such as `mp4`, or in a leaf such as `video.bytes` of the column `video`.
    """
    values = []
    packed = {}
    for number in range(len(file.schema)):
        leaf = file.schema.column(number)
        name = leaf.path.removesuffix(".bytes")
        if not _is_binary(leaf):
            values.append(leaf.path)
        elif name in file.schema_arrow.names:
            packed[name] = leaf.path
    return values, packed


def _is_binary(leaf: Any) -> bool:
    """Return whether a Parquet column holds bytes that are not text."""
    return "BYTE_ARRAY" in leaf.physical_type and leaf.logical_type.type == "NONE"


def _has_bytes(file: Any, path: Path, leaf: str) -> bool:
    """Return whether the first cell of a column holds bytes; cells may have a path instead."""
    for group in range(file.num_row_groups):
        if file.metadata.row_group(group).num_rows:
            return bool(ParquetCell(str(path), group, 0, leaf, "").read())
    return False


def _make_table(where: str, form: str, read_values: Callable[[], Iterator[Any]]) -> Table:
    """Return a table with a row for each value: an object, a list of cells or a name.

    Raise InputError if there is none, or some values are objects and others are not.
    """
    is_named = isinstance(next(read_values(), None), dict)

    def to_row(value: Any) -> Row:
        if isinstance(value, dict) and is_named:
            return value
        cells = [value] if isinstance(value, str) else value
        if is_named or not isinstance(cells, list):
            example = json.dumps(value)[:MAX_EXAMPLE]
            raise InputError(f"{where} is not a list of videos: it has {example}")
        return {str(number): cell for number, cell in enumerate(cells, 1)}

    def read_rows() -> Iterator[Row]:
        return map(to_row, read_values())

    sample = list(islice(read_rows(), SAMPLE_ROWS))
    if not sample:
        raise InputError(f"{where} is not a list of videos: it has nothing")
    return Table(where, form, read_rows, sample, {}, {}, is_named=is_named)
