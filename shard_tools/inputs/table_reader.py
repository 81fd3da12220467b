"""Read a list of any common form as rows of cells. What it is follows from its bytes, not from its name.

`csv.Sniffer` finds the separator of 25 of 26 public lists: it knows neither that paths hold spaces, nor which files are
there. So all ways to split a line are tried here, and the one under which most rows name a video is taken.
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
from adamae.pipeline.reading.storage import is_remote
from adamae.shard_tools.inputs.cells import WHOLE, Row, get_cell, list_records, unfold
from adamae.shard_tools.inputs.folders import has_video_extension
from adamae.shard_tools.inputs.formats import is_known
from adamae.shard_tools.inputs.location import ParquetCell, import_pyarrow

MAX_CELL = 2**20  # characters: a quote that is never closed must not swallow the rest of the list
NUM_BYTES = 2**20  # at the beginning, which show the encoding
SAMPLE_ROWS = 1000
NUM_SCORED = 24  # rows of the sample whose files are looked for
MAX_WORDS = 9  # of a line that is split at spaces
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
ENCODINGS = {  # by the first bytes, and by those of a first letter or bracket
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
    rb"[ -~]\0\0\0": "utf-32-le",
    rb"\0\0\0[ -~]": "utf-32-be",
    rb"[ -~]\0[^\0]": "utf-16-le",
    rb"\0[ -~]\0": "utf-16-be",
}
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
VIDEO_TYPES = (
    None,
    "Value",
    "Video",
)  # of columns, as Hugging Face says; others are pictures and sounds
FORMS = "give a list as CSV, JSON, JSON lines or Parquet"
IsFile = Callable[[str], bool]  # whether a cell names a video that is there
ReadLines = Callable[[], Iterator[str]]
Split = Callable[
    [Iterable[str], str], Iterator[list[str]]
]  # of lines, and where they are, at some separator


class Table(NamedTuple):
    """A way to read a list, and how well it names videos: the larger, the better."""

    where: str
    form: str  # UTF-8, commas, header
    columns: list[str] | None  # if they have names
    read_rows: Callable[[], Iterator[Row]]  # they stream
    sample: list[Row]
    share: float = 1  # of the sampled rows that have as many cells as most
    column: int = 0  # the one that names most videos
    num_found: int = 0  # cells of it that are files
    num_known: int = 0  # cells of the first row that are names of columns
    num_similar: int = 0  # cells of the column that look like files
    num_scored: int = 1  # rows that were looked at
    has_header: bool = False


def list_tables(path: Path, where: str) -> list[Table]:
    """List the ways in which a list may be read. Raise InputError if it is none."""
    require_uncompressed(path)
    with path.open("rb") as file:
        head = file.read(NUM_BYTES)
    if head.startswith(b"PAR1"):
        return [_read_parquet(path, where)]
    encoding = next(
        (encoding for start, encoding in ENCODINGS.items() if re.match(start, head)), "utf-8-sig"
    )
    is_binary = (
        sum(map(head.count, {*range(32)} - {*b"\t\n\r\f\x1b\x1c\x1d\x1e"})) > len(head) // 20 + 1
    )
    if is_binary and encoding == "utf-8-sig":
        raise InputError(f"{where} is binary: {FORMS}")
    read_lines = partial(_read_lines, path, encoding, where)
    first = next(filter(None, map(str.strip, read_lines())), "")
    if first[:1] == "<":
        raise InputError(f"{where} is XML or HTML: {FORMS}")
    if first[:1] in ("[", "{") and (table := _read_json(path, where, read_lines)):
        return [table]
    tables = list(_list_splits(read_lines, where, encoding.removesuffix("-sig").upper()))
    if not tables:
        raise InputError(f"{where} is empty")
    return tables


def choose_table(tables: Iterable[Table], is_file: IsFile) -> Table:
    """Choose the way under which most rows name a video, or else look most like a table, and take off its header."""
    scored = (_score(table, is_file) for table in tables)
    table = max(
        scored, key=lambda table: (table.num_found, table.num_known, table.num_similar, table.share)
    )
    if table.columns is not None:
        return table
    if not table.has_header:
        return table._replace(form=f"{table.form}, no header")
    columns = [_to_name(cell) for cell in table.sample[0]]
    # pandas writes an index of rows without a name in front, and numbers as names of columns that had none.
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
        # Of equal columns, the first.
        if (found, similar) > (num_found, num_similar):
            num_found = found
            num_similar = similar
            path_column = column
    first = [_to_name(cell) for cell in rows[0]]
    path = first[path_column] if path_column < len(first) else ""
    num_known = sum(map(is_known, first)) if len({*first}) == len(first) else 0
    num_other_rows = len(chosen) - 1
    num_other_files = num_found - is_file(path)
    is_index = (len(first) > 1 and first[0] == "") or first[:2] == ["0", "1"]  # pandas' first row
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
    """Raise InputError if a file that should be a tar or a list is an archive of another kind, or a workbook."""
    with path.open("rb") as file:
        head = file.read(2**16)
    is_zipped_workbook = head.startswith(b"PK") and (b"xl/" in head or b"opendocument" in head)
    if head.startswith(b"\xd0\xcf\x11\xe0") or is_zipped_workbook:
        raise InputError(f"{path} is a workbook (Excel or OpenDocument): save its sheet as CSV")
    for magic, name in COMPRESSED.items():
        if head.startswith(magic):
            raise InputError(
                f"{path} is compressed ({name}): unpack it, only plain tars and lists are read"
            )


def _read_lines(path: Path, encoding: str, where: str) -> Iterator[str]:
    # Names of files may hold any byte: those that are not UTF-8 become surrogates, and the same bytes again.
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    try:
        with path.open(encoding=encoding, errors=errors, newline="") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not a text file in {encoding.upper()} ({error.reason})"
        ) from error


def _split_csv(separator: str, lines: Iterable[str], where: str) -> Iterator[list[str]]:
    csv.field_size_limit(MAX_CELL)
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    line_number = 0
    try:
        for row in reader:
            line_number = reader.line_num
            while row and not row[-1]:  # separators at the end of a line
                row.pop()
            if row:
                yield row
    except csv.Error as error:
        what = f"line {line_number + 1}, cannot be split at {SEPARATORS[separator]} ({error})"
        raise InputError(f"{where}, {what}: a quote there is not closed, or not doubled") from error


def _split_lines(
    split: Callable[[str], list[str]], lines: Iterable[str], where: str
) -> Iterator[list[str]]:
    return ([cell.strip('"') for cell in split(line)] for line in map(str.strip, lines) if line)


# Ways to split lines: name, cells (0: two or more), and function. Charades-STA writes: AO8RW 0.0 6.9##a person runs.
SPLITTERS: list[tuple[str, int, Split]] = [
    ("##", 4, partial(_split_lines, re.compile(r"##|\s+(?=.*##)").split)),
    *((name, 0, partial(_split_csv, mark)) for mark, name in SEPARATORS.items()),
    ("one path a line", 1, partial(_split_lines, lambda line: [line])),
    *(
        ("spaces", n + 1, partial(_split_lines, methodcaller("rsplit", None, n)))
        for n in range(1, MAX_WORDS)
    ),
    ("spaces", 2, partial(_split_lines, methodcaller("split", None, 1))),
]


def _list_splits(read_lines: ReadLines, where: str, encoding: str) -> Iterator[Table]:
    # Of lines "# …" at the beginning, the last holds the columns (AudioSet).
    num_skipped = max(
        0, sum(1 for _ in takewhile(lambda line: line.startswith("# "), read_lines())) - 1
    )
    lines = list(islice(read_lines(), num_skipped, num_skipped + SAMPLE_ROWS))
    for name, num_cells, split in SPLITTERS:
        rows: list[Row] = []
        with suppress(InputError):  # reading all rows will say which cannot be split
            rows.extend(split(lines, where))
        width, count = Counter(map(len, rows)).most_common(1)[0] if rows else (0, 0)
        if 2 * count >= len(rows) > 0 and (width == num_cells or (num_cells == 0 and width > 1)):
            columns = ["id", "start", "end", "sentence"] if name == "##" else None

            def read_rows(split: Split = split) -> Iterator[Row]:
                return split(islice(read_lines(), num_skipped, None), where)

            yield Table(where, f"{encoding}, {name}", columns, read_rows, rows, count / len(rows))


def _read_json(path: Path, where: str, read_lines: ReadLines) -> Table | None:
    """Read objects, lists of cells or single names, as JSON or JSON lines; None if it is neither, nor called so."""
    lines = list(islice(filter(str.strip, read_lines()), 2))
    with suppress(ValueError, RecursionError):
        json.loads(lines[0])
        if len(lines) > 1 or path.suffix in JSON_SUFFIXES[1:]:
            return _read_records(where, "JSON lines", lambda: _parse_lines(read_lines(), where))
    try:
        records = list_records(json.loads("".join(read_lines())), where)
    except (ValueError, RecursionError) as error:  # not JSON, or too deep
        if path.suffix not in JSON_SUFFIXES:
            return None
        raise InputError(f"{where} is not a list of videos ({error})") from error
    return _read_records(where, "JSON", lambda: iter(records))


def _parse_lines(lines: Iterator[str], where: str) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}, line {number}, is not JSON ({error})") from error


def _read_parquet(path: Path, where: str) -> Table:
    """Read values, with the names of classes, and where videos are: in binary cells, or in {bytes, path}, as Hugging
    Face writes."""
    parquet = import_pyarrow(where)
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{where} is damaged or no Parquet ({error})") from error
    schema = file.schema_arrow
    leaves = [file.schema.column(number) for number in range(len(file.schema))]
    binary = [
        it.path
        for it in leaves
        if "BYTE_ARRAY" in it.physical_type and it.logical_type.type == "NONE"
    ]
    info = json.loads((schema.metadata or {}).get(b"huggingface", "{}")).get("info", {})
    features = {name: it for name, it in info.get("features", {}).items() if isinstance(it, dict)}
    kinds = {name: feature.get("_type") for name, feature in features.items()}
    classes = {
        name: dict(enumerate(features[name]["names"]))
        for name in kinds
        if kinds[name] == "ClassLabel"
    }
    packed = {
        name: leaf for leaf in binary if (name := leaf.removesuffix(".bytes")) in schema.names
    }
    filled = [
        number for number in range(file.num_row_groups) if file.metadata.row_group(number).num_rows
    ]
    firsts = {
        name: ParquetCell(str(path), filled[0], 0, leaf, "")
        for name, leaf in packed.items()
        if filled
    }
    videos = {
        name for name, cell in firsts.items() if kinds.get(name) in VIDEO_TYPES and cell.read()
    }
    unread = ", ".join(name for name in packed if name not in videos)

    def read_records() -> Iterator[dict[str, Any]]:
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        places = (
            (number, row) for number, group in enumerate(groups) for row in range(group.num_rows)
        )
        batches = file.iter_batches(
            columns=[leaf.path for leaf in leaves if leaf.path not in binary]
        )
        records = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, ((group, row), record) in enumerate(zip(places, records, strict=True)):
            record |= {
                name: names.get(record.get(name)) for name, names in classes.items()
            }  # -1: none
            for name, leaf in packed.items():
                own_path = (record.get(name) or {}).get("path")
                base = f"{number:06d}-{(own_path or 'video.mp4').rpartition('/')[2]}"
                video = ParquetCell(str(path.absolute()), group, row, leaf, f"{path.name}/{base}")
                record[name] = video if name in videos else own_path
            yield record

    return _read_records(
        where, "Parquet" + f" without the bytes of {unread}" * bool(unread), read_records
    )


def _read_records(where: str, form: str, read_records: Callable[[], Iterator[Any]]) -> Table:
    """Return a table with a row a record, or a segment of one."""

    def read_parts() -> Iterator[Any]:
        return chain.from_iterable(map(unfold, read_records()))

    def to_row(record: Any) -> Row:
        if isinstance(record, dict) != (columns is not None):
            raise InputError(f"{where} has objects and other values: {json.dumps(record)[:80]}")
        if columns is not None:
            return [record.get(name) for name in columns]
        return record if isinstance(record, list) else [record]

    sample = list(islice(read_parts(), SAMPLE_ROWS))
    kinds = {type(record) for record in sample}
    if kinds not in ({dict}, {list}, {str}):
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"
        raise InputError(f"{where} is not a list of videos: it has {names}")
    columns = list(dict.fromkeys(chain.from_iterable(sample))) if kinds == {dict} else None
    return Table(where, form, columns, lambda: map(to_row, read_parts()), [*map(to_row, sample)])
