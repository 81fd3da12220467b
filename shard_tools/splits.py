"""Divide videos into training and held-out ones by whole groups; find videos that are in both."""

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from adamae.common.atomic_io import write_text
from adamae.common.errors import InputError
from adamae.common.logging import log, printable
from adamae.common.progress import progress_bar
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.video_error import VideoError

# Lies in the folder of the held-out dataset.
SHARED_FILE = "shared.jsonl"
# Fractions of a video's length. Three frames, since a shared intro or one common object is not
# enough.
HASHED_FRAMES = (0.1, 0.5, 0.9)
# Videos that are hashed of each split, 17 ms each: the first in its shards, whose order is random.
HASHED_VIDEOS = 2048
# Of the 192 bits. Of 273,430 pairs of UCF-101 clips, 341 of the 893 pairs of one recording differ
# by no more, and two pairs of different recordings, one of which is a copy.
MAX_DIFFERENCE = 20
# The fraction of training videos that may look as like one of another group as a shared one does:
# a few are copies.
CHANCE = 0.05

# Returns the group of a file, given its name and its other fields.
GroupOf = Callable[[str, dict[str, Any]], str]


def parse_group_by(text: str) -> GroupOf:
    """Return the function that finds a file's group by folder:2, column:person or name:REGEX.

    Raise InputError if `text` is none of these; the function raises it for a file without a group.
    Example: day1/kitchen/p03_x.mp4 is in group kitchen by folder:2, in p03 by name:p[0-9]+.
    """
    kind, _, key = text.partition(":")
    is_valid = bool(key) and kind in ("folder", "column", "name")
    if kind == "folder" and not key.isdecimal():
        is_valid = False
    if not is_valid:
        raise InputError(
            f"--group-by is {text}: give folder:1 (the first folder of each path), column:NAME (of"
            " the list), or name:REGEX, such as 'name:person[0-9]+'"
        )
    expression = ""
    if kind == "name":
        expression = key
    elif kind == "folder":
        # The last part of a path has no slash behind it: a file's own name is no folder.
        expression = rf"^(?:[^/]*/){{{max(0, int(key) - 1)}}}([^/]*)/"
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise InputError(f"--group-by {text} is no regular expression: {error}") from error

    def group_of(source: str, fields: dict[str, Any]) -> str:
        group = fields.get(key) if kind == "column" else _match_group(pattern, source)
        if group is None:
            columns = ""
            if kind == "column":
                columns = f" (its columns: {', '.join(fields) or 'none'})"
            raise InputError(
                f"{source} has no group by --group-by {text}{columns}: choose another way, or leave"
                " it out"
            )
        return str(group)

    return group_of


def _match_group(pattern: re.Pattern[str], source: str) -> str | None:
    """Return what the first parentheses of a pattern match in a path, or all of it without any."""
    match = pattern.search(source)
    if match is None:
        return None
    return match[1] if pattern.groups else match[0]


def choose_held_out(
    groups: Mapping[str, Counter[str]], fraction: float, earlier_sides: Mapping[str, bool]
) -> set[str]:
    """Choose the groups to hold out, given each group's number of videos of each class.

    Groups are visited in the order of a hash. One is held out if this brings the held-out
    fractions of its classes closer to `fraction`, by the sum of squared errors. Those in
    `earlier_sides` stay on their side: True is held out. At least one group is chosen, if any is
    free.

    Example: of 10 videos of one class in groups of 2 and a fraction of 0.2, the first group lowers
    the squared error from 0.2² to 0 and is held out; a second one would raise it to 0.2² again.
    """
    totals = Counter[str]()
    held = Counter[str]()
    chosen = set()
    for name, counts in groups.items():
        totals.update(counts)
        if earlier_sides.get(name):
            held.update(counts)
            chosen.add(name)
    order = sorted(
        groups.keys() - earlier_sides.keys(),
        key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest(),
    )
    for name in order:
        changes = []
        for label, count in groups[name].items():
            error = held[label] / totals[label] - fraction
            step = count / totals[label]
            # (error + step)² - error²
            changes.append(step * (2 * error + step))
        if sum(changes) < 0:
            held.update(groups[name])
            chosen.add(name)
    if not chosen:
        chosen.update(order[:1])
    return chosen


