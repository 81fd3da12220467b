"""Divide videos into those to train on and those held out, whole groups at a time; find what is on both sides."""

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from adamae.common.atomic_io import write_text
from adamae.common.errors import InputError
from adamae.common.logging import log, printable
from adamae.common.progress import progress_bar
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.video_error import VideoError

SHARED_FILE = "shared.jsonl"  # of a dataset that is held out
HASHED_FRAMES = (
    0.1,
    0.5,
    0.9,
)  # of a video's length: a shared intro or one common object is not enough
HASHED_VIDEOS = (
    2048  # of each split, the first in its shards, which are in random order: 17 ms each
)
# Of the 192 bits. Of 273,430 pairs of UCF-101 clips, 341 of the 893 of one recording differ by no more, and two others,
# of which one is a copy.
MAX_DIFFERENCE = 20

GroupOf = Callable[[str, dict[str, Any]], str]  # of a file's name and its other fields


def parse_group_by(text: str) -> GroupOf:
    """Read folder:2, column:person or name:REGEX. Raise InputError, as the function does for a file without a group."""
    kind, _, what = text.partition(":")
    if (
        not what
        or kind not in ("folder", "column", "name")
        or (kind == "folder" and not what.isdecimal())
    ):
        raise InputError(
            f"--group-by is {text}: give folder:1 (the first folder of each path), column:NAME (of the list), or"
            " name:REGEX, such as 'name:person[0-9]+'"
        )
    if kind == "folder":
        what = rf"^(?:[^/]*/){{{max(0, int(what) - 1)}}}([^/]*)/"
    try:
        pattern = re.compile("" if kind == "column" else what)
    except re.error as error:
        raise InputError(f"--group-by {text} is no regular expression: {error}") from error

    def group_of(source: str, fields: dict[str, Any]) -> str:
        match = pattern.search(source)
        group = fields.get(what) if kind == "column" else match and match[min(1, pattern.groups)]
        if group is None:
            columns = f" (its columns: {', '.join(fields) or 'none'})" if kind == "column" else ""
            raise InputError(
                f"{source} has no group by --group-by {text}{columns}: choose another way, or leave it out"
            )
        return str(group)

    return group_of


def choose_held_out(
    groups: Mapping[str, Counter[str]], share: float, known: Mapping[str, bool]
) -> set[str]:
    """Choose the groups to hold out, given their number of videos of each class: one after the other, in the order of
    a hash, where that brings the classes closer to their share. `known` ones stay where they are."""
    totals, held = Counter[str](), Counter[str]()
    for name, counts in groups.items():
        totals.update(counts)
        held.update(counts if known.get(name) else ())
    chosen = {name for name in groups if known.get(name)}
    order = sorted(
        groups.keys() - known.keys(),
        key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest(),
    )
    for name in order:
        errors = (held[label] / totals[label] - share for label in groups[name])
        steps = (count / totals[label] for label, count in groups[name].items())
        if (
            sum(step * (2 * error + step) for error, step in zip(errors, steps, strict=True)) < 0
        ):  # of their squares
            held.update(groups[name])
            chosen.add(name)
    return chosen or {*order[:1]}


def warn_of_shared(other_name: str, other_folder: Path, name: str, folder: Path) -> None:
    """Name the videos of one split that have the bytes of one of another, or look like it: all in SHARED_FILE."""
    shared = list(find_shared(ShardDataset.open(folder), ShardDataset.open(other_folder)))
    lines = [
        json.dumps({name: one, other_name: other, "why": why}) + "\n" for one, other, why in shared
    ]
    file = folder / SHARED_FILE
    write_text(file, "".join(lines))
    if shared:
        some = ", ".join(
            f"{printable(one)} and {printable(other)}: {why}" for one, other, why in shared[:3]
        )
        log(
            f"WARNING: of {name}, {len(shared)} videos show what one of {other_name} shows ({some}; all: {file}):"
            " evaluations will be optimistically biased; divide by recording, --hold-out with --group-by",
            sys.stderr,
        )


def find_shared(one: ShardDataset, other: ShardDataset) -> Iterator[tuple[str, str, str]]:
    """Yield the source of each video of `one` that one of `other` equals or looks like, the source of that, and why."""
    copies = {bytes(digest): index for index, digest in enumerate(other.column("sha256"))}
    hashes, others = _hash_videos(one), _hash_videos(other)
    for index, digest in enumerate(one.column("sha256")):
        place, why = copies.get(bytes(digest)), "the same bytes"
        if place is None and others and index in hashes:
            differences = np.bitwise_count(hashes[index] ^ np.stack(list(others.values()))).sum(
                axis=1, dtype=int
            )
            if differences.min() <= MAX_DIFFERENCE:
                place, why = (
                    list(others)[differences.argmin()],
                    f"{differences.min()} of 192 bits differ",
                )
        if place is not None:
            yield one.samples[index].source, other.samples[place].source, why


def _hash_videos(dataset: ShardDataset) -> dict[int, UInt8[np.ndarray, " 24"]]:
    """Compute a perceptual hash (dHash) of each video's frames; not of plain ones, which all have the same."""
    hashes = {}
    for index in progress_bar(
        range(min(HASHED_VIDEOS, len(dataset.samples))), unit="video", desc="compare", leave=False
    ):
        count = dataset.samples[index].num_frames
        numbers = [int(part * count) for part in HASHED_FRAMES]
        try:
            frames = (
                decode_frames(dataset.read_video(index), numbers, count)
                .mean(axis=-1)
                .astype(np.uint8)
            )
        except VideoError:  # which whoever trains on it will say
            continue
        small = np.stack(
            [np.asarray(Image.fromarray(it).resize((9, 8), Image.Resampling.BOX)) for it in frames]
        )
        bits = small[:, :, 1:] > small[:, :, :-1]
        if 2 * MAX_DIFFERENCE <= bits.sum() <= bits.size - 2 * MAX_DIFFERENCE:
            hashes[index] = np.packbits(bits)
    return hashes
