"""Videos in tars, by WebDataset's rules: a member <key>.<video extension>, its label in <key>.cls, .txt or .json.

Offsets are kept, nothing is unpacked. A tar that cannot be read to its end raises: nobody could say what it held. A
member that cannot be read is an item with the reason.
"""

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import InputError
from common.logging import printable
from pipeline.shards.format import read_dataset_info
from shard_tools.inputs.classes import MOST_DIGITS
from shard_tools.inputs.folders import skipped_as
from shard_tools.inputs.item import HIDDEN, Item, Skipped, TarMember, is_hidden
from shard_tools.inputs.lists import LABEL_COLUMNS, first_of

LABEL_EXTENSIONS = ("cls", "txt", "json")
MOST_LABEL_BYTES = 2**24  # a label may stand among other metadata, but all of it is held in memory
BLOCK = 512  # bytes, of a tar
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z",
}


@dataclass
class Labels:
    """What stands beside the videos of one tar, by a member's name without its last extension."""

    texts: dict[str, str | None] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> tuple[str | None, str | None]:
        """(label, problem) of the video `name`: a.b.mp4 has its own a.b.cls, or a.cls, as WebDataset names its key."""
        own, key = name.rpartition(".")[0], webdataset_key(name)
        stem = own if own in self.texts or own in self.problems else key
        text = self.texts.get(stem)
        return text, self.problems.get(stem) if text is None else None


def webdataset_key(name: str) -> str:
    """LocalOutput and name up to the name's first dot."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def refuse_compressed(path: Path) -> None:
    """Raises InputError if a file that should be a tar or a list is an archive of another kind."""
    with path.open("rb") as file:
        head = file.read(8)
    for magic, name in COMPRESSED.items():
        if head.startswith(magic):
            raise InputError(f"{path} is compressed ({name}): unpack it, videos are read out of plain tars only")


def from_tars(tars: Sequence[Path], folder: Path, skipped: Skipped) -> Iterator[Item]:
    """The videos of all these tars of a folder. In shards of ours a label is the number of a class."""
    ours = {tar for tar in tars if tar.with_suffix(".samples.jsonl").is_file()}
    classes = read_dataset_info(folder).classes if ours else []
    for tar in tars:
        yield from _from_tar(tar, classes if tar in ours else None, skipped)


def _from_tar(path: Path, classes: list[str] | None, skipped: Skipped) -> list[Item]:
    labels = Labels()
    videos: dict[str, list[tuple[TarMember, str | None]]] = {}
    archive_path = str(path.absolute())
    for archive, member in _members(path):
        if member.isdir():
            continue
        name = "/".join(part for part in member.name.split("/") if part != ".") if "./" in member.name else member.name
        base = name.rpartition("/")[2]
        stem, _, extension = name.rpartition(".")
        if is_hidden(base):
            skipped.add(HIDDEN, f"{path.name}/{name}")
        elif "." in base and extension in LABEL_EXTENSIONS:
            if problem := _why_not_label(member):
                labels.problems[stem] = f"its label {base} {problem}"
            else:
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                labels.texts[stem] = _label_in(content.read(), extension) or labels.texts.get(stem)
        elif kind := skipped_as(base):
            skipped.add(kind, f"{path.name}/{name}")
        else:
            place = TarMember(archive_path, member.offset_data, member.size, name)
            videos.setdefault(name, []).append((place, _why_not_file(member)))
    return [_item(f"{path.name}/{name}", places, labels, classes) for name, places in videos.items()]


def _members(path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """All members in order. Raises InputError where the tar is compressed, cut off, damaged, or goes on behind its end.

    tarfile ends in silence at the first header that it cannot read, and goes round in circles at a negative size.
    """
    refuse_compressed(path)
    num_bytes = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.size < 0 or member.offset_data + _stored_bytes(member) > num_bytes:
                    raise tarfile.ReadError(f"{printable(member.name)} would have {member.size} bytes")
                yield archive, member
            end = archive.offset
    except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} is not a whole tar file ({error}): mend it, or move it away") from error
    _refuse_more(path, end)


def _stored_bytes(member: tarfile.TarInfo) -> int:
    """Bytes of its data in the tar: links and devices may name a size and have none, a sparse file has fewer."""
    return member.size if member.isreg() and not member.issparse() else 0


def _refuse_more(path: Path, end: int) -> None:
    """Raises InputError unless there are zeros, and nothing else, from the byte `end` on, where tarfile stopped."""
    with path.open("rb") as file:
        file.seek(end)
        block = file.read(BLOCK)
        if not block:
            whole = f"if it is whole, `truncate -s +{2 * BLOCK}` adds one"
            raise InputError(f"{path} has no end mark, as if it were cut off between two members: {whole}")
        if block.strip(b"\0"):
            raise InputError(f"{path} is not a whole tar file (no header at byte {end}): mend it, or move it away")
        while block:
            block = file.read(2**20)
            if block.strip(b"\0"):
                raise InputError(
                    f"{path} goes on behind its end mark at byte {end}, as joined tars do: take them apart"
                )


def _why_not_label(member: tarfile.TarInfo) -> str | None:
    if member.size > MOST_LABEL_BYTES:
        return f"is larger than {MOST_LABEL_BYTES >> 20} MiB"
    return None if member.isreg() and not member.issparse() else "is a link or no file"


def _why_not_file(member: tarfile.TarInfo) -> str | None:
    if member.issym() or member.islnk():
        return f"it is a link to {printable(member.linkname)}: put the file itself into the tar"
    if member.issparse():
        return "it is stored as a sparse file: pack it without --sparse"
    return None if member.isreg() else "it is a device or a pipe, not a video file"


def _item(source: str, places: list[tuple[TarMember, str | None]], labels: Labels, classes: list[str] | None) -> Item:
    """The video that lies there, or the problem with it; with `classes`, a label is the number of one of them."""
    place, unreadable = places[0]
    label, problem = labels.of(place.name)
    if classes is not None and label is not None:
        known = label.isdecimal() and len(label) <= MOST_DIGITS and int(label) < len(classes)
        problem = None if known else f"its label {label!r} is none of the dataset's {len(classes)} classes"
        label = classes[int(label)] if known else None
    if len(places) > 1:
        problem = f"the tar holds it {len(places)} times"
    return Item(source, place, label, place.size, unreadable or problem)


def _label_in(content: bytes, extension: str) -> str | None:
    text = content.decode("utf-8", "replace").strip()
    if extension != "json":
        return text or None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return first_of(value, LABEL_COLUMNS) if isinstance(value, dict) else None
