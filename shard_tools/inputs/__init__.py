"""Find the videos of a folder, a list or an archive: each gets a name, a label and a location."""

import glob
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.common.logging import format_count
from adamae.shard_tools.inputs import class_folders, folders
from adamae.shard_tools.inputs.classes import LabelMap, assign_class_ids, read_label_map
from adamae.shard_tools.inputs.foreign import refuse_foreign
from adamae.shard_tools.inputs.item import Item, ListOptions, Skipped
from adamae.shard_tools.inputs.item_store import ItemStore
from adamae.shard_tools.inputs.lists import ListReader
from adamae.shard_tools.inputs.location import Location, TarMember
from adamae.shard_tools.inputs.reading import Reading
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

# The tables that Hugging Face puts beside the videos of a folder.
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def read_inputs(inputs: str, options: ListOptions | None = None) -> ItemStore:
    """Find all videos of `inputs`; `skipped` of the result counts files without a video's name.

    `inputs` is a folder (labels: the names of its sub-folders, if it has any), a tar or a folder of
    tars, a list (-: on stdin), a pattern that names of lists match, or a URL of a folder. Raise
    InputError if nothing is found.
    """
    options = options or ListOptions()
    store = ItemStore()
    path = Path(inputs)
    if inputs == "-":
        _read_stdin(store, options)
    elif is_remote(inputs):
        store.add(folders.list_url(inputs, store.skipped))
        store.label_by_folder(options, inputs)
    elif path.is_dir():
        _read_folder(path, store, options)
    elif path.suffix == ".tar" and path.exists():
        _read_tars([path], path.parent, store, options)
    elif folders.has_video_extension(path.name) and path.exists():
        store.add([folders.make_item(path.name, path)])
    else:
        for list_path in _match_lists(inputs):
            _read_list(list_path, store, options)
    _require_used(options, store, inputs)
    store.deduplicate(options.unlabeled, options.constant_label)
    if not store.has_only_arrays:
        # Beside videos, arrays are features of these, or tables.
        store.skip_arrays("arrays beside videos")
    if not len(store):
        what = f"no video found in {inputs} (.mp4, .avi, .mkv, .webm, …)"
        raise InputError("; ".join([what, *store.skipped.lines()]))
    return store


def _require_used(options: ListOptions, store: ItemStore, inputs: str) -> None:
    """Raise InputError if an option is about what the input does not have."""
    if options.columns is not None and not store.has_columns:
        raise InputError(f"--columns is for lists and tars, and {inputs} holds none: leave it out")
    if options.label_folder and len(store) and not store.has_labels:
        raise InputError(
            f"--label is folder:{options.label_folder}, and no path in {inputs} has as many folders"
        )


def _match_lists(inputs: str) -> list[Path]:
    """Return the list of this name, or those that match it. Raise InputError if there is none."""
    path = Path(inputs)
    if path.exists():
        return [path]
    paths = [Path(name) for name in sorted(glob.glob(inputs))]
    if not paths:
        raise InputError(f"{path} does not exist: give a folder of videos or a list of them")
    return paths


def _read_stdin(store: ItemStore, options: ListOptions) -> None:
    # A list is read several times (its encoding, its columns, its rows), so stdin is copied first.
    with tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        # Without --root, names are relative to the current folder, not to that of the copy.
        options = replace(options, root=options.root or ".")
        _read_list(Path(copy.name), store, options, where="stdin")


def _read_list(
    path: Path, store: ItemStore, options: ListOptions, prefix: str = "", where: str = ""
) -> None:
    """Add the items of a list, each source with `prefix`; messages call the list `where`."""
    refuse_foreign(path, where or str(path))
    reader = ListReader(path, options, where or str(path))
    store.add(msgspec.structs.replace(item, source=prefix + item.source) for item in reader.read())
    store.has_columns = True
    store.has_groups = "group" in reader.reading.columns
    store.notes.append(reader.describe())


def _read_tars(tars: list[Path], folder: Path, store: ItemStore, options: ListOptions) -> None:
    label = None
    if options.columns is not None:
        columns = Reading.parse(options.columns).columns
        label = columns.get("label")
        if label is None or len(columns) > 1:
            raise InputError("--columns: give label=NAME for tars, the entry of their .json")
    store.has_columns = True
    store.add(list_tars(tars, folder, store.skipped, label))
    # The first folder of a source is its tar's name, which is no class.
    where = tars[0] if len(tars) == 1 else folder
    store.label_by_folder(options, str(where), num_outer=1)