def warn_of_shared(
    reference_name: str, reference_folder: Path, name: str, folder: Path, how: str | None = None
) -> None:
    """Warn of the videos of one split that equal or resemble one of another; list all in a file.

    how: the --group-by by which the splits were divided, None if by videos.
    """
    group_of = parse_group_by(how) if how else None
    dataset = ShardDataset.open(folder)
    shared = list(find_shared(dataset, ShardDataset.open(reference_folder), group_of))
    lines = []
    for source, reference_source, reason in shared:
        entry = {name: source, reference_name: reference_source, "why": reason}
        lines.append(json.dumps(entry) + "\n")
    file = folder / SHARED_FILE
    write_text(file, "".join(lines))
    if not shared:
        return
    examples = []
    for source, reference_source, reason in shared[:3]:
        examples.append(f"{printable(source)} and {printable(reference_source)}: {reason}")
    advice = "" if how else "; divide by recording, --hold-out with --group-by"
    log(
        f"WARNING: {len(shared)} of {len(dataset.samples)} videos of {name} look like videos of"
        f" {reference_name} ({', '.join(examples)}; all: {file}): where they show the same"
        f" recording, evaluations will be optimistically biased{advice}",
        sys.stderr,
    )


def find_shared(
    dataset: ShardDataset, reference: ShardDataset, group_of: GroupOf | None = None
) -> Iterator[tuple[str, str, str]]:
    """Yield each video of `dataset` that equals or resembles one of `reference`.

    Each is (source, source of the one in `reference`, reason). Videos of different groups in
    `reference`, by default of different classes, say how alike is alike: on one plain background,
    all videos are.
    """
    copies = {bytes(digest): index for index, digest in enumerate(reference.column("sha256"))}
    hashes = _hash_videos(dataset)
    reference_hashes = _hash_videos(reference)
    reference_indices = list(reference_hashes)
    reference_bits = np.array(list(reference_hashes.values()))
    groups = []
    for index in reference_indices:
        sample = reference.samples[index]
        group = group_of(sample.source, sample.fields) if group_of else str(sample.labels)
        groups.append(group)
    limit = _choose_limit(reference_bits, np.array(groups))
    for index, digest in enumerate(dataset.column("sha256")):
        match = copies.get(bytes(digest))
        reason = "the same bytes"
        if match is None and reference_hashes and index in hashes:
            distances = _count_differences(hashes[index], reference_bits)
            nearest = distances.argmin()
            if distances[nearest] <= limit:
                match = reference_indices[nearest]
                reason = f"{distances[nearest]} of 192 bits differ"
        if match is not None:
            yield dataset.samples[index].source, reference.samples[match].source, reason


def _count_differences(
    bits: UInt8[np.ndarray, " 24"], others: UInt8[np.ndarray, "n 24"]
) -> Int[np.ndarray, " n"]:
    return np.bitwise_count(bits ^ others).sum(axis=1, dtype=int)


def _choose_limit(bits: UInt8[np.ndarray, "n 24"], groups: np.ndarray) -> int:
    """Return the most bits in which hashes of one recording differ.

    That is MAX_DIFFERENCE, or less where CHANCE of the videos are as like one of another group.
    """
    nearest = []
    for row, group in zip(bits, groups, strict=True):
        others = bits[groups != group]
        if len(others):
            nearest.append(_count_differences(row, others).min())
    if not nearest:
        return MAX_DIFFERENCE
    return min(MAX_DIFFERENCE, int(np.quantile(nearest, CHANCE, method="lower")) - 1)


def _hash_videos(dataset: ShardDataset) -> dict[int, UInt8[np.ndarray, " 24"]]:
    """Return perceptual hashes (dHash) of three frames of each video, by its index.

    Each frame is shrunk to 9 × 8 gray pixels; a bit says whether a pixel is brighter than its left
    neighbor. Plain frames are left out: they all have the same hash.
    """
    hashes = {}
    indices = range(min(HASHED_VIDEOS, len(dataset.samples)))
    for index in progress_bar(indices, unit="video", desc="compare", leave=False):
        num_frames = dataset.samples[index].num_frames
        numbers = [int(position * num_frames) for position in HASHED_FRAMES]
        try:
            frames = decode_frames(dataset.read_video(index), numbers, num_frames)
        except VideoError:
            # A run that trains on it will report it.
            continue
        small = []
        for gray in frames.mean(axis=-1).astype(np.uint8):
            picture = Image.fromarray(gray).resize((9, 8), Image.Resampling.BOX)
            small.append(np.asarray(picture))
        pixels = np.stack(small)
        bits = pixels[:, :, 1:] > pixels[:, :, :-1]
        if 2 * MAX_DIFFERENCE <= bits.sum() <= bits.size - 2 * MAX_DIFFERENCE:
            hashes[index] = np.packbits(bits)
    return hashes
