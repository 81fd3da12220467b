"""What the user says about a list, a folder or tars."""

from dataclasses import dataclass

FOLDER = "folder"  # --label-column folder: the name of the folder that the file lies in
NONE = "none"  # --start-column none: numbers that look like times are none


@dataclass(frozen=True)
class ListOptions:
    root: str | None = None
    suffix: str = ""
    path: str | None = None
    label: str | None = None
    start: str | None = None
    end: str | None = None
    subset: str | None = None
    is_split: bool = False  # the subset is only how the split is called: an input without subsets is taken whole
    unlabeled: bool = False
    has_label_map: bool = False
    constant_label: str | None = None  # of all videos
    asks: bool = True  # about folders that are hardly classes; else these are none
