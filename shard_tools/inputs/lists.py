"""Lists of videos: lines, tables, and the annotations of known datasets."""

import csv
import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from common.errors import InputError
from shard_tools.inputs.folders import local_item
from shard_tools.inputs.item import Item, is_url

LABEL_COLUMNS = ("label", "class", "template")
PATH_COLUMNS = ("path", "video", "clip", "file", "filename", "video_path")
LEFT_OUT = ("mp4", "webm", "mkv", "avi")  # extensions that lists leave out
KINETICS_COLUMNS = {"youtube_id", "time_start", "time_end"}


def from_list(path: Path, root: Path) -> Iterator[Item]:
    """The videos that a list file names, in `root`; raises InputError if it is no list."""
    try:
        if path.suffix == ".json":
            yield from _from_json(json.loads(path.read_text(encoding="utf-8-sig")), path, root)
            return
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too deep
        raise InputError(f"{path} is not a list of videos ({error})") from error
    separator = {".csv": ",", ".tsv": "\t"}.get(path.suffix, " ")
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        yield from from_lines(lines, str(path), root, separator)


def _from_json(value: Any, path: Path, root: Path) -> Iterator[Item]:
    """A list of objects: Something-Something's {"id", "template"}, or {"path", "label"}."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InputError(f"{path} is not a list of objects with a path (or id) and a label (or template)")
    for entry in value:
        name = first_of(entry, (*PATH_COLUMNS, "id"))
        if name is None:
            raise InputError(f"{path} has an entry without a path or an id: {json.dumps(entry)[:80]}")
        label = first_of(entry, LABEL_COLUMNS)
        if "template" in entry:
            # The label map writes "Pushing something", the annotations "Pushing [something]".
            label = str(entry["template"]).replace("[", "").replace("]", "")
        yield _listed(name, label, root)


def from_lines(lines: Iterable[str], where: str, root: Path, separator: str) -> Iterator[Item]:
    lines = (line.rstrip("\n") for line in lines if line.strip())
    first = next(lines, None)
    if first is None:
        raise InputError(f"{where} is empty")
    if separator == " ":
        separator = "\t" if "\t" in first else "," if "," in first else " "
    lines = chain([first], lines)
    if separator == " ":
        return (_listed(*_path_and_label(line, root), root) for line in lines)
    rows = (_cells(line, separator, where) for line in lines)
    first_row = next(rows)
    header = [cell.strip().lower() for cell in first_row]
    if set(header) >= KINETICS_COLUMNS:
        return (_kinetics(dict(zip(header, row, strict=False)), root, where) for row in rows)
    path_column = next((header.index(name) for name in PATH_COLUMNS if name in header), None)
    if path_column is None:
        return (_tabled(row, 0, 1, root, where) for row in chain([first_row], rows))
    label_column = next((header.index(name) for name in LABEL_COLUMNS if name in header), None)
    return (_tabled(row, path_column, label_column, root, where) for row in rows)


def _tabled(row: list[str], path_column: int, label_column: int | None, root: Path, where: str) -> Item:
    path = _cell(row, path_column)
    return _nameless(row, where) if path is None else _listed(path, _cell(row, label_column), root)


def _nameless(row: Iterable[str], where: str) -> Item:
    return Item(f"{where}: {','.join(row)[:100]}", "", problem="this line names no video")


def _cells(line: str, separator: str, where: str) -> list[str]:
    """One line on its own: a quote that is never closed would swallow all the lines after it."""
    csv.field_size_limit(max(csv.field_size_limit(), len(line)))  # a cell too long costs its line, not the list
    try:
        return next(csv.reader([line], delimiter=separator, strict=True))
    except csv.Error as error:
        raise InputError(f"{where} has a line that is none of a table ({error}): {line[:200]!r}") from error


def _cell(row: list[str], column: int | None) -> str | None:
    return row[column].strip() or None if column is not None and column < len(row) else None


def _path_and_label(line: str, root: Path) -> tuple[str, str | None]:
    """`path label`: the label is the last word, unless the whole line is a path."""
    line = line.strip()
    path, _, label = line.rpartition(" ")
    if not path or os.path.exists(root / line):  # Path's own raises where the line is longer than a name may be
        return line, None
    return path.strip(), label


def _kinetics(row: dict[str, str], root: Path, where: str) -> Item:
    """Kinetics names a clip <id>_<start>_<end>.mp4, or <id>.mp4, in the folder of its class or in none."""
    label, identity = row.get("label", "").strip() or None, row.get("youtube_id", "").strip()
    if not identity:
        return _nameless(row.values(), where)
    try:
        times = f"_{int(float(row['time_start'])):06d}_{int(float(row['time_end'])):06d}"
    except (KeyError, ValueError, OverflowError):
        times = ""
    names = [f"{identity}{times}", identity]
    folders = [name for name in (label, (label or "").replace(" ", "_"), "") if name is not None]
    candidates = [str(PurePosixPath(folder, name)) for name in names for folder in dict.fromkeys(folders)]
    found = next((name for name in candidates if _with_extension(name, root) is not None), candidates[0])
    return _listed(found, label, root)


def _with_extension(name: str, root: Path) -> Path | None:
    """The file that a list means by `name`: lists often leave out the extension."""
    path = root / name
    if os.path.lexists(path):
        return path
    candidates = (path.with_name(f"{path.name}.{extension}") for extension in LEFT_OUT)
    return next(filter(os.path.exists, candidates), None)


def _listed(name: str, label: str | None, root: Path) -> Item:
    if is_url(name):
        return Item(name, name, label)
    path = _with_extension(name, root) or root / name
    relative = Path(os.path.relpath(path, root)) if path.is_absolute() else path
    inside = not relative.as_posix().startswith("..")
    source = relative.as_posix() if inside else path.as_posix()
    return local_item(source, path, label or None)


def first_of(entry: dict[str, Any], columns: Iterable[str]) -> str | None:
    """The first of these that is there and not null."""
    return next((str(entry[name]) for name in columns if entry.get(name) is not None), None)
