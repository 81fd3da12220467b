"""What to shard: find the videos of a folder, a list or an archive, and give each a name, a label and a place."""

import csv
import json
import os
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from errors import InputError
from pipeline.shards import read_dataset_info
from shard_tools.source import VIDEO_EXTENSIONS

LABEL_COLUMNS = ("label", "class", "template")
MOST_DIGITS = 9  # of a class's number
PATH_COLUMNS = ("path", "video", "clip", "file", "filename", "video_path")
KINETICS_COLUMNS = {"youtube_id", "time_start", "time_end"}


@dataclass(frozen=True, slots=True)
class Item:
    """One input video."""

    source: str  # its name in all reports: the path relative to the input, with /
    location: str  # where its bytes are: a path, a URL, or <tar>::<offset>:<size>:<member>
    label: str | None = None
    size: int = 0  # bytes, 0 where unknown
    problem: str | None = None  # why it cannot be used, if that is already known
    piece: int = 0  # number of the piece, where a long video is split


def is_url(location: str) -> bool:
    return "://" in location


def read_inputs(inputs: str, root: str | None, unlabelled: bool) -> list[Item]:
    """All videos of `inputs` in a stable order, each source once.

    `inputs` is a folder (labels: the names of its sub-folders, if it has any), a tar or a folder of tars, a list
    (.csv, .tsv, .txt, .json, or - for stdin), or a URL of a folder. `root` is where a list's paths start; by default
    the list's own folder. With `unlabelled` no labels are read. Raises InputError if nothing is found.
    """
    if inputs == "-":
        items = _from_lines(sys.stdin.read().splitlines(), "stdin", Path(root or "."), " ")
    elif is_url(inputs):
        items = _from_url(inputs)
    else:
        items = _from_path(Path(inputs), root)
    unique = _each_once(items)
    if unlabelled:
        unique = [replace(item, label=None) for item in unique]
    elif any(item.label is not None for item in unique):
        unique = [item if item.label is not None or item.problem else _unlabelled(item) for item in unique]
    if not unique:
        raise InputError(f"no video found in {inputs}: looked for {', '.join(sorted(VIDEO_EXTENSIONS))} files")
    return sorted(unique, key=lambda item: item.source)


def _unlabelled(item: Item) -> Item:
    return replace(item, problem="it has no label, others have one")


def _from_path(path: Path, root: str | None) -> list[Item]:
    if not path.exists():
        raise InputError(f"{path} does not exist: give a folder of videos or a list of them")
    if path.is_dir():
        tars = sorted(path.glob("*.tar"))
        return list(_from_folder(path)) or [item for tar in tars for item in _from_tar(tar)]
    if path.suffix == ".tar":
        return list(_from_tar(path))
    if path.suffix.lower().removeprefix(".") in VIDEO_EXTENSIONS:
        return [Item(path.name, str(path.absolute()), size=path.stat().st_size)]
    base = Path(root) if root else path.parent
    try:
        if path.suffix == ".json":
            return list(_from_json(json.loads(path.read_text(encoding="utf-8-sig")), path, base))
        lines = path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not a list of videos ({error})") from error
    separator = {".csv": ",", ".tsv": "\t"}.get(path.suffix, " ")
    return _from_lines(lines, str(path), base, separator)


def _from_folder(folder: Path) -> Iterator[Item]:
    """Videos below `folder`; those in a sub-folder have the first sub-folder's name as label."""
    seen: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_refuse_unlistable):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()  # a link that leads back up
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            path = Path(parent, name)
            if name.startswith(".") or path.suffix.lower().removeprefix(".") not in VIDEO_EXTENSIONS:
                continue
            relative = path.relative_to(folder)
            yield _local(relative.as_posix(), path, relative.parts[0] if len(relative.parts) > 1 else None)


def _refuse_unlistable(error: OSError) -> None:
    raise InputError(
        f"{error.filename} cannot be listed ({error.strerror}): make it readable, or move it away"
    ) from error


