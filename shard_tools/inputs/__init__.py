"""What to shard: find the videos of a folder, a list or an archive, and give each a name, a label and a place."""

import io
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from common.errors import InputError
from shard_tools.encoding.source import VIDEO_EXTENSIONS
from shard_tools.inputs.classes import assign_class_ids, read_label_map
from shard_tools.inputs.folders import from_folder, from_url, local_item
from shard_tools.inputs.item import Item, Skipped, TarMember, is_hidden, is_url
from shard_tools.inputs.lists import from_lines, from_list
from shard_tools.inputs.table import Inputs
from shard_tools.inputs.tars import from_tars, refuse_compressed

__all__ = ["Inputs", "Item", "Skipped", "TarMember", "assign_class_ids", "is_url", "read_inputs", "read_label_map"]


def read_inputs(inputs: str, root: str | None, unlabelled: bool, skipped: Skipped | None = None) -> Inputs:
    """All videos of `inputs` in a stable order, each source once; `skipped` is told what has no video's name.

    `inputs` is a folder (labels: the names of its sub-folders, if it has any), a tar or a folder of tars, a list
    (.csv, .tsv, .txt, .json, or - for stdin), or a URL of a folder. `root` is where a list's paths start; by default
    the list's own folder. With `unlabelled` no labels are read. Raises InputError if nothing is found.

    They stream from folders, from lists of lines and from tar to tar; JSON, one tar and the listing of a store are
    read whole. Within `with`, a disk that is full of temporary files is an InputError too.
    """
    skipped = skipped or Skipped()
    found = Inputs()
    with found.room():
        _find(inputs, root, skipped, found)
        found.deduplicate(unlabelled)
        if not found.only_arrays:  # beside videos they are features of these, or tables
            found.pass_over_arrays(skipped, "arrays beside videos")
        if not len(found):
            looked_for = f"looked for {', '.join(sorted(VIDEO_EXTENSIONS))} files"
            raise InputError("; ".join([f"no video found in {inputs}: {looked_for}", *skipped.lines()]))
    return found


def _find(inputs: str, root: str | None, skipped: Skipped, found: Inputs) -> None:
    if inputs == "-":
        lines = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", errors="surrogateescape")
        _add(found, from_lines(lines, "stdin", Path(root or "."), " "))
    elif is_url(inputs):
        _add(found, from_url(inputs, skipped))
    else:
        _find_in_path(Path(inputs), root, skipped, found)


def _find_in_path(path: Path, root: str | None, skipped: Skipped, found: Inputs) -> None:
    if not path.exists():
        raise InputError(f"{path} does not exist: give a folder of videos or a list of them")
    if path.is_dir():
        _add(found, from_folder(path, skipped))
        tars = [tar for tar in sorted(path.glob("*.tar")) if not is_hidden(tar.name)]
        if tars and found.only_arrays:  # tables of our shards are arrays
            found.pass_over_arrays(skipped, "arrays beside tars")
            _add(found, from_tars(tars, path, skipped))
            return
        for tar in tars:
            skipped.add("tars, which are read only where no videos lie beside them", tar.name)
    elif path.suffix == ".tar":
        _add(found, from_tars([path], path.parent, skipped))
    elif path.suffix.lower().removeprefix(".") in VIDEO_EXTENSIONS:
        _add(found, [local_item(path.name, path, None)])
    else:
        refuse_compressed(path)
        _add(found, from_list(path, Path(root) if root else path.parent))


def _add(found: Inputs, items: Iterable[Item]) -> None:
    found.add(map(_with_writable_name, items))


def _with_writable_name(item: Item) -> Item:
    """JSON can name what no file system can: half a surrogate pair."""
    try:
        item.source.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return replace(item, problem="its name is none that a file can have")
    return item
