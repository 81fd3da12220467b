"""What to shard: find the videos of a folder, a list or an archive, and give each a name, a label and a location."""

import io
import sys
from pathlib import Path

from common.errors import InputError
from pipeline.reading.storage import is_remote
from shard_tools.encoding.source import VIDEO_EXTENSIONS
from shard_tools.inputs.classes import assign_class_ids, read_label_map
from shard_tools.inputs.folders import list_folder, list_url, make_item
from shard_tools.inputs.item import Item, Segment, Skipped, TarMember, is_hidden
from shard_tools.inputs.lists import read_lines, read_list
from shard_tools.inputs.table import Inputs
from shard_tools.inputs.tars import list_tars, require_uncompressed

__all__ = ["Inputs", "Item", "Segment", "Skipped", "TarMember", "assign_class_ids", "read_inputs", "read_label_map"]


def read_inputs(inputs: str, root: str | None, unlabeled: bool, skipped: Skipped | None = None) -> Inputs:
    """Find all videos of `inputs`, each source once; `skipped` counts files without a video's name.

    `inputs` is a folder (labels: the names of its sub-folders, if it has any), a tar or a folder of tars, a list
    (.csv, .tsv, .txt, .json, or - for stdin), or a URL of a folder. `root` is what a list's paths are relative to; by
    default the list's own folder. With `unlabeled` no labels are read. Raise InputError if nothing is found.
    """
    skipped = skipped or Skipped()
    found = Inputs()
    path = Path(inputs)
    if inputs == "-":
        lines = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", errors="surrogateescape")
        found.add(read_lines(lines, "stdin", Path(root or "."), " "))
    elif is_remote(inputs):
        found.add(list_url(inputs, skipped))
    elif not path.exists():
        raise InputError(f"{path} does not exist: give a folder of videos or a list of them")
    elif path.is_dir():
        found.add(list_folder(path, skipped))
        tars = [tar for tar in sorted(path.glob("*.tar")) if not is_hidden(tar.name)]
        if tars and found.has_only_arrays:  # tables of our shards are arrays
            found.skip_arrays(skipped, "arrays beside tars")
            found.add(list_tars(tars, path, skipped))
        else:
            for tar in tars:
                skipped.add("tars, which are read only where no videos lie beside them", tar.name)
    elif path.suffix == ".tar":
        found.add(list_tars([path], path.parent, skipped))
    elif path.suffix.lower().removeprefix(".") in VIDEO_EXTENSIONS:
        found.add([make_item(path.name, path, None)])
    else:
        require_uncompressed(path)
        found.add(read_list(path, Path(root) if root else path.parent))
    found.deduplicate(unlabeled)
    if not found.has_only_arrays:  # beside videos they are features of these, or tables
        found.skip_arrays(skipped, "arrays beside videos")
    if not len(found):
        looked_for = f"looked for {', '.join(sorted(VIDEO_EXTENSIONS))} files"
        raise InputError("; ".join([f"no video found in {inputs}: {looked_for}", *skipped.lines()]))
    return found
