"""What to shard: find the videos of a folder, a list or an archive, and give each a name, a label and a location."""

import glob
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

from adamae.common.errors import InputError
from adamae.pipeline.reading.storage import is_remote
from adamae.shard_tools.inputs import folders
from adamae.shard_tools.inputs.classes import LabelMap, assign_class_ids, read_label_map
from adamae.shard_tools.inputs.item import Item, ListOptions, Skipped
from adamae.shard_tools.inputs.item_store import ItemStore
from adamae.shard_tools.inputs.lists import ListReader
from adamae.shard_tools.inputs.location import Location, TarMember
from adamae.shard_tools.inputs.tars import list_tars

__all__ = [
    "Item",
    "ItemStore",
    "LabelMap",
    "ListOptions",
    "Location",
    "Skipped",
    "TarMember",
    "assign_class_ids",
    "read_inputs",
    "read_label_map",
]

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # of Hugging Face's folders


def read_inputs(inputs: str, options: ListOptions | None = None) -> ItemStore:
    """Find all videos of `inputs`; `skipped` of the result counts files without a video's name.

    `inputs` is a folder (labels: the names of its sub-folders, if it has any), a tar or a folder of tars, a list (-: on
    stdin), lists whose names match a pattern, or a URL of a folder. Raise InputError if nothing is found.
    """
    options = options or ListOptions()
    found, path = ItemStore(), Path(inputs)
    if inputs == "-":
        with tempfile.NamedTemporaryFile() as copy:  # lists are read more than once
            shutil.copyfileobj(sys.stdin.buffer, copy)
            copy.flush()
            _read_list(
                Path(copy.name), found, replace(options, root=options.root or "."), where="stdin"
            )
    elif is_remote(inputs):
        found.add(folders.list_url(inputs, found.skipped))
        found.label_by_folder(options, inputs)
    elif path.is_dir():
        _read_folder(path, found, options)
    elif path.suffix == ".tar" and path.exists():
        found.add(list_tars([path], path.parent, found.skipped, options.label))
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
        found.skip_arrays("arrays beside videos")
    if not len(found):
        what = f"no video found in {inputs} (.mp4, .avi, .mkv, .webm, …)"
        raise InputError("; ".join([what, *found.skipped.lines()]))
    return found


def _read_list(
    path: Path, found: ItemStore, options: ListOptions, prefix: str = "", where: str = ""
) -> None:
    reader = ListReader(path, options, where or str(path))
    found.add(msgspec.structs.replace(item, source=prefix + item.source) for item in reader.read())
    found.notes.append(reader.describe())


def _read_folder(path: Path, found: ItemStore, options: ListOptions) -> None:
    """Read the first that there is: metadata, a data set of LeRobot, videos, tars, tables, folders of frames."""
    inner = [folder for folder in sorted(path.glob("*/")) if not folders.is_hidden(folder.name)]
    if table := _find_metadata(path):
        _read_list(table, found, options)
        return
    if any(map(_find_metadata, inner)):
        inner = [
            folder
            for folder in inner
            if _find_metadata(folder) or any(folders.list_folder(folder, Skipped()))
        ]
        for folder in _choose_subset(inner, options, path):
            if not (table := _find_metadata(folder)):
                what = f"{folder} has no metadata, as other folders beside it have"
                raise InputError(f"{what}: give one of these as INPUT")
            _read_list(table, found, options, f"{folder.name}/")
        return
    if sets := folders.find_lerobot_sets(path):
        for folder in sets:
            found.add(folders.list_episodes(folder, path))
        found.notes.append(
            f"{path} is a data set of LeRobot: a sample an episode and camera, no labels"
        )
        return
    found.add(folders.list_folder(path, found.skipped))
    tars = [tar for tar in sorted(path.glob("*.tar")) if not folders.is_hidden(tar.name)]
    if tars and found.has_only_arrays:  # tables of our shards are arrays
        found.skip_arrays("arrays beside tars")
        found.add(list_tars(tars, path, found.skipped, options.label))
        found.label_by_folder(options, str(tars[0] if len(tars) == 1 else path), num_outer=1)
        return
    for tar in tars:
        found.skipped.add("tars, which are read only where no videos lie beside them", tar.name)
    if not len(found) and (names := sorted(found.skipped.take(folders.PARQUET))):
        tables = [
            path / name for name in names if not (path / name).with_suffix(".tar").exists()
        ]  # video2dataset's
        for table in _choose_subset(tables, options, path):
            _read_list(table, found, options)
        return
    if not len(found) and (frames := found.skipped.take(folders.FRAME_FOLDERS)):
        found.add(Item(name, str((path / name).absolute())) for name in frames)
        note = "folders of numbered pictures are read as videos, a picture a frame: no photos should be among them"
        found.notes.append(f"{len(found)} {note}")
    found.label_by_folder(options, str(path))


def _find_metadata(folder: Path) -> Path | None:
    return next((folder / name for name in METADATA if (folder / name).is_file()), None)


def _choose_subset(places: list[Path], options: ListOptions, where: Path) -> list[Path]:
    """Leave out folders, or tables, of subsets that are not wanted, if all are called by subsets."""
    names = {
        place: re.split("[-.]", place.name)[0] for place in places
    }  # train-00000-of-00002.parquet
    groups = {name: folders.GROUPS.get(name.lower()) for name in names.values()}
    unwanted = (
        folders.choose_subset(groups, options.subset, str(where)) if all(groups.values()) else set()
    )
    return [place for place in places if names[place] not in unwanted]
