"""Read a list of any common format as rows of cells. What it is follows from its bytes, not from its name.

`csv.Sniffer` finds the separator of 25 of 26 lists of public sets, clevercsv of 23, but neither knows that paths hold
spaces, nor takes files that are there for evidence; headers they find in 23. So the ways to split a line are tried
here, and the one under which most rows name a video is taken.
"""

import codecs
import csv
import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import InputError
from shard_tools.inputs.cells import Row
from shard_tools.inputs.item import import_pyarrow

MAX_CELL = 2**20  # characters: a quote that is never closed must not swallow the rest of the list
SAMPLE_CHARACTERS = 2**20
SAMPLE_ROWS = 1000
MAX_WORDS = 9  # of a line that is split at spaces
SEPARATORS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "bars"}
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z",
}
BOMS = {  # UTF-32's first: UTF-16's is a part of it
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
PARQUET = b"PAR1"
NESTED = ("annotations", "annotation")


@dataclass
class Table:
    """A list: how it is written, the names of its columns, if it has any, and its rows, which stream."""

    where: str
    form: str  # UTF-8, commas, header
    columns: list[str] | None
    read_rows: Callable[[], Iterator[Row]]
    videos: int | None = None  # the column that holds the videos themselves

    def sample(self) -> list[Row]:
        return list(islice(self.read_rows(), SAMPLE_ROWS))


Judge = Callable[[list[list[str]]], tuple[tuple[int, ...], bool]]  # rows -> how well they name videos, has a header


def read_table(path: Path, where: str, judge: Judge) -> Table:
    """Find out how a list is written; `judge` rates the ways to split lines. Raise InputError if it is none."""
    require_uncompressed(path)
    with path.open("rb") as file:
        if file.read(4) == PARQUET:
            return _read_parquet(path, where)
    encoding, name = _detect_encoding(path, where)
    lines = partial(_read_lines, path, encoding)
    first = next((line for line in lines() if line.strip()), None)
    if first is None:
        raise InputError(f"{where} is empty")
    if first.lstrip()[:1] == "<":
        raise InputError(f"{where} is XML or HTML: give a list as CSV, JSON, JSON lines or Parquet")
    if first.lstrip()[:1] in "[{":
        table = _read_json(path, where, encoding, first)
        if table is not None:
            return table
    return _split_lines(lines, where, name, judge)


def require_uncompressed(path: Path) -> None:
    """Raise InputError if a file that should be a tar or a list is an archive of another kind, or a workbook."""
    with path.open("rb") as file:
        head = file.read(8)
    is_workbook = head.startswith(b"\xd0\xcf\x11\xe0")
    if head.startswith(b"PK\x03\x04") and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            is_workbook = any(name.startswith("xl/") or name == "content.xml" for name in archive.namelist())
    if is_workbook:
        raise InputError(f"{path} is a workbook (Excel or OpenDocument): save its sheet as CSV")
    for magic, name in COMPRESSED.items():
        if head.startswith(magic):
            raise InputError(f"{path} is compressed ({name}): unpack it, only plain tars and lists are read")


def _detect_encoding(path: Path, where: str) -> tuple[str, str]:
    """Return Python's name of the encoding, and that for people; every byte of the file is looked at."""
    with path.open("rb") as file:
        head = file.read(4096)
        encoding = next((name for mark, name in BOMS.items() if head.startswith(mark)), "utf-8")
        if encoding == "utf-8" and head.count(0) > len(head) // 4:  # every other byte is
            encoding = "utf-16-le" if head[1::2].count(0) > head[::2].count(0) else "utf-16-be"
        elif encoding == "utf-8" and sum(byte < 32 and byte not in b"\t\n\r\f\x1b\x1c\x1d\x1e" for byte in head) > (
            len(head) // 20 + 1
        ):
            raise InputError(f"{where} is binary: give a list as CSV, JSON, JSON lines or Parquet")
        decoder = codecs.getincrementaldecoder(encoding)()
        file.seek(0)
        try:
            while block := file.read(2**20):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            if not encoding.startswith("utf-8"):
                raise InputError(f"{where} is not a text file in {encoding.upper()} ({error.reason})") from error
            return encoding, "not UTF-8: read as Windows-1252"
    return encoding, {"utf-8": "UTF-8", "utf-8-sig": "UTF-8"}.get(encoding, encoding[:6].upper())


def _read_lines(path: Path, encoding: str) -> Iterator[str]:
    # Names of files may hold any byte: those that are not UTF-8 become surrogates, and the same bytes again.
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    with path.open(encoding=encoding, errors=errors, newline="") as file:
        yield from file


class Splitter(NamedTuple):
    """A way to split lines into cells."""

    name: str  # for people
    separator: str  # of csv, or "" for runs of spaces
    num_splits: int = 0  # at the last spaces; -1: at the first

    def split(self, lines: Iterable[str], where: str) -> Iterator[list[str]]:
        """Yield the cells of all lines that are not blank."""
        if self.separator:
            return self._read_csv(lines, where)
        if self.num_splits < 0:
            return (line.strip().split(None, 1) for line in lines if line.strip())
        return (
            [cell.strip('"') for cell in line.strip().rsplit(None, self.num_splits)] if '"' in line
            else line.strip().rsplit(None, self.num_splits)
            for line in lines
            if line.strip()
        )  # fmt: skip

    def _read_csv(self, lines: Iterable[str], where: str) -> Iterator[list[str]]:
        csv.field_size_limit(MAX_CELL)
        reader = csv.reader(lines, delimiter=self.separator, skipinitialspace=True, strict=True)
        line = 0
        try:
            for row in reader:
                line = reader.line_num
                while row and not row[-1]:  # separators at the end of a line
                    row.pop()
                if row:
                    yield row
        except csv.Error as error:
            raise InputError(
                f"{where}, line {line + 1}, cannot be split at {self.name} ({error}): a quote there is not closed,"
                " or not doubled"
            ) from error


def _split_lines(lines: Callable[[], Iterator[str]], where: str, encoding: str, judge: Judge) -> Table:
    """Choose the way to split lines under which most rows name a video, or else look most like a table."""
    first = next(line for line in lines() if line.strip()).strip().strip('"')
    skipped = _count_comments(lines())
    splitters = [Splitter(name, separator) for separator, name in SEPARATORS.items()]
    if first[:4].lower() == "sep=" and len(first) == 5:  # as Excel writes, and obeys
        skipped = 1
        splitters = [Splitter(SEPARATORS.get(first[4], repr(first[4])), first[4])]
    else:
        splitters += [Splitter("one path a line", "", 0)]
        splitters += [Splitter("spaces", "", number) for number in range(1, MAX_WORDS)] + [Splitter("spaces", "", -1)]
    sample, size = [], 0
    for line in islice(lines(), skipped, skipped + SAMPLE_ROWS):
        sample.append(line)
        size += len(line)
        if size > SAMPLE_CHARACTERS:
            break
    best: tuple[tuple[float, ...], Splitter, bool] | None = None
    for order, splitter in enumerate(splitters):
        rows = _take_until_error(splitter.split(sample, where))
        width, count = Counter(map(len, rows)).most_common(1)[0] if rows else (0, 0)
        if 2 * count < len(rows) or (width < 2 and splitter.num_splits != 0 and len(splitters) > 1):
            continue
        if not splitter.separator and splitter.num_splits > 0 and width != splitter.num_splits + 1:
            continue
        if splitter.separator and width < 2 and len(splitters) > 1:
            continue
        score, has_header = judge(rows)
        ranking = *score, count / len(rows), -order
        if best is None or ranking > best[0]:
            best = ranking, splitter, has_header
    assert best is not None, "one path a line is always possible"
    _, splitter, has_header = best
    read_rows = partial(_read_split, lines, splitter, where, skipped)
    columns = [cell.strip().lstrip("#").strip() for cell in next(read_rows())] if has_header else None
    form = ", ".join([encoding, splitter.name, "header" if has_header else "no header"])
    if columns is not None and is_range(columns):  # pandas wrote the numbers of columns that had no names
        keep = slice(1 if columns[0] == "" else 0, None)
        return Table(where, form, None, lambda: (row[keep] for row in islice(read_rows(), 1, None)))
    return Table(where, form, columns, partial(_skip, read_rows, int(has_header)))


def is_range(columns: list[str]) -> bool:
    """Whether these names of columns are numbers from 0, behind that of an index that has none."""
    names = columns[1:] if columns[0] == "" else columns
    return names == [str(number) for number in range(len(names))]


def _skip(read_rows: Callable[[], Iterator[Row]], number: int) -> Iterator[Row]:
    return islice(read_rows(), number, None)


def _read_split(lines: Callable[[], Iterator[str]], splitter: Splitter, where: str, skipped: int) -> Iterator[Row]:
    return splitter.split(islice(lines(), skipped, None), where)


def _count_comments(lines: Iterator[str]) -> int:
    """Count the lines "# …" at the beginning, but for the last if there are several: AudioSet's holds the columns."""
    number = 0
    for line in islice(lines, 100):
        if not line.startswith("# "):
            break
        number += 1
    return max(number - 1, 0)


def _take_until_error(rows: Iterator[list[str]]) -> list[list[str]]:
    """Return the rows before the one that cannot be split: reading them all will say which it is."""
    found = []
    try:
        for row in rows:
            found.append(row)  # noqa: PERF402
    except InputError:
        pass
    return found


def _read_json(path: Path, where: str, encoding: str, first: str) -> Table | None:
    """Read JSON or JSON lines; None if it is neither, and not called so."""
    lines = partial(_read_lines, path, encoding)
    if _is_json(first):
        second = next(islice((line for line in lines() if line.strip()), 1, 2), "")
        if second.strip():
            return _make_table(where, "JSON lines", lambda: _parse_lines(lines(), where))
    try:
        value = json.loads("".join(lines()))
        records = list(_list_records(value, where))
    except (ValueError, RecursionError) as error:  # not JSON, or too deep
        if path.suffix not in (".json", ".jsonl", ".ndjson"):
            return None
        raise InputError(f"{where} is not a list of videos ({error})") from error
    if not records:
        raise InputError(f"{where} is empty")
    return _make_table(where, "JSON", lambda: iter(records))


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), (dict, list))
    except (ValueError, RecursionError):
        return False