def _read_folder(folder: Path, store: ItemStore, options: ListOptions) -> None:
    """Read the first of these that there is: metadata, LeRobot, videos, tars, tables, frames."""
    if _read_metadata(folder, store, options):
        return
    if _read_lerobot(folder, store):
        return
    store.add(folders.list_folder(folder, store.skipped))
    tars = list(_visible(folder, "*.tar"))
    if tars and store.has_only_arrays:
        # Beside the tars of our own shards lie tables, which are arrays.
        store.skip_arrays("arrays beside tars")
        _read_tars(tars, folder, store, options)
        return
    for tar in tars:
        store.skipped.add("tars, which are read only where no videos lie beside them", tar.name)
    if not len(store) and _read_tables(folder, store, options):
        return
    if not len(store):
        _add_frame_folders(folder, store)
    store.label_by_folder(options, str(folder))


def _visible(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield what matches `pattern` in a folder, in order of names, without what is hidden."""
    for path in sorted(folder.glob(pattern)):
        if not folders.is_hidden(path.name):
            yield path


def _find_metadata(folder: Path) -> Path | None:
    for name in METADATA:
        if (folder / name).is_file():
            return folder / name
    return None


def _read_metadata(folder: Path, store: ItemStore, options: ListOptions) -> bool:
    """Read the metadata of a folder, or of the folders in it; return whether there is any.

    Raise InputError if one of the inner folders has metadata and another, with videos, has none.
    """
    table = _find_metadata(folder)
    if table is not None:
        _read_list(table, store, options)
        return True
    inner_folders = list(_visible(folder, "*/"))
    if not any(map(_find_metadata, inner_folders)):
        return False
    # Folders of documentation or scripts need no metadata: they hold no video.
    candidates = [inner for inner in inner_folders if _find_metadata(inner) or _holds_videos(inner)]
    for inner in _choose_subset(candidates, options, folder):
        table = _find_metadata(inner)
        if table is None:
            what = f"{inner} has no metadata, as other folders beside it have"
            raise InputError(f"{what}: give one of these as INPUT")
        # The folder is of the subset already.
        _read_list(table, store, replace(options, is_split=True), f"{inner.name}/")
    return True


def _holds_videos(folder: Path) -> bool:
    return any(folders.list_folder(folder, Skipped()))


def _read_lerobot(folder: Path, store: ItemStore) -> bool:
    """Read data sets of LeRobot: the folder, or those in it; return whether there is one."""
    data_sets = folders.find_lerobot_sets(folder)
    for data_set in data_sets:
        store.add(folders.list_episodes(data_set, folder))
    if data_sets:
        what = "is a data set of LeRobot: a sample an episode and camera, no labels"
        store.notes.append(f"{folder} {what}")
    return bool(data_sets)


def _read_tables(folder: Path, store: ItemStore, options: ListOptions) -> bool:
    """Read the Parquet tables that were skipped as no videos; return whether there were any."""
    paths = [folder / name for name in sorted(store.skipped.take(folders.PARQUET))]
    # video2dataset writes a table beside each tar, about the same videos.
    tables = [path for path in paths if not path.with_suffix(".tar").exists()]
    for table in _choose_subset(tables, options, folder):
        _read_list(table, store, replace(options, is_split=True))
    return bool(paths)


def _add_frame_folders(folder: Path, store: ItemStore) -> None:
    """Take folders of frames for videos; they were skipped as no files of videos."""
    names = store.skipped.take(folders.FRAME_FOLDERS)
    if not names:
        return
    store.add(Item(name, str((folder / name).absolute())) for name in names)
    # Cameras number photos, too, and nothing tells these from frames.
    store.notes.append(
        f"{format_count(len(store), 'folder')} of numbered pictures read as videos, a picture a"
        " frame: no photos should be among them"
    )


def _choose_subset(paths: list[Path], options: ListOptions, where: Path) -> list[Path]:
    """Return the folders, or tables, of the subset that the options name.

    All are returned unless each is called by a subset, as train/ or train-00000-of-00002.parquet.
    Raise InputError if there are several subsets and the options name none.
    """
    groups: dict[str, str] = {}
    for path in paths:
        name = _get_subset(path)
        if name.lower() not in class_folders.GROUPS:
            return paths
        groups[name] = class_folders.GROUPS[name.lower()]
    excluded = class_folders.choose_subset(groups, options.subset, str(where))
    return [path for path in paths if _get_subset(path) not in excluded]


def _get_subset(path: Path) -> str:
    name, *_ = re.split("[-.]", path.name)
    return name
