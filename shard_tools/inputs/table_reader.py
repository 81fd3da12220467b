"""Read a list in any common file format as rows of cells; the file's bytes show the format.

`csv.Sniffer` misses the separator of 1 of 26 public lists: it does not know that paths may hold
spaces, nor which files exist. Therefore this module tries all ways to split a line, and takes
the one under which the most rows name a video.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice, takewhile
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.shard_tools.inputs.cells import WHOLE, Row, get_cell, list_records, unfold
from adamae.shard_tools.inputs.folders import has_video_extension
from adamae.shard_tools.inputs.location import ParquetCell, import_pyarrow
from adamae.shard_tools.inputs.vocabulary import is_known

# The most characters of a cell: a quote that is never closed must not swallow the rest of the list.
MAX_CELL = 2**20
# The number of bytes at the beginning of a file that are searched for its encoding.
NUM_BYTES = 2**20
SAMPLE_ROWS = 1000
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
# Encodings by how a file begins: a byte order mark, or the zero bytes beside its first character.
ENCODINGS = {
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
    rb"[ -~]\0\0\0": "utf-32-le",
    rb"\0\0\0[ -~]": "utf-32-be",
    rb"[ -~]\0[^\0]": "utf-16-le",
    rb"\0[ -~]\0": "utf-16-be",
}
# Control characters that no text file holds.
BINARY = set(range(32)) - set(b"\t\n\r\f\x1b\x1c\x1d\x1e")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
JSON_LINES_SUFFIXES = JSON_SUFFIXES[1:]
# Hugging Face's types of columns that may hold videos; other types are pictures and sounds.
VIDEO_TYPES = (None, "Value", "Video")
FORMS = "give a list as CSV, JSON, JSON lines or Parquet"

# Returns whether a cell names a video that exists.
IsFile = Callable[[str], bool]
ReadLines = Callable[[], Iterator[str]]
# Splits lines into cells; the second argument names the list in messages.
Split = Callable[[Iterable[str], str], Iterator[list[str]]]


class Table(NamedTuple):
    """One way to read a list, with counts by which `choose_table` compares the ways."""

    where: str
    # How the list is read, for messages: "UTF-8, commas, header".
    form: str
    # The names of the columns; None if they have none.
    columns: list[str] | None
    # Returns a new iterator over all rows, from the first; the rows are not held in memory.
    read_rows: Callable[[], Iterator[Row]]
    sample: list[Row]
    # The fraction of the sampled rows that have the most common number of cells.
    fraction: float = 1
    # The number of the column that names the most videos.
    column: int = 0
    # The number of cells of this column that name files that exist, or hold videos.
    num_found: int = 0
    # The number of cells of the header that are known names of columns.
    num_known: int = 0
    # The number of cells of this column with a video's extension or a URL.
    num_similar: int = 0
    # The number of rows that were searched for these counts.
    num_scored: int = 1
    has_header: bool = False


def list_tables(path: Path, where: str) -> list[Table]:
    """List the ways in which a list may be read. Raise InputError if there is none."""
    require_uncompressed(path)
    with path.open("rb") as file:
        head = file.read(NUM_BYTES)
    if head.startswith(b"PAR1"):
        return [_read_parquet(path, where)]
    encoding = _find_encoding(head, where)
    read_lines = partial(_read_lines, path, encoding, where)
    first = ""
    for line in read_lines():
        first = line.strip()
        if first:
            break
    if first.startswith(("[", "{")):
        table = _read_json(path, where, read_lines)
        if table is not None:
            return [table]
    tables = list(_list_splits(read_lines, where, encoding.removesuffix("-sig").upper()))
    if not tables:
        raise InputError(f"{where} is empty")
    return tables


def _find_encoding(head: bytes, where: str) -> str:
    """Return the encoding of a text that begins with `head`. Raise InputError if it is binary."""
    for start, encoding in ENCODINGS.items():
        if re.match(start, head):
            return encoding
    num_binary = sum(map(head.count, BINARY))
    if num_binary > len(head) // 20 + 1:
        raise InputError(f"{where} is binary: {FORMS}")
    return "utf-8-sig"


def choose_table(tables: Iterable[Table], is_file: IsFile) -> Table:
    """Return the table under which the most rows name a video; `_rank` decides between equals.

    If it has a header, the header becomes the names of its columns. Cells that hold lists of
    annotations become a row for each annotation.
    """
    table = max((_score(table, is_file) for table in tables), key=_rank)
    if table.columns is not None:
        return table
    if not table.has_header:
        return table._replace(form=f"{table.form}, no header")
    columns = [_to_name(cell) for cell in table.sample[0]]
    # pandas writes the index of rows as a first column without a name, and numbers as the names of
    # columns that have none.
    num_index_columns = 1 if columns[0] == "" else 0
    numbers = [str(number) for number in range(len(columns) - num_index_columns)]
    is_numbered = columns[num_index_columns:] == numbers
    start = num_index_columns if is_numbered else 0
    columns = columns[start:]

    def read_rows() -> Iterator[Row]:
        return (row[start:] for row in islice(table.read_rows(), 1, None))

    def read_records() -> Iterator[dict[str, Any]]:
        return (dict(zip(columns, row, strict=False)) for row in read_rows())

    form = f"{table.form}, header"
    if any(unfold(record)[0] is not record for record in islice(read_records(), SAMPLE_ROWS)):
        return choose_table([_read_records(table.where, form, read_records)], is_file)
    names = None if is_numbered else columns
    rows = [row[start:] for row in table.sample[1:]]
    return table._replace(
        form=form, columns=names, read_rows=read_rows, sample=rows, column=table.column - start
    )


def _rank(table: Table) -> tuple[int, int, int, float]:
    return table.num_found, table.num_known, table.num_similar, table.fraction


def _score(table: Table, is_file: IsFile) -> Table:
    """Find the column that names videos, and whether the first row is a header."""
    rows = table.sample
    chosen = rows[:: max(1, len(rows) // NUM_SCORED)]
    num_found = 0
    num_similar = 0
    path_column = 0
    for column in range(max(map(len, rows))):
        row_cells = [get_cell(row, column) for row in chosen]
        cells = [str(cell).strip() for cell in row_cells if isinstance(cell, (str, int))]
        similar = sum(has_video_extension(cell) or is_remote(cell) for cell in cells)
        found = sum(isinstance(cell, ParquetCell) for cell in row_cells) + sum(map(is_file, cells))
        # The first of several equal columns is kept.
        if (found, similar) > (num_found, num_similar):
            num_found = found
            num_similar = similar
            path_column = column
    first = [_to_name(cell) for cell in rows[0]]
    path = first[path_column] if path_column < len(first) else ""
    num_known = sum(map(is_known, first)) if len({*first}) == len(first) else 0
    num_other_rows = len(chosen) - 1
    num_other_files = num_found - is_file(path)
    # The first row of pandas' tables is ",path,label" or "0,1".
    is_index = (len(first) > 1 and first[0] == "") or first[:2] == ["0", "1"]
    is_number = WHOLE.fullmatch(path) and not is_index
    is_path = is_file(path) or has_video_extension(path) or "/" in path
    all_others_are_files = num_other_rows >= 2 and num_other_files == num_other_rows
    names_columns = is_known(path) or num_known >= 2 or is_index or all_others_are_files
    is_named = table.columns is None and path_column < len(first)
    has_header = is_named and names_columns and not is_path and not is_number
    return table._replace(
        column=path_column,
        num_found=num_found,
        num_known=num_known if has_header else 0,
        num_similar=num_similar,
        num_scored=len(chosen) - 1 if has_header else len(chosen),
        has_header=has_header,
    )


def _to_name(cell: Any) -> str:
    return str(cell).strip().lstrip("#").strip()


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
        what = f"is not a text file in {encoding.upper()} ({error.reason})"
        raise InputError(f"{where} {what}") from error


def _split_csv(separator: str, lines: Iterable[str], where: str) -> Iterator[list[str]]:
    """Yield the cells of each line, without empty cells at its end; skip empty lines.

    Raise InputError if a quote is not closed.
    """
    csv.field_size_limit(MAX_CELL)
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    line_number = 0
    try:
        for row in reader:
            line_number = reader.line_num
            while row and not row[-1]:
                row.pop()
            if row:
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


def _keep_line(line: str) -> list[str]:
    return [line]


class Splitter(NamedTuple):
    """A way to split lines, and the number of cells that most lines must give (None: 2 or more)."""

    name: str
    num_cells: int | None
    split: Split


SPLITTERS = [
    # Charades-STA writes: AO8RW 0.0 6.9##a person runs.
    Splitter("##", 4, partial(_split_lines, re.compile(r"##|\s+(?=.*##)").split)),
    *(Splitter(name, None, partial(_split_csv, mark)) for mark, name in SEPARATORS.items()),
    Splitter("one path a line", 1, partial(_split_lines, _keep_line)),
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
    for name, num_cells, split in SPLITTERS:
        rows: list[Row] = []
        # A row that cannot be split ends the sample here; `read_rows` raises the error later.
        with suppress(InputError):
            rows.extend(split(lines, where))
        if not rows:
            continue
        ((width, count),) = Counter(map(len, rows)).most_common(1)
        is_expected = width > 1 if num_cells is None else width == num_cells
        if not is_expected or 2 * count < len(rows):
            continue
        columns = ["id", "start", "end", "sentence"] if name == "##" else None

        def read_rows(split: Split = split) -> Iterator[Row]:
            return split(islice(read_lines(), num_skipped, None), where)

        yield Table(where, f"{encoding}, {name}", columns, read_rows, rows, count / len(rows))


def _count_remarks(lines: Iterable[str]) -> int:
    """Return the number of remarks at the beginning: lines that start with "# ", less the last one.

    The last one is the header. AudioSet's lists begin with "# Segments csv created …",
    "# num_ytids=…" and "# YTID, …".
    """
    num_remarks = sum(1 for _ in takewhile(lambda line: line.startswith("# "), lines))
    return max(0, num_remarks - 1)


def _read_json(path: Path, where: str, read_lines: ReadLines) -> Table | None:
    """Read JSON or JSON lines, whose records may be objects, lists of cells, or names of videos.

    Return None if the file is neither: a list in another format may begin with a bracket. Raise
    InputError if its extension says JSON and its text cannot be read.
    """
    lines = list(islice(filter(str.strip, read_lines()), 2))
    with suppress(ValueError, RecursionError):
        json.loads(lines[0])
        if len(lines) > 1 or path.suffix in JSON_LINES_SUFFIXES:
            return _read_records(where, "JSON lines", lambda: _parse_lines(read_lines(), where))
    try:
        records = list_records(json.loads("".join(read_lines())), where)
    except (ValueError, RecursionError) as error:
        if path.suffix not in JSON_SUFFIXES:
            return None
        raise InputError(f"{where} is not a list of videos ({error})") from error
    return _read_records(where, "JSON", lambda: iter(records))


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
    videos = set()
    for name, leaf in packed.items():
        may_be_video = features.get(name, {}).get("_type") in VIDEO_TYPES
        if may_be_video and _has_bytes(file, path, leaf):
            videos.add(name)
    form = "Parquet"
    if len(videos) < len(packed):
        form += f" without the bytes of {', '.join(name for name in packed if name not in videos)}"

    def read_records() -> Iterator[dict[str, Any]]:
        positions = zip(_list_positions(file), _list_values(file, values), strict=True)
        for number, ((group, row), record) in enumerate(positions):
            for name, names in classes.items():
                # Hugging Face writes -1 for no class.
                record[name] = names.get(record.get(name))
            for name, leaf in packed.items():
                own_path = (record.get(name) or {}).get("path")
                record[name] = own_path
                if name in videos:
                    base = (own_path or "video.mp4").rpartition("/")[2]
                    source = f"{path.name}/{number:06d}-{base}"
                    record[name] = ParquetCell(str(path.absolute()), group, row, leaf, source)
            yield record

    return _read_records(where, form, read_records)


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


def _list_values(file: Any, leaves: list[str]) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(columns=leaves):
        yield from batch.to_pylist()


def _list_positions(file: Any) -> Iterator[tuple[int, int]]:
    """Yield (row group, row number within the group) of each row."""
    for group in range(file.num_row_groups):
        for row in range(file.metadata.row_group(group).num_rows):
            yield group, row


def _read_records(where: str, form: str, read_records: Callable[[], Iterator[Any]]) -> Table:
    """Return a table with a row for each record, or for each segment of a record (see `unfold`).

    Raise InputError if some records are objects and others are not.
    """

    def read_parts() -> Iterator[Any]:
        return chain.from_iterable(map(unfold, read_records()))

    def to_row(record: Any) -> Row:
        if isinstance(record, dict) != (columns is not None):
            example = json.dumps(record)[:80]
            raise InputError(f"{where} has objects and other values: {example}")
        if columns is not None:
            return [record.get(name) for name in columns]
        return record if isinstance(record, list) else [record]

    def read_rows() -> Iterator[Row]:
        return map(to_row, read_parts())

    sample = list(islice(read_parts(), SAMPLE_ROWS))
    kinds = {type(record) for record in sample}
    if kinds not in ({dict}, {list}, {str}):
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"
        raise InputError(f"{where} is not a list of videos: it has {names}")
    columns = None
    if kinds == {dict}:
        columns = list(dict.fromkeys(chain.from_iterable(sample)))
    return Table(where, form, columns, read_rows, [to_row(record) for record in sample])
