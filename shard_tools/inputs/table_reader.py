"""Read a list of any common form as rows of cells. What it is follows from its bytes, not from its name.

`csv.Sniffer` finds the separator of 25 of 26 public lists: it knows neither that paths hold spaces, nor which files are
there. So the ways to split a line are tried here, and the one under which most rows name a video is taken.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import InputError
from pipeline.reading.storage import is_remote
from shard_tools.inputs.cells import WHOLE, Row, to_path
from shard_tools.inputs.folders import has_video_extension
from shard_tools.inputs.formats import is_known
from shard_tools.inputs.item import ParquetCell, import_pyarrow
from shard_tools.inputs.records import list_records, unfold

MAX_CELL = 2**20  # characters: a quote that is never closed must not swallow the rest of the list
NUM_BYTES = 2**20  # at the beginning, which show the encoding
SAMPLE_ROWS = 1000
NUM_SCORED = 24  # rows of the sample whose files are looked for
MAX_WORDS = 9  # of a line that is split at spaces
SEPARATORS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "bars", ":": "colons", "~": "tildes", "^": "carets"}
HASHES, HASHES_COLUMNS = "##", ["id", "start", "end", "sentence"]  # of Charades-STA: AO8RW 0.0 6.9##a person runs.
# Ways to split lines: all of csv at a separator; at no space, at the last spaces, at the first one (-1).
SPLITTERS = [
    (HASHES, len(HASHES_COLUMNS) - 1), *((separator, -1) for separator in SEPARATORS),
    *((" ", number) for number in (*range(MAX_WORDS), -1)),
]  # fmt: skip
COMPRESSED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z",
}  # fmt: skip
ENCODINGS = {  # by the first bytes, and by those of a first letter or bracket
    b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16",
    rb"[ -~]\0\0\0": "utf-32-le", rb"\0\0\0[ -~]": "utf-32-be",
    rb"[ -~]\0[^\0]": "utf-16-le", rb"\0[ -~]\0": "utf-16-be",
}  # fmt: skip
PARQUET = b"PAR1"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
NO_VIDEO = ("Image", "Audio")  # what else Hugging Face keeps as {bytes, path}
FORMS = "give a list as CSV, JSON, JSON lines or Parquet"
IsFile = Callable[[str], bool]  # whether a cell names a video that is there


class SplitScore(NamedTuple):
    """How well rows name videos: the larger, the better."""

    num_found: int = 0  # cells of the best column that are files
    num_known: int = 0  # cells of the first row that are names of columns
    num_similar: int = 0  # cells of the best column that look like files
    column: int = 0
    num_rows: int = 1  # that were looked at
    has_header: bool = False


class Table(NamedTuple):
    """A list: how it is written, the names of its columns, if it has any, and its rows, which stream."""

    where: str
    form: str  # UTF-8, commas, header
    columns: list[str] | None
    read_rows: Callable[[], Iterator[Row]]
    score: SplitScore = SplitScore()

    def sample(self) -> list[Row]:
        return list(islice(self.read_rows(), SAMPLE_ROWS))


def read_table(path: Path, where: str, is_file: IsFile) -> Table:
    """Find out how a list is written. Raise InputError if it is none."""
    require_uncompressed(path)
    with path.open("rb") as file:
        head = file.read(NUM_BYTES)
    if head.startswith(PARQUET):
        return _make_table(where, "Parquet", _open_parquet(path, where), is_file)
    encoding, name = _detect_encoding(head, where)
    read_lines = partial(_read_lines, path, encoding, where)
    first = next((line.strip() for line in read_lines() if line.strip()), None)
    if first is None:
        raise InputError(f"{where} is empty")
    if first[0] == "<":
        raise InputError(f"{where} is XML or HTML: {FORMS}")
    if first[0] in "[{" and (table := _read_json(path, where, read_lines, is_file)):
        return table
    table = _read_text(read_lines, where, name, is_file)

    def read_records() -> Iterator[dict[str, Any]]:
        return (dict(zip(table.columns or (), row, strict=False)) for row in table.read_rows())

    if any(next(unfold(record)) is not record for record in islice(read_records(), SAMPLE_ROWS)):
        return _make_table(where, table.form, read_records, is_file)
    return table


def require_uncompressed(path: Path) -> None:
    """Raise InputError if a file that should be a tar or a list is an archive of another kind, or a workbook."""
    with path.open("rb") as file:
        head = file.read(2**16)
    is_zipped_workbook = head.startswith(b"PK") and (b"xl/" in head or b"opendocument" in head)
    if head.startswith(b"\xd0\xcf\x11\xe0") or is_zipped_workbook:
        raise InputError(f"{path} is a workbook (Excel or OpenDocument): save its sheet as CSV")
    for magic, name in COMPRESSED.items():
        if head.startswith(magic):
            raise InputError(f"{path} is compressed ({name}): unpack it, only plain tars and lists are read")


def score_split(rows: Sequence[Row], is_file: IsFile) -> SplitScore:
    """Find the column that names videos, and whether the first row is a header."""
    chosen = rows[:: max(1, len(rows) // NUM_SCORED)]
    counts = []
    for column in range(max(map(len, rows))):
        cells = [str(row[column]).strip() for row in chosen if column < len(row) and row[column] is not None]
        similar = sum(has_video_extension(cell) or is_remote(cell) for cell in cells)
        counts.append((sum(map(is_file, cells)), similar, -column))
    found, similar, column = max(counts, default=(0, 0, 0))
    first = [str(cell).strip().lstrip("#").strip() for cell in rows[0]]
    path = first[-column] if -column < len(first) else ""
    num_known = sum(map(is_known, first)) if len({*first}) == len(first) else 0
    others, num_others = found - is_file(path), len(chosen) - 1
    is_index = (len(first) > 1 and first[0] == "") or first[:2] == ["0", "1"]  # pandas' first row
    is_number = WHOLE.fullmatch(path) and not is_index
    is_path = is_file(path) or has_video_extension(path) or "/" in path
    names_columns = is_known(path) or num_known >= 2 or is_index
    has_header = not is_path and not is_number and (names_columns or (num_others >= 2 and others == num_others))
    return SplitScore(found, num_known * has_header, similar, -column, len(chosen) - has_header, has_header)


def _detect_encoding(head: bytes, where: str) -> tuple[str, str]:
    """Return Python's name of the encoding, and that for people."""
    for start, encoding in ENCODINGS.items():
        if re.match(start, head):
            return encoding, encoding.upper()
    if sum(map(head.count, {*range(32)} - {*b"\t\n\r\f\x1b\x1c\x1d\x1e"})) > len(head) // 20 + 1:
        raise InputError(f"{where} is binary: {FORMS}")
    try:
        head[: head.rfind(b"\n") + 1 or None].decode()
    except UnicodeDecodeError:
        return "utf-8-sig", "not UTF-8: read as Windows-1252"
    return "utf-8-sig", "UTF-8"


