"""Videos in tars, by WebDataset's rules: a member <key>.<video extension>, its label in <key>.cls, .txt or .json.

Offsets are kept, nothing is unpacked. A tar that cannot be read to its end raises: nobody could say what it held. A
member that cannot be read is an item with the reason.
"""

import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import InputError
from common.logging import printable
from pipeline.shards.format import read_dataset_info
from shard_tools.inputs.classes import is_id
from shard_tools.inputs.folders import classify_name
from shard_tools.inputs.item import HIDDEN, Item, Skipped, TarMember, is_hidden, one_label
from shard_tools.inputs.lists import LABEL_COLUMNS, find_first

LABEL_EXTENSIONS = ("cls", "txt", "json")
MAX_LABEL_BYTES = 2**24  # a label may stand among other metadata, but all of it is held in memory
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z",
}


def require_uncompressed(path: Path) -> None:
    """Raise InputError if a file that should be a tar or a list is an archive of another kind."""
    with path.open("rb") as file:
        head = file.read(8)
    for magic, name in COMPRESSED.items():
        if head.startswith(magic):
            raise InputError(f"{path} is compressed ({name}): unpack it, only plain tars are read")


def list_tars(tars: Sequence[Path], folder: Path, skipped: Skipped) -> Iterator[Item]:
    """Yield the videos of the tars of a folder. In shards of ours a label is a class id."""
    ours = {tar for tar in tars if tar.with_suffix(".samples.jsonl").is_file()}
    classes = read_dataset_info(folder).classes if ours else []
    for tar in tars:
        yield from _list_tar(tar, classes if tar in ours else None, skipped)


def _list_tar(path: Path, classes: list[str] | None, skipped: Skipped) -> Iterator[Item]:
    labels: dict[str, str | None] = {}  # by a member's name without its last extension
    label_problems: dict[str, str] = {}
    videos: dict[str, list[tuple[TarMember, str | None]]] = {}
    for archive, member in _read_members(path):
        if member.isdir():
            continue
        name = "/".join(part for part in member.name.split("/") if part != ".") if "./" in member.name else member.name
        base = name.rpartition("/")[2]
        stem, _, extension = name.rpartition(".")
        if is_hidden(base):
            skipped.add(HIDDEN, f"{path.name}/{name}")
        elif "." in base and extension in LABEL_EXTENSIONS:
            content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
            if content is None:
                label_problems[stem] = f"its label {base} is a link or no file"
            elif member.size > MAX_LABEL_BYTES:
                label_problems[stem] = f"its label {base} is larger than {MAX_LABEL_BYTES >> 20} MiB"
            else:
                labels[stem] = _parse_label(content.read(), extension) or labels.get(stem)
        elif kind := classify_name(base):
            skipped.add(kind, f"{path.name}/{name}")
        else:
            place = TarMember(str(path.absolute()), member.offset_data, member.size, name)
            videos.setdefault(name, []).append((place, _explain_unreadable(member)))
    for name, places in videos.items():
        place, problem = places[0]
        # a.b.mp4 has its own a.b.cls, or a.cls, as WebDataset names its key: folder and name up to the first dot.
        folder, slash, base = name.rpartition("/")
        stems = name.rpartition(".")[0], folder + slash + base.partition(".")[0]
        stem = next((stem for stem in stems if stem in labels or stem in label_problems), stems[0])
        label = labels.get(stem)
        if label is None:
            problem = problem or label_problems.get(stem)
        elif classes is not None:
            is_known = is_id(label) and int(label) < len(classes)
            if not is_known:
                problem = problem or f"its label {label!r} is none of the dataset's {len(classes)} classes"
            label = classes[int(label)] if is_known else None
        if len(places) > 1:
            problem = problem or f"the tar holds it {len(places)} times"
        yield Item(f"{path.name}/{name}", place, one_label(label), place.size, problem)


def _read_members(path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield all members in order. Raise InputError where the tar is compressed, cut off, damaged or concatenated.

    tarfile silently stops at the first header that it cannot read, and loops forever at a negative size.
    """
    require_uncompressed(path)
    num_bytes = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                # Links and devices may name a size and have no bytes, a sparse file has fewer.
                stored_bytes = member.size if member.isreg() and not member.issparse() else 0
                if member.size < 0 or member.offset_data + stored_bytes > num_bytes:
                    raise tarfile.ReadError(f"{printable(member.name)} would have {member.size} bytes")
                yield archive, member
            end = archive.offset
    except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} is not a complete tar file ({error}): repair it, or move it away") from error
    _require_end(path, end)


def _require_end(path: Path, end: int) -> None:
    """Raise InputError unless there are zeros, and nothing else, from the byte `end` on, where tarfile stopped."""
    with path.open("rb") as file:
        file.seek(end)
        block = file.read(tarfile.BLOCKSIZE)
        if not block:
            fix = f"if it is complete, `truncate -s +{2 * tarfile.BLOCKSIZE}` adds one"
            raise InputError(f"{path} has no end-of-archive marker, as if cut off between two members: {fix}")
        if block.strip(b"\0"):
            raise InputError(f"{path} is not a complete tar file (no header at byte {end}): repair it, or move it away")
        while block:
            block = file.read(2**20)
            if block.strip(b"\0"):
                raise InputError(
                    f"{path} contains data after the end-of-archive marker at byte {end} (concatenated tars?): split it"
                )


def _explain_unreadable(member: tarfile.TarInfo) -> str | None:
    if member.issym() or member.islnk():
        return f"it is a link to {printable(member.linkname)}: put the file itself into the tar"
    if member.issparse():
        return "it is stored as a sparse file: pack it without --sparse"
    return None if member.isreg() else "it is a device or a pipe, not a video file"


def _parse_label(content: bytes, extension: str) -> str | None:
    text = content.decode("utf-8", "replace").strip()
    if extension != "json":
        return text or None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    match value.get("labels"):
        case [label]:  # as our own shards write it
            return str(label)
    return find_first(value, LABEL_COLUMNS)