def _local(source: str, path: Path, label: str | None) -> Item:
    location = str(path.absolute())
    if path.is_symlink() and not path.exists():
        return Item(source, location, label, problem="it is a link to a file that does not exist")
    if not path.exists():
        return Item(source, location, label, problem="there is no such file")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        return Item(source, location, label, problem=f"it is {kind}, not a video file")
    if not os.access(path, os.R_OK):
        return Item(source, location, label, problem="permission to read it is missing")
    return Item(source, location, label, size=path.stat().st_size)


def _from_url(url: str) -> list[Item]:
    try:
        filesystem, folder = fsspec.core.url_to_fs(url)
        found = filesystem.find(folder, detail=True)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(f"{url} cannot be listed ({error})") from error
    items = []
    for path, status in found.items():
        relative = PurePosixPath(path).relative_to(PurePosixPath(folder))
        if relative.suffix.lower().removeprefix(".") in VIDEO_EXTENSIONS and not relative.name.startswith("."):
            label = relative.parts[0] if len(relative.parts) > 1 else None
            size = int(status.get("size") or 0)
            items.append(Item(str(relative), filesystem.unstrip_protocol(path), label, size))
    return items


def _from_tar(path: Path) -> Iterator[Item]:
    """Members of a WebDataset of videos; the label stands in a member <key>.cls, <key>.txt or <key>.json.

    In shards of ours it is the number of a class of the dataset beside them.
    """
    is_ours = path.with_suffix(".samples.jsonl").is_file()
    classes = read_dataset_info(path.parent).classes if is_ours else []
    labels: dict[str, str | None] = {}
    videos: list[tuple[str, tarfile.TarInfo]] = []
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                key, _, extension = member.name.partition(".")
                content = archive.extractfile(member) if extension in ("cls", "txt", "json") else None
                if content is not None:
                    labels[key] = _label_in(content.read(), extension) or labels.get(key)
                elif extension.lower() in VIDEO_EXTENSIONS and member.isfile():
                    videos.append((key, member))
    except tarfile.TarError as error:
        raise InputError(f"{path} is not a whole tar file ({error})") from error
    for key, member in videos:
        location = f"{path.absolute()}::{member.offset_data}:{member.size}:{member.name}"
        label = labels.get(key)
        if is_ours and label is not None:
            label = classes[int(label)]
        yield Item(f"{path.name}/{member.name}", location, label, member.size)


def _label_in(content: bytes, extension: str) -> str | None:
    text = content.decode("utf-8", "replace").strip()
    if extension != "json":
        return text or None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return _first(value, LABEL_COLUMNS) if isinstance(value, dict) else None


def _first(entry: dict[str, Any], columns: Iterable[str]) -> str | None:
    """The first of these that is there and not null."""
    return next((str(entry[name]) for name in columns if entry.get(name) is not None), None)