def _read_lines(path: Path, encoding: str, where: str) -> Iterator[str]:
    # Names of files may hold any byte: those that are not UTF-8 become surrogates, and the same bytes again.
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    try:
        with path.open(encoding=encoding, errors=errors, newline="") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not a text file in {encoding.upper()} ({error.reason})") from error


def _split_at(separator: str, num_splits: int, lines: Iterable[str], where: str) -> Iterator[list[str]]:
    """Yield the cells of all lines that are not blank, see SPLITTERS."""
    if separator in (" ", HASHES):
        for line in filter(None, map(str.strip, lines)):
            head, hashes, sentence = line.partition(HASHES) if separator == HASHES else (line, "", "")
            if hashes:
                yield [*head.split(), sentence]
            elif num_splits < 0:
                yield line.split(None, 1)
            else:
                yield [cell.strip('"') for cell in line.rsplit(None, num_splits * (separator == " "))]
        return
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


def _read_text(read_lines: Callable[[], Iterator[str]], where: str, encoding: str, is_file: IsFile) -> Table:
    """Choose the way to split lines under which most rows name a video, or else look most like a table."""
    # Of lines "# …" at the beginning, the last holds the columns (AudioSet); Excel writes a line "sep=;".
    num_skipped = max(0, sum(1 for _ in takewhile(lambda line: line.startswith("# "), read_lines())) - 1)
    num_skipped += re.fullmatch('"?sep=."?', next(read_lines()).strip(), re.IGNORECASE) is not None
    sample = list(islice(read_lines(), num_skipped, num_skipped + SAMPLE_ROWS))
    found = []
    for order, (separator, num_splits) in enumerate(SPLITTERS):
        rows: list[list[str]] = []
        with suppress(InputError):  # reading all rows will say which cannot be split
            rows.extend(_split_at(separator, num_splits, sample, where))
        width, count = Counter(map(len, rows)).most_common(1)[0] if rows else (0, 0)
        if 2 * count >= len(rows) > 0 and (width == num_splits + 1 or (num_splits < 0 and width > 1)):
            score = score_split(rows, is_file)
            found.append((score[:3], count / len(rows), -order, score))
    if not found:
        raise InputError(f"{where} is empty")
    *_, order, score = max(found)
    separator, num_splits = SPLITTERS[-order]
    kind = {**SEPARATORS, HASHES: HASHES}.get(separator, "spaces" if num_splits else "one path a line")
    form = ", ".join([encoding, kind, "header" if score.has_header else "no header"])

    def read_rows(start: int = 0) -> Iterator[list[str]]:
        rows = _split_at(separator, num_splits, islice(read_lines(), num_skipped, None), where)
        return (row[start:] for row in islice(rows, int(score.has_header), None))

    if separator == HASHES:
        return Table(where, form, HASHES_COLUMNS, read_rows, score)
    first = next(_split_at(separator, num_splits, sample, where)) if score.has_header else []
    columns = [cell.strip().lstrip("#").strip() for cell in first]
    start = int(columns[:1] == [""])
    if columns and columns[start:] == [*map(str, range(len(columns) - start))]:  # pandas numbers columns without names
        return Table(where, form, None, partial(read_rows, start), score._replace(column=score.column - start))
    return Table(where, form, columns or None, read_rows, score)


