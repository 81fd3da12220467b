"""Lists of videos: lines, tables, and the annotations of known datasets."""

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from common.errors import InputError
from pipeline.reading.storage import is_remote
from shard_tools.inputs.folders import make_item
from shard_tools.inputs.item import Item, one_label

LABEL_COLUMNS = ("label", "class", "template")
PATH_COLUMNS = ("path", "video", "clip", "file", "filename", "video_path")
OMITTED_EXTENSIONS = ("mp4", "webm", "mkv", "avi")
KINETICS_COLUMNS = {"youtube_id", "time_start", "time_end"}


def read_list(path: Path, root: Path) -> Iterator[Item]:
    """Yield the videos that a list file names, relative to `root`; raise InputError if it is no list."""
    try:
        if path.suffix == ".json":
            yield from _read_json(json.loads(path.read_text(encoding="utf-8-sig")), path, root)
            return
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too deep
        raise InputError(f"{path} is not a list of videos ({error})") from error
    separator = {".csv": ",", ".tsv": "\t"}.get(path.suffix, " ")
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        yield from read_lines(lines, str(path), root, separator)


def _read_json(value: Any, path: Path, root: Path) -> Iterator[Item]:
    """Read a list of objects: Something-Something's {"id", "template"}, or {"path", "label"}."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InputError(f"{path} is not a list of objects with a path (or id) and a label (or template)")
    for entry in value:
        name = find_first(entry, (*PATH_COLUMNS, "id"))
        if name is None:
            raise InputError(f"{path} has an entry without a path or an id: {json.dumps(entry)[:80]}")
        label = find_first(entry, LABEL_COLUMNS)
        if "template" in entry:
            # The label map writes "Pushing something", the annotations "Pushing [something]".
            label = str(entry["template"]).replace("[", "").replace("]", "")
        yield _make_item(name, label, root)


def read_lines(lines: Iterable[str], where: str, root: Path, separator: str) -> Iterator[Item]:
    """Yield the videos that lines name: `path label`, or the rows of a table, with or without a header."""
    lines = (line.rstrip("\n") for line in lines if line.strip())
    first = next(lines, None)
    if first is None:
        raise InputError(f"{where} is empty")
    if separator == " ":
        separator = "\t" if "\t" in first else "," if "," in first else " "
    lines = chain([first], lines)
    if separator == " ":
        yield from (_make_item(*_split_line(line, root), root) for line in lines)
        return
    rows: Iterator[list[str]] = (_split_row(line, separator, where) for line in lines)
    first_row = next(rows)
    header = [cell.strip().lower() for cell in first_row]
    if set(header) >= KINETICS_COLUMNS:
        yield from (_make_kinetics_item(dict(zip(header, row, strict=False)), root, where) for row in rows)
        return
    path_column, label_column = 0, 1
    if set(PATH_COLUMNS) & set(header):
        path_column = next(header.index(name) for name in PATH_COLUMNS if name in header)
        label_column = next((header.index(name) for name in LABEL_COLUMNS if name in header), len(header))
    else:
        rows = chain([first_row], rows)
    for row in rows:
        path, label = (row[it].strip() or None if it < len(row) else None for it in (path_column, label_column))
        yield _make_item(path, label, root) if path else _make_nameless_item(row, where)


def _make_nameless_item(row: Iterable[str], where: str) -> Item:
    return Item(f"{where}: {','.join(row)[:100]}", "", problem="this line names no video")


def _split_row(line: str, separator: str, where: str) -> list[str]:
    """Split one line on its own: a quote that is never closed would swallow all the lines after it."""
    csv.field_size_limit(max(csv.field_size_limit(), len(line)))  # a cell too long costs its line, not the list
    try:
        return next(csv.reader([line], delimiter=separator, strict=True))
    except csv.Error as error:
        raise InputError(f"{where} has a line that is not a table row ({error}): {line[:200]!r}") from error


def _split_line(line: str, root: Path) -> tuple[str, str | None]:
    """Split `path label`: the label is the last word, unless the whole line is a path."""
    line = line.strip()
    path, _, label = line.rpartition(" ")
    if not path or os.path.exists(root / line):  # Path's own raises where the line is longer than a name may be
        return line, None
    return path.strip(), label


def _make_kinetics_item(row: dict[str, str], root: Path, where: str) -> Item:
    """Kinetics names a clip <id>_<start>_<end>.mp4, or <id>.mp4, in the folder of its class or in none."""
    label, youtube_id = row.get("label", "").strip() or None, row.get("youtube_id", "").strip()
    if not youtube_id:
        return _make_nameless_item(row.values(), where)
    try:
        times = f"_{int(float(row['time_start'])):06d}_{int(float(row['time_end'])):06d}"
    except (KeyError, ValueError, OverflowError):
        times = ""
    folders = dict.fromkeys([*([label, label.replace(" ", "_")] if label else []), ""])
    names = [str(PurePosixPath(folder, name)) for name in (f"{youtube_id}{times}", youtube_id) for folder in folders]
    found = next((name for name in names if _find_file(name, root) is not None), names[0])
    return _make_item(found, label, root)


def _find_file(name: str, root: Path) -> Path | None:
    """Find the file that a list means by `name`: lists often omit the extension."""
    path = root / name
    if os.path.lexists(path):
        return path
    candidates = (path.with_name(f"{path.name}.{extension}") for extension in OMITTED_EXTENSIONS)
    return next(filter(os.path.exists, candidates), None)


def _make_item(name: str, label: str | None, root: Path) -> Item:
    if is_remote(name):
        is_half_a_pair = re.search("[\ud800-\udc7f\udd00-\udfff]", name)  # which JSON can name
        return Item(name, name, one_label(label), problem="no file can have its name" if is_half_a_pair else None)
    path = _find_file(name, root) or root / name
    relative = Path(os.path.relpath(path, root)) if path.is_absolute() else path
    is_inside = not relative.as_posix().startswith("..")
    return make_item((relative if is_inside else path).as_posix(), path, label or None)


def find_first(entry: dict[str, Any], columns: Iterable[str]) -> str | None:
    """Return the first of these values that is there and not null."""
    return next((str(entry[name]) for name in columns if entry.get(name) is not None), None)
