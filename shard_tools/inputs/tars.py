"""Videos in tars, by WebDataset's rules: <key>.<video extension>, its label in <key>.cls or .json.

A .txt is a caption, as video2dataset writes. Offsets are kept, nothing is unpacked. A tar that
cannot be read to its end raises InputError: nobody could say what it held. A member that cannot be
read is an item with the reason.
"""

import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from adamae.common.errors import InputError
from adamae.common.logging import format_bytes, printable
from adamae.pipeline.shards.read_format import read_dataset_info
from adamae.pipeline.videos.opening import may_be_video
from adamae.shard_tools.inputs.cells import is_missing, read_labels
from adamae.shard_tools.inputs.folders import classify_name, is_hidden
from adamae.shard_tools.inputs.item import UNKNOWN, Item, Skipped
from adamae.shard_tools.inputs.location import TarMember
from adamae.shard_tools.inputs.table_reader import require_uncompressed

# What the sidecars of a video say; why one is not read is at None.
Entries = dict[str | None, Any]
# Extensions of the members that say something of the video beside them.
SIDECARS = ("cls", "txt", "json")
# Of a sidecar. Parsed, JSON takes up to 15 times its bytes of memory.
MAX_SIDECAR_BYTES = 16 * 2**20


def list_tars(
    tars: Sequence[Path], folder: Path, skipped: Skipped, label: str | None
) -> Iterator[Item]:
    """Yield the videos of the tars of a folder.

    `label` names where labels are, if not in .cls, or in "label" or "labels" of .json: txt, or the
    name of an entry. In shards that make_shards.py wrote, a label is a class id.
    """
    shards = {tar for tar in tars if tar.with_suffix(".samples.jsonl").is_file()}
    classes: dict[str, str] = {}
    if shards:
        names = read_dataset_info(folder).classes
        classes = {str(number): name for number, name in enumerate(names)}
    for tar in tars:
        yield from _list_tar(tar, skipped, classes if tar in shards else None, label)


def _list_tar(
    path: Path, skipped: Skipped, classes: dict[str, str] | None, label: str | None
) -> Iterator[Item]:
    """Yield the videos of a tar; `classes` are the names by id if make_shards.py wrote it."""
    # Videos with their problems, by name.
    videos: dict[str, tuple[TarMember, str | None]] = {}
    # By names without their last extension.
    sidecars: dict[str, Entries] = {}
    for archive, member in _read_members(path):
        if member.isdir():
            continue
        name = "/".join(part for part in member.name.split("/") if part != ".")
        base = name.rpartition("/")[2]
        stem, dot, extension = name.rpartition(".")
        is_plain = member.isreg() and not member.issparse()
        if dot and extension in SIDECARS and not is_hidden(base):
            entries = sidecars.setdefault(stem, {})
            if member.size > MAX_SIDECAR_BYTES:
                size = f"{format_bytes(member.size)}, more than {format_bytes(MAX_SIDECAR_BYTES)}"
                entries[None] = f"its .{extension} has {size}"
            elif is_plain:
                content = _open_member(archive, member).read()
                entries.update(_parse_sidecar(content, extension))
            continue
        kind = classify_name(base)
        is_unclear = kind == UNKNOWN and is_plain
        # The name does not tell, but the first bytes do.
        if is_unclear and may_be_video(Path(name), _open_member(archive, member)):
            kind = None
        if kind is not None:
            skipped.add(kind, f"{path.name}/{name}")
            continue
        problem = _explain_unreadable(member)
        if name in videos:
            problem = "the tar holds several of this name"
        num_bytes = member.size if is_plain else 0
        location = TarMember(str(path.absolute()), member.offset_data, num_bytes, name)
        videos[name] = (location, problem)
    # A sidecar may stand behind its video, so no item is made before the end.
    for name, (location, problem) in videos.items():
        entries = _find_entries(name, sidecars)
        problem = problem or entries.pop(None, None)
        item = Item(f"{path.name}/{name}", location, size=location.size, problem=problem)
        yield _describe_video(item, entries, classes, label)


def _open_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    """Open a regular file of a tar, for which extractfile never returns None."""
    return cast(BinaryIO, archive.extractfile(member))