def _read_json(path: Path, where: str, read_lines: Callable[[], Iterator[str]], is_file: IsFile) -> Table | None:
    """Read objects, lists of cells or single names, as JSON or JSON lines; None if it is neither, nor called so."""
    lines = list(islice(filter(str.strip, read_lines()), 2))
    with suppress(ValueError, RecursionError):
        json.loads(lines[0])
        if len(lines) > 1 or path.suffix in JSON_SUFFIXES[1:]:
            return _make_table(where, "JSON lines", lambda: _parse_lines(read_lines(), where), is_file)
    try:
        records = list(list_records(json.loads("".join(read_lines())), where))
    except (ValueError, RecursionError) as error:  # not JSON, or too deep
        if path.suffix not in JSON_SUFFIXES:
            return None
        raise InputError(f"{where} is not a list of videos ({error})") from error
    return _make_table(where, "JSON", lambda: iter(records), is_file)


def _make_table(where: str, form: str, read_records: Callable[[], Iterator[Any]], is_file: IsFile) -> Table:
    """Return a table with a row a record, or a segment of one."""

    def read_parts() -> Iterator[Any]:
        return chain.from_iterable(map(unfold, read_records()))

    sample = list(islice(read_parts(), SAMPLE_ROWS))
    kinds = {type(record) for record in sample}
    if kinds not in ({dict}, {list}, {str}):
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"
        raise InputError(f"{where} is not a list of videos: it has {names}")
    columns = list(dict.fromkeys(chain.from_iterable(sample))) if kinds == {dict} else None

    def read_rows() -> Iterator[Row]:
        for record in read_parts():
            if isinstance(record, dict) != (columns is not None):
                raise InputError(f"{where} has objects and other values: {json.dumps(record)[:80]}")
            if columns is not None:
                yield [record.get(name) for name in columns]
            else:
                yield record if isinstance(record, list) else [record]

    table = Table(where, form, columns, read_rows)
    rows = table.sample()
    videos = [n for n, cell in enumerate(rows[0]) if isinstance(cell, ParquetCell)]
    if len(videos) == 1:
        return table._replace(score=SplitScore(num_found=1, column=videos[0]))
    paths = [[to_path(cell) if isinstance(cell, (str, int)) else "" for cell in row] for row in rows]
    return table._replace(score=score_split([[], *paths], is_file))


def _parse_lines(lines: Iterator[str], where: str) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}, line {number}, is not JSON ({error})") from error


def _open_parquet(path: Path, where: str) -> Callable[[], Iterator[dict[str, Any]]]:
    """Return a function that reads records of values, or of videos: binary, or {bytes, path} as Hugging Face writes."""
    parquet = import_pyarrow(where)
    try:
        opened = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{where} is damaged or no Parquet ({error})") from error
    schema = opened.schema_arrow
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    features = {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    classes = {name: kind["names"] for name, kind in features.items() if kind.get("names")}
    videos = {}  # columns whose bytes are videos: these are not read, but the paths beside them
    for name, cell in next((row for batch in opened.iter_batches(1) for row in batch.to_pylist()), {}).items():
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        if isinstance(content, bytes) and features.get(name, {}).get("_type") not in NO_VIDEO:
            videos[name] = f"{name}.bytes" if isinstance(cell, dict) else name
    columns = [videos[name].replace(".bytes", ".path") if name in videos else name for name in schema.names]
    columns = [column for column in columns if videos.get(column) != column]

    def read_cell(name: str, cell: Any, group: int, row: int, number: int) -> Any:
        own_path = cell.get("path") if isinstance(cell, dict) else None
        if name in videos:
            place = f"{number:06d}-{(own_path or 'video.mp4').rpartition('/')[2]}"
            return ParquetCell(str(path.absolute()), group, row, videos[name], place)
        if name in classes:  # -1: none
            return classes[name][cell] if cell in range(len(classes[name])) else None
        return own_path or cell

    def read_records() -> Iterator[dict[str, Any]]:
        file, number = parquet.ParquetFile(path), 0
        for group in range(file.num_row_groups):
            batches = file.iter_batches(row_groups=[group], columns=columns)
            for row, values in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches)):
                yield {name: read_cell(name, values.get(name), group, row, number) for name in schema.names}
                number += 1

    return read_records
