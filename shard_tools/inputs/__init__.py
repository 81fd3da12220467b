"""What to shard: find the videos of a folder, a list or an archive, and give each a name, a label and a location."""

import glob
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from common.errors import InputError
from pipeline.reading.storage import is_remote
from shard_tools.encoding.source import VIDEO_EXTENSIONS
from shard_tools.inputs import folders, lerobot
from shard_tools.inputs.classes import LabelMap, assign_class_ids, read_label_map
from shard_tools.inputs.item import Item, Location, Segment, Skipped, TarMember, is_hidden
from shard_tools.inputs.lists import ListReader
from shard_tools.inputs.options import ListOptions
from shard_tools.inputs.table import Inputs
from shard_tools.inputs.table_reader import require_uncompressed
from shard_tools.inputs.tars import list_tars

__all__ = [
    "Inputs", "Item", "LabelMap", "ListOptions", "Location", "Segment", "Skipped", "TarMember", "assign_class_ids",
    "read_inputs", "read_label_map",
]  # fmt: skip

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # of Hugging Face's folders


def read_inputs(inputs: str, options: ListOptions | None = None, skipped: Skipped | None = None) -> Inputs:
    """Find all videos of `inputs`; `skipped` counts files without a video's name.

    `inputs` is a folder (labels: the names of its sub-folders, if it has any), a tar or a folder of tars, a list (or -
    for stdin), lists whose names match a pattern, or a URL of a folder. Raise InputError if nothing is found.
    """
    skipped, options = skipped or Skipped(), options or ListOptions()
    found, path = Inputs(), Path(inputs)
    if inputs == "-":
        with tempfile.NamedTemporaryFile() as copy:  # lists are read more than once
            shutil.copyfileobj(sys.stdin.buffer, copy)
            copy.flush()
            _read_list(Path(copy.name), found, options, "stdin")
    elif is_remote(inputs):
        found.add(folders.list_url(inputs, skipped))
        found.label_by_folder(options, inputs)
    elif path.is_dir():
        _read_folder(path, found, options, skipped)
    elif path.suffix == ".tar" and path.exists():
        require_uncompressed(path)
        found.add(list_tars([path], path.parent, skipped, options.label))
        found.label_by_folder(options, inputs, num_outer=1)
    elif folders.has_video_extension(path.name) and path.exists():
        found.add([folders.make_item(path.name, path)])
    else:
        lists = [inputs] if path.exists() else sorted(glob.glob(inputs))
        if not lists:
            raise InputError(f"{path} does not exist: give a folder of videos or a list of them")
        for name in lists:
            _read_list(Path(name), found, options)
    found.deduplicate(options.unlabeled, options.constant_label)
    if not found.has_only_arrays:  # beside videos they are features of these, or tables
        found.skip_arrays(skipped, "arrays beside videos")
    if not len(found):
        looked_for = f"looked for .mp4, .avi, .mkv, .webm and {len(VIDEO_EXTENSIONS) - 4} other kinds of files"
        raise InputError("; ".join([f"no video found in {inputs}: {looked_for}", *skipped.lines()]))
    return found


def _read_list(path: Path, found: Inputs, options: ListOptions, name: str = "", prefix: str = "") -> None:
    reader = ListReader(path, name or str(path), options, Path() if name else path.parent)
    found.add(item._replace(source=prefix + item.source) if prefix else item for item in reader.read())
    found.notes.append(reader.describe())


def _read_folder(path: Path, found: Inputs, options: ListOptions, skipped: Skipped) -> None:
    """Read the first that there is: metadata, a data set of LeRobot, videos, tars, tables with videos, frames."""
    if tables := [path / name for name in METADATA if (path / name).is_file()]:
        _read_list(tables[0], found, options)
        return
    if splits := {table.parent: table for name in METADATA[::-1] for table in path.glob(f"*/{name}")}:
        _read_splits(path, splits, found, options)
        return
    if sets := lerobot.find_sets(path):
        for folder in sets:
            found.add(lerobot.list_episodes(folder, path))
        found.notes.append(f"{path} is a data set of LeRobot: a sample an episode and camera, no labels")
        return
    found.add(folders.list_folder(path, skipped))
    tars = [tar for tar in sorted(path.glob("*.tar")) if not is_hidden(tar.name)]
    if tars and found.has_only_arrays:  # tables of our shards are arrays
        found.skip_arrays(skipped, "arrays beside tars")
        found.add(list_tars(tars, path, skipped, options.label))
        found.label_by_folder(options, str(tars[0] if len(tars) == 1 else path), num_outer=1)
        return
    for tar in tars:
        skipped.add("tars, which are read only where no videos lie beside them", tar.name)
    if not len(found) and (parquet := sorted(path.rglob("*.parquet"))):
        skipped.remove(folders.TABLES)
        names = {table: table.name.partition("-")[0] for table in parquet}  # train-00000-of-00002.parquet
        unwanted = _find_unwanted(names.values(), options, path)
        for table in parquet:
            if names[table] not in unwanted:
                _read_list(table, found, replace(options, subset=None))
        return
    if not len(found) and skipped.remove(folders.FRAME_FOLDERS):
        found.add(folders.list_frame_folders(path))
        note = "folders of numbered pictures are read as videos, a picture a frame: no photos should be among them"
        found.notes.append(f"{len(found)} {note}")
    found.label_by_folder(options, str(path))


def _read_splits(path: Path, tables: dict[Path, Path], found: Inputs, options: ListOptions) -> None:
    """Read folders by the metadata of each. Raise InputError if one with videos has none."""
    inner = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and not is_hidden(entry.name)]
    unwanted = _find_unwanted((folder.name for folder in inner), options, path)
    for folder in inner:
        if folder in tables and folder.name not in unwanted:
            _read_list(tables[folder], found, replace(options, subset=None), prefix=f"{folder.name}/")
        elif folder.name not in unwanted and any(folders.list_folder(folder, Skipped())):
            what = f"{next(iter(tables.values()))} describes videos, and there is none for those in {folder}"
            raise InputError(f"{what}: give one of the folders as INPUT")


def _find_unwanted(names: Iterable[str], options: ListOptions, path: Path) -> set[str]:
    """Return the names that are not of the wanted subset, if all are names of subsets."""
    groups = {name: folders.GROUPS.get(name.lower()) for name in names}
    return folders.choose_subset(groups, options.subset, str(path)) if groups and all(groups.values()) else set()