def _from_json(value: Any, path: Path, root: Path) -> Iterator[Item]:
    """A list of objects: Something-Something's {"id", "template"}, or {"path", "label"}."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InputError(f"{path} is not a list of objects with a path (or id) and a label (or template)")
    for entry in value:
        name = _first(entry, (*PATH_COLUMNS, "id"))
        if name is None:
            raise InputError(f"{path} has an entry without a path or an id: {json.dumps(entry)[:80]}")
        label = _first(entry, LABEL_COLUMNS)
        if "template" in entry:
            # The label map writes "Pushing something", the annotations "Pushing [something]".
            label = str(entry["template"]).replace("[", "").replace("]", "")
        yield _listed(name, label, root)


def _from_lines(lines: list[str], where: str, root: Path, separator: str) -> list[Item]:
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise InputError(f"{where} is empty")
    if separator == " ":
        separator = "\t" if "\t" in lines[0] else "," if "," in lines[0] else " "
    if separator == " ":
        return [_listed(*_path_and_label(line, root), root) for line in lines]
    rows = [_cells(line, separator, where) for line in lines]
    header = [cell.strip().lower() for cell in rows[0]]
    if set(header) >= KINETICS_COLUMNS:
        return [_kinetics(dict(zip(header, row, strict=False)), root) for row in rows[1:]]
    path_column = next((header.index(name) for name in PATH_COLUMNS if name in header), None)
    if path_column is None:
        return [_listed(row[0].strip(), row[1].strip() if len(row) > 1 else None, root) for row in rows]
    label_column = next((header.index(name) for name in LABEL_COLUMNS if name in header), None)
    return [
        _listed(row[path_column].strip(), _cell(row, label_column), root) for row in rows[1:] if len(row) > path_column
    ]


def _cells(line: str, separator: str, where: str) -> list[str]:
    """One line on its own: a quote that is never closed would swallow all the lines after it."""
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
    if not path or (root / line).exists():
        return line, None
    return path.strip(), label


def _kinetics(row: dict[str, str], root: Path) -> Item:
    """Kinetics names a clip <id>_<start>_<end>.mp4, or <id>.mp4, in the folder of its class or in none."""
    label, identity = row.get("label", "").strip() or None, row.get("youtube_id", "").strip()
    try:
        times = f"_{int(float(row['time_start'])):06d}_{int(float(row['time_end'])):06d}"
    except (KeyError, ValueError):
        times = ""
    names = [f"{identity}{times}", identity]
    folders = [name for name in (label, (label or "").replace(" ", "_"), "") if name is not None]
    candidates = [str(PurePosixPath(folder, name)) for name in names for folder in dict.fromkeys(folders)]
    found = next((name for name in candidates if _with_extension(name, root) is not None), candidates[0])
    return _listed(found, label, root)


def _with_extension(name: str, root: Path) -> Path | None:
    """The file that a list means by `name`: lists often leave out the extension."""
    path = root / name
    if path.exists() or path.is_symlink():
        return path
    return next((p for e in ("mp4", "webm", "mkv", "avi") if (p := path.with_name(f"{path.name}.{e}")).exists()), None)


def _listed(name: str, label: str | None, root: Path) -> Item:
    if is_url(name):
        return Item(name, name, label)
    path = _with_extension(name, root) or root / name
    relative = Path(os.path.relpath(path, root)) if path.is_absolute() else path
    inside = not relative.as_posix().startswith("..")
    source = relative.as_posix() if inside else path.as_posix()
    return _local(source, path, label or None)


def _each_once(items: Iterable[Item]) -> list[Item]:
    unique: dict[str, Item] = {}
    for item in items:
        first = unique.setdefault(item.source, item)
        if first.label != item.label:
            problem = f"it is listed with two labels, {first.label!r} and {item.label!r}"
            unique[item.source] = replace(first, problem=problem)
    return list(unique.values())


def read_label_map(path: Path) -> list[str]:
    """Class names by class id, from one name a line, or JSON: a list, {name: id} or {id: name}."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix != ".json":
            return [line.strip() for line in text.splitlines() if line.strip()]
        value = json.loads(text)
        if isinstance(value, list):
            return [str(name) for name in value]
        by_id = {int(key): str(name) for key, name in value.items()} if _is_by_id(value) else {}
        by_id = by_id or {int(identity): str(name) for name, identity in value.items()}
        return [by_id[identity] for identity in range(len(by_id))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path} is not a label map with ids from 0 ({error!r})") from error


def _is_by_id(value: dict[str, Any]) -> bool:
    return all(key.isdigit() for key in value) and not all(str(name).isdigit() for name in value.values())


def is_id(label: str) -> bool:
    """Whether a label can be the number of a class."""
    return label.isdecimal() and len(label) <= MOST_DIGITS and str(int(label)) == label


def class_names(items: Iterable[Item], known: list[str]) -> list[str]:
    """Class names by id: the `known` ones first, the others behind them in order.

    Labels that are all whole numbers, without leading zeros, are class ids already and stay what they are, if they are
    at least half of the ids up to the largest: years, say, are names.
    """
    labels = {item.label for item in items if item.label is not None}
    numbers = labels | set(known)
    if labels and all(is_id(name) for name in numbers):
        count = max(map(int, numbers)) + 1
        by_number = [str(identity) for identity in range(count)] if count <= 2 * len(numbers) else []
        if by_number and by_number[: len(known)] == known:
            return by_number
    return known + sorted(labels - set(known))