def _parse_lines(lines: Iterator[str], where: str) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}, line {number}, is not JSON ({error})") from error
            yield from _unfold(value) if isinstance(value, dict) else [value]


def _make_table(where: str, form: str, read: Callable[[], Iterator[Any]]) -> Table:
    """Make a table of objects, of lists of cells, or of single names."""
    sample = list(islice(read(), SAMPLE_ROWS))
    kinds = {type(record) for record in sample}
    if kinds == {dict}:
        columns = list(dict.fromkeys(chain.from_iterable(sample)))

        def read_rows() -> Iterator[Row]:
            for record in read():
                if not isinstance(record, dict):
                    raise InputError(f"{where} has objects and other values: {json.dumps(record)[:80]}")
                yield [record.get(name) for name in columns]

        return Table(where, form, columns, read_rows)
    if kinds in ({list}, {str}):
        return Table(where, form, None, lambda: (row if isinstance(row, list) else [row] for row in read()))
    raise InputError(f"{where} is not a list of videos: it has {', '.join(sorted(kind.__name__ for kind in kinds))}")


def _list_records(value: Any, where: str) -> Iterator[Any]:
    """Yield one record a video, or a segment of one, of a list, of an object by id, or of what either is wrapped in."""
    if isinstance(value, list):
        for entry in value:
            yield from _unfold(entry) if isinstance(entry, dict) else [entry]
        return
    if not isinstance(value, dict):
        raise InputError(f"{where} is not a list of videos: it is a {type(value).__name__}")
    if isinstance(value.get("database"), dict):  # ActivityNet's, HACS', THUMOS', COIN's
        value = value["database"]
    lists = {key: entries for key, entries in value.items() if isinstance(entries, list)}
    tables = [key for key, entries in lists.items() if entries and all(isinstance(entry, dict) for entry in entries)]
    if tables and len(tables) < len(value) and set(value) & {"info", "version", "data", "videos", *NESTED}:
        if len(tables) > 1:
            raise InputError(f"{where} holds several lists ({', '.join(tables)}): give one in a file of its own")
        yield from _list_records(value[tables[0]], where)
        return
    for key, entry in value.items():
        if isinstance(entry, dict):
            yield from _unfold({"id": key, **entry})
        elif isinstance(entry, list):
            yield from ([key, item] for item in entry)
        else:
            yield [key, entry]


