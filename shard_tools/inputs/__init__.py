"""What to shard: find the videos of a folder, a list or an archive, and give each a name, a label and a place."""

import io
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from errors import InputError
from pipeline.arrays import CONTAINER
from shard_tools.inputs.classes import class_names, is_id, read_label_map
from shard_tools.inputs.folders import from_folder, from_url, local_item
from shard_tools.inputs.item import Item, Member, Skipped, is_hidden, is_url
from shard_tools.inputs.lists import from_lines, from_list
from shard_tools.inputs.tars import from_tars, refuse_compressed
from shard_tools.source import VIDEO_EXTENSIONS

__all__ = ["Item", "Member", "Skipped", "class_names", "is_id", "is_url", "read_inputs", "read_label_map"]


def read_inputs(inputs: str, root: str | None, unlabelled: bool, skipped: Skipped | None = None) -> list[Item]:
    """All videos of `inputs` in a stable order, each source once; `skipped` is told what has no video's name.

    `inputs` is a folder (labels: the names of its sub-folders, if it has any), a tar or a folder of tars, a list
    (.csv, .tsv, .txt, .json, or - for stdin), or a URL of a folder. `root` is where a list's paths start; by default
    the list's own folder. With `unlabelled` no labels are read. Raises InputError if nothing is found.
    """
    skipped = skipped or Skipped()
    if inputs == "-":
        lines = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", errors="surrogateescape").read().split("\n")
        items = from_lines(lines, "stdin", Path(root or "."), " ")
    elif is_url(inputs):
        items = from_url(inputs, skipped)
    else:
        items = _from_path(Path(inputs), root, skipped)
    unique = _each_once(map(_with_writable_name, items))
    if unlabelled:
        unique = [replace(item, label=None) for item in unique]
    elif any(item.label is not None for item in unique):
        unique = [item if item.label is not None or item.problem else _unlabelled(item) for item in unique]
    unique = _without_arrays(unique, skipped)
    if not unique:
        looked_for = f"looked for {', '.join(sorted(VIDEO_EXTENSIONS))} files"
        raise InputError("; ".join([f"no video found in {inputs}: {looked_for}", *skipped.lines()]))
    return sorted(unique, key=lambda item: item.source)


def _without_arrays(items: list[Item], skipped: Skipped) -> list[Item]:
    """Arrays count where there is nothing else: beside videos they are features of these, or tables."""
    kept = [item for item in items if not _is_array(item)]
    if not kept or len(kept) == len(items):
        return items
    for item in filter(_is_array, items):
        skipped.add("arrays beside videos", item.source)
    return kept


def _is_array(item: Item) -> bool:
    return item.source.lower().endswith(f".{CONTAINER}")


def _unlabelled(item: Item) -> Item:
    return replace(item, problem="it has no label, others have one")


def _from_path(path: Path, root: str | None, skipped: Skipped) -> list[Item]:
    if not path.exists():
        raise InputError(f"{path} does not exist: give a folder of videos or a list of them")
    if path.is_dir():
        videos = list(from_folder(path, skipped))
        tars = [tar for tar in sorted(path.glob("*.tar")) if not is_hidden(tar.name)]
        if tars and all(map(_is_array, videos)):  # tables of our shards are arrays
            for item in videos:
                skipped.add("arrays beside tars", item.source)
            return from_tars(tars, path, skipped)
        for tar in tars:
            skipped.add("tars, which are read only where no videos lie beside them", tar.name)
        return videos
    if path.suffix == ".tar":
        return from_tars([path], path.parent, skipped)
    if path.suffix.lower().removeprefix(".") in VIDEO_EXTENSIONS:
        return [local_item(path.name, path, None)]
    refuse_compressed(path)
    return from_list(path, Path(root) if root else path.parent)


def _with_writable_name(item: Item) -> Item:
    """JSON can name what no file system can: half a surrogate pair."""
    try:
        item.source.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return replace(item, problem="its name is none that a file can have")
    return item


def _each_once(items: Iterable[Item]) -> list[Item]:
    unique: dict[str, Item] = {}
    for item in items:
        first = unique.setdefault(item.source, item)
        if first.label != item.label:
            problem = f"it is listed with two labels, {first.label!r} and {item.label!r}"
            unique[item.source] = replace(first, problem=problem)
    return list(unique.values())