def _find_entries(name: str, sidecars: dict[str, Entries]) -> Entries:
    """Return a copy of what the sidecars of a video hold.

    a.b.mp4 has its own a.b.cls, or a.cls: WebDataset's key is the folder and the name up to the
    first dot.
    """
    folder, slash, base = name.rpartition("/")
    key = folder + slash + base.partition(".")[0]
    stem = name.rpartition(".")[0]
    return dict(sidecars.get(stem, sidecars.get(key, {})))


def _describe_video(
    item: Item, entries: Entries, classes: dict[str, str] | None, label: str | None
) -> Item:
    """Return an item with the labels and the fields that its sidecars hold."""
    problem = item.problem
    labels = _find_labels(entries, label)
    if classes is None:
        fields = {
            "caption" if key == "txt" else key: value
            for key, value in entries.items()
            if key != "cls"
        }
    else:
        # A shard holds the fields of the input that it was made of, and class ids for labels.
        fields = entries.get("fields") or {}
        unknown = [number for number in labels or () if number not in classes]
        if unknown:
            labels = None
            dataset = f"the dataset's {len(classes)} classes"
            problem = problem or f"its label {unknown[0]!r} is none of {dataset}"
        elif labels is not None:
            labels = tuple(classes[number] for number in labels)
    text = json.dumps(fields, ensure_ascii=False) if fields else ""
    return msgspec.structs.replace(item, labels=labels, problem=problem, fields=text)


def _find_labels(entries: Entries, label: str | None) -> tuple[str, ...] | None:
    """Return the labels in the entry `label`, or else in .cls, "label" or "labels"."""
    if label:
        keys = [label]
    else:
        # Our own shards have the latter.
        keys = ["cls", "label", "labels"]
    for key in keys:
        value = entries.get(key)
        if not is_missing(value):
            # A list holds several labels, and a text is one, whatever marks are in it.
            return read_labels(value)
    return None


def _read_members(path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield all members in order, each with the open tar.

    Raise InputError where the tar is compressed, cut off, damaged or concatenated: tarfile silently
    stops at the first header that it cannot read, and loops forever at a negative size.
    """
    require_uncompressed(path)
    num_bytes = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive, path.open("rb") as file:
            for member in archive:
                # Links and devices may name a size and have no bytes, a sparse file has fewer.
                stored_bytes = member.size if member.isreg() and not member.issparse() else 0
                if member.size < 0 or member.offset_data + stored_bytes > num_bytes:
                    what = f"{printable(member.name)} would have {member.size} bytes"
                    raise tarfile.ReadError(what)
                yield archive, member
            # From there on, there must be zeros, and nothing else.
            file.seek(archive.offset)
            block = file.read(tarfile.BLOCKSIZE)
            if not block:
                raise tarfile.ReadError("no end-of-archive marker, as if cut off between members")
            if block.strip(b"\0"):
                raise tarfile.ReadError(f"no header at byte {archive.offset}")
            while block := file.read(2**20):
                if block.strip(b"\0"):
                    what = f"contains data after the end-of-archive marker at byte {archive.offset}"
                    raise InputError(f"{path} {what} (concatenated tars?): split it")
    except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError) as error:
        what = f"{path} is not a complete tar file ({error})"
        raise InputError(f"{what}: repair it, or move it away") from error


def _explain_unreadable(member: tarfile.TarInfo) -> str | None:
    """Return the reason why a member has no bytes of its own, if it has none."""
    if member.issym() or member.islnk():
        return f"it is a link to {printable(member.linkname)}: put the file itself into the tar"
    if member.issparse():
        return "it is stored as a sparse file: pack it without --sparse"
    if not member.isreg():
        return "it is a device or a pipe, not a video file"
    return None


def _parse_sidecar(content: bytes, extension: str) -> dict[str, Any]:
    """Return the entries of a .json, or the text of another sidecar by its extension."""
    text = content.decode("utf-8", "replace").strip()
    if extension != "json":
        return {extension: text} if text else {}
    # JSON of another tool may be anything; the video is one without a label then.
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return {}
