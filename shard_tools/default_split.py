"""Hold out a fifth of the videos of which the user names no split, by folders where these tell."""

import argparse
from pathlib import Path

from adamae.common.locations import is_remote
from adamae.common.logging import log, printable
from adamae.shard_tools.inputs.class_folders import GROUPS
from adamae.shard_tools.inputs.folders import is_frame_folder, is_hidden

FRACTION = 0.2


def add_split(arguments: list[str], options: argparse.Namespace) -> list[str]:
    """Return arguments of make_shards.py with a split, and print what it means.

    options: what make_shards.py has parsed of them. A split that they name stays.
    """
    if options.hold_out or options.split:
        return arguments
    words = [*arguments, "--hold-out", str(FRACTION)]
    if options.group_by:
        return words
    if not is_remote(options.input) and has_folders_in_classes(Path(options.input)):
        log(
            f"split: a fifth of the folders in each class folder of {printable(options.input)} is"
            " held out (--group-by folder:2), as videos of one folder often show the same scene"
        )
        return [*words, "--group-by", "folder:2"]
    log(
        "split: a fifth of the videos of each class is held out, video by video (--hold-out 0.2);"
        " if several show the same recording, person or place, accuracies are too high: give"
        " --group-by name:REGEX, folder:N or column:NAME"
    )
    return words


def has_folders_in_classes(videos: Path) -> bool:
    """Return whether all videos lie in VIDEOS/<class>/<folder>/, with several folders a class.

    Folders train and test are no classes, and folders of frames are videos themselves.
    """
    classes = _list_folder(videos) if videos.is_dir() else []
    if len(classes) < 2 or any(path.name.lower() in GROUPS for path in classes):
        return False
    for path in classes:
        inner = _list_folder(path) if path.is_dir() else []
        if len(inner) < 2:
            return False
        for folder in inner:
            if not folder.is_dir() or is_frame_folder(folder):
                return False
    return True


def _list_folder(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not is_hidden(path.name)]