def _unfold(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an object once per annotation in it, with that one's own entries."""
    outer = {key: value for key, value in entry.items() if key not in NESTED}
    inner = next((entry[name] for name in NESTED if entry.get(name)), None)
    times = next((entry[name] for name in ("timestamps", "segments") if isinstance(entry.get(name), list)), None)
    if isinstance(inner, dict):
        yield {**outer, **inner}
    elif isinstance(inner, list) and all(isinstance(item, dict) for item in inner):
        yield from ({**outer, **item} for item in inner)
    elif times and all(isinstance(pair, list) and len(pair) == 2 for pair in times):  # ActivityNet Captions
        parallel = [key for key, value in outer.items() if isinstance(value, list) and len(value) == len(times)]
        for number, segment in enumerate(times):
            yield {**outer, **{key: outer[key][number] for key in parallel}, "segment": segment}
    else:
        yield entry


def _read_parquet(path: Path, where: str) -> Table:
    parquet = import_pyarrow(where)
    try:
        columns = parquet.ParquetFile(path).schema_arrow.names
    except (OSError, ValueError) as error:
        raise InputError(f"{where} is damaged or no Parquet ({error})") from error

    def read_rows() -> Iterator[Row]:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=4096):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    return Table(where, "Parquet", columns, read_rows)
