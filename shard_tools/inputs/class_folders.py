"""Decide whether the folders that videos lie in are their classes, or ask the user."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from adamae.common.commands import repeat_command
from adamae.common.errors import InputError, QuestionError
from adamae.common.logging import format_count, log_note, printable
from adamae.shard_tools.inputs.item import ListOptions

# Folders that a sentence names.
NUM_NAMED = 5
SUBSETS = {
    "train": "train training trainset",
    "val": "val valid validation validate dev",
    "test": "test testing",
}
# What subsets are called, with their usual names: validation is val.
GROUPS = {name: group for group, names in SUBSETS.items() for name in names.split()}
# Names that say what files are or where they come from, not what they show.
FILES = (
    "videos? clips? data raw full media files? frames? images? mp4 downloads? parts?"
    " rgb colou?r depth ir infrared thermal flow masks? blobs snapshots"
)
CAMERAS = "cam|camera|view|gopro|kinect|webcam"
PERSONS = "actor|person|subject|participant|patient|signer|speaker"
NO_CLASS = re.compile(
    rf"{'|'.join(GROUPS)}|{FILES.replace(' ', '|')}"
    # 2024-05-31_office, 31.05.2024
    r"|\d{4}([-_.]?\d\d){2}(\D.*)?|(\d\d[-_.]){2}\d{4}.*"
    # camera, cam_left, front_camera; subjectB
    rf"|({CAMERAS})([-_ ].*|[a-z]|\d+)?|.*[-_ ]({CAMERAS})|({PERSONS})([-_ ]?([a-z]|\d+))?",
    re.IGNORECASE,
)
# Numbered folders that say themselves that they are classes, and those that may be: c0, 10001.
CALLED_CLASS = re.compile(r"(class|category|label)[-_ ]?\d+", re.IGNORECASE)
NUMBERED_CLASS = re.compile(r"c?[-_ ]?\d+", re.IGNORECASE)


class Level(NamedTuple):
    """The folders at one depth of the paths: of run/day1/a.mp4, folder:1 is run."""

    number: int
    # The number of videos in each folder, by its name.
    num_videos: Counter[str]
    # Why the names are hardly classes; "" if nothing speaks against it.
    doubt: str

    @property
    def rank(self) -> int:
        """Return 0 if these are probably the classes, 1 if they may be, 3 if hardly."""
        if not self.doubt:
            return 0
        return 1 if all(map(NUMBERED_CLASS.fullmatch, self.num_videos)) else 3

    def describe(self) -> str:
        names = [
            f"{printable(name)} ({count})"
            for name, count in sorted(self.num_videos.items())[:NUM_NAMED]
        ]
        if len(self.num_videos) > NUM_NAMED:
            names.append("…")
        doubt = f" [{self.doubt}]" if self.doubt else ""
        count = format_count(len(self.num_videos), "class")
        return f"{count} with their videos: {', '.join(names)}{doubt}"


def label_folders(
    num_videos: Mapping[str, int], options: ListOptions, where: str, num_outer: int = 0
) -> dict[str, tuple[str, ...] | None]:
    """Return the labels of the videos in each folder, without folders of other subsets.

    INPUT/<class>/<videos> is taken, also below train, val and test, unless there is a single class
    or its name is of a kind that classes hardly have. Raise QuestionError in all other cases,
    unless the options answer it, and InputError if they name none of several subsets.

    Args:
        num_videos: the number of videos of each folder, "" for those beside the folders.
        where: the input, for messages.
        num_outer: the number of first folders that are no classes, such as the name of a tar.
    """
    parts_by_folder = {folder: folder.split("/") if folder else [] for folder in num_videos}
    subset_depth = _find_subset_depth(parts_by_folder.values())
    excluded: set[str] = set()
    if subset_depth is not None:
        names = {parts[subset_depth] for parts in parts_by_folder.values()}
        groups = {name: GROUPS[name.lower()] for name in names}
        excluded = choose_subset(groups, options.subset, where)
    number = options.label_folder
    if number is None and not options.unlabeled:
        no_classes = {*range(num_outer), subset_depth}
        number = _choose_level(_list_levels(num_videos, no_classes), options, where)
    labels: dict[str, tuple[str, ...] | None] = {}
    for folder, parts in parts_by_folder.items():
        if subset_depth is None or parts[subset_depth] not in excluded:
            labels[folder] = get_folder_label(folder, number)
    return labels


def get_folder_label(folder: str, number: int | None) -> tuple[str, ...] | None:
    """Return the label that `--label folder:NUMBER` gives the files of a folder; None if none."""
    parts = folder.split("/")
    if number is None or number > len(parts) or not parts[number - 1]:
        return None
    return (parts[number - 1],)


def _find_subset_depth(paths: Iterable[list[str]]) -> int | None:
    """Return the first depth at which all folders are called as subsets are; None if none is."""
    for depth, names in enumerate(zip(*paths, strict=False)):
        if all(name.lower() in GROUPS for name in names):
            return depth
    return None


def _list_levels(num_videos: Mapping[str, int], no_classes: set[int | None]) -> list[Level]:
    """List the depths at which there are folders, but for `no_classes`."""
    counts: dict[int, Counter[str]] = {}
    for folder, count in num_videos.items():
        for depth, name in enumerate(folder.split("/")):
            # The folder of videos that lie in none is "".
            if name and depth not in no_classes:
                counts.setdefault(depth, Counter())[name] += count
    levels = []
    for depth, names in sorted(counts.items()):
        levels.append(Level(depth + 1, names, _find_doubt(names)))
    return levels


def _find_doubt(num_videos: Counter[str]) -> str:
    """Return why the names of folders are hardly those of classes; "" if nothing says so."""
    names = set(num_videos)
    if len(names) == 1:
        return "a single class"
    if any(map(NO_CLASS.fullmatch, names)):
        return "named like recordings, subsets or kinds of files"
    # Class ids that count from 0 are no doubt; from 1, persons may be counted.
    are_ids = names == {str(number) for number in range(len(names))}
    stems = Counter(re.sub(r"\d+", "0", name) for name in names)
    if max(stems.values()) > 1 and not are_ids and not all(map(CALLED_CLASS.fullmatch, names)):
        return "names differ in numbers only"
    if set(num_videos.values()) == {1}:
        # Recordings often have a folder each.
        return "a single video in each"
    return ""


def _choose_level(levels: list[Level], options: ListOptions, where: str) -> int | None:
    """Return the number of the folders that are classes; None if no video lies in a folder.

    Raise QuestionError if it is not clear.
    """
    if not levels:
        return None
    if len(levels) == 1 and not levels[0].doubt:
        return levels[0].number
    what = f"it is not clear whether folders in {printable(where)} are classes"
    if not options.asks:
        log_note(f"{what}, so no video has a label: make_shards.py asks which, for its shards")
        return None
    answers = [
        (level.rank, level.describe(), ["--label", f"folder:{level.number}"])
        for level in levels[:NUM_NAMED]
    ]
    # No label is better than one that is hardly a class.
    answers.append((2, "no labels", ["--unlabeled"]))
    details = []
    for _, reading, options_to_add in sorted(answers):
        details += [f"  {reading}", f"    {repeat_command(*options_to_add)}"]
    raise QuestionError(what, details)


def choose_subset(groups: Mapping[str, str | None], subset: str | None, where: str) -> set[str]:
    """Return the names of the subsets that `subset` excludes.

    `groups` are the names with the usual ones: {"validation": "val"}. `subset` may be either, or
    "all". Raise InputError if it is none of several.
    """
    names = ", ".join(sorted(groups))
    if subset is None and len(groups) > 1:
        what = f"{where} has several subsets, {names}"
        raise InputError(f"{what}: give --subset NAME, or --subset all")
    if subset is None or subset == "all":
        return set()
    excluded = {name for name, group in groups.items() if subset not in (name, group)}
    if groups and len(excluded) == len(groups):
        raise InputError(f"{where} has no subset {subset}, only {names}: choose one of them")
    return excluded
