"""Videos in tars, by WebDataset's rules: a member <key>.<video extension>, its label in <key>.cls or .json.

A .txt is a caption, as video2dataset writes. Offsets are kept, nothing is unpacked. A tar that cannot be read to its
end raises: nobody could say what it held. A member that cannot be read is an item with the reason.
"""

import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from adamae.common.errors import InputError
from adamae.common.logging import printable
from adamae.pipeline.shards.format import read_dataset_info
from adamae.pipeline.videos.opening import may_be_video
from adamae.shard_tools.inputs.cells import is_missing, read_labels
from adamae.shard_tools.inputs.folders import classify_name, is_hidden
from adamae.shard_tools.inputs.formats import LABELS, to_key
from adamae.shard_tools.inputs.item import FOLDER, UNKNOWN, Item, Skipped
from adamae.shard_tools.inputs.location import TarMember
from adamae.shard_tools.inputs.table_reader import require_uncompressed

SIDECARS = ("cls", "txt", "json")


def list_tars(
    tars: Sequence[Path], folder: Path, skipped: Skipped, label: str | None
) -> Iterator[Item]:
    """Yield the videos of the tars of a folder. In shards that make_shards.py wrote, a label is a class id.

    `label` names where labels are, if not in .cls or in a usual entry of .json: txt, or an entry's name.
    """
    shards = {tar for tar in tars if tar.with_suffix(".samples.jsonl").is_file()}
    classes = {
        str(number): name
        for number, name in enumerate(read_dataset_info(folder).classes if shards else ())
    }
    for tar in tars:
        yield from _list_tar(tar, skipped, classes if tar in shards else None, label)


def _list_tar(
    path: Path, skipped: Skipped, classes: dict[str, str] | None, label: str | None
) -> Iterator[Item]:
    videos: dict[str, tuple[TarMember, str | None]] = {}
    sidecars: dict[
        str, dict[str, Any]
    ] = {}  # what is said of videos, by names without their last extension
    for archive, member in _read_members(path):
        name = "/".join(part for part in member.name.split("/") if part != ".")
        base = name.rpartition("/")[2]
        stem, dot, extension = name.rpartition(".")
        is_plain = member.isreg() and not member.issparse()
        if member.isdir():
            continue
        if not is_hidden(base) and dot and extension in SIDECARS:
            content = cast(BinaryIO, archive.extractfile(member)).read() if is_plain else b""
            sidecars.setdefault(stem, {}).update(_parse_sidecar(content, extension))
            continue
        kind = classify_name(base)
        if (
            kind == UNKNOWN
            and is_plain
            and may_be_video(Path(name), cast(BinaryIO, archive.extractfile(member)))
        ):
            kind = None
        if kind:
            skipped.add(kind, f"{path.name}/{name}")
            continue
        place = TarMember(
            str(path.absolute()), member.offset_data, member.size if is_plain else 0, name
        )
        videos[name] = (
            place,
            "the tar holds several of this name" if name in videos else _explain_unreadable(member),
        )
    for name, (place, problem) in videos.items():
        # a.b.mp4 has its own a.b.cls, or a.cls, as WebDataset names its key: folder and name up to the first dot.
        folder, slash, base = name.rpartition("/")
        stems = name.rpartition(".")[0], folder + slash + base.partition(".")[0]
        entries = next((sidecars[stem] for stem in stems if stem in sidecars), {})
        labels = _find_labels(entries, None if label == FOLDER else label)
        fields = {
            ("caption" if key == "txt" else key): value
            for key, value in entries.items()
            if key != "cls"
        }
        if classes is not None:  # a shard has what its input said
            fields = entries.get("fields") or {}
            unknown = [text for text in labels or () if text not in classes]
            if unknown:
                problem = (
                    problem
                    or f"its label {unknown[0]!r} is none of the dataset's {len(classes)} classes"
                )
            labels = None if unknown or labels is None else tuple(map(classes.__getitem__, labels))
        text = json.dumps(fields, ensure_ascii=False) if fields else ""
        yield Item(f"{path.name}/{name}", place, labels, place.size, problem, fields=text)


def _find_labels(entries: dict[str, Any], label: str | None) -> tuple[str, ...] | None:
    usual = sorted(key for key in entries if to_key(key) in LABELS and key != "cls")
    values = (entries.get(key) for key in ([label] if label else ["cls", *usual]))
    value = next((value for value in values if not is_missing(value)), None)
    return read_labels(value, "" if isinstance(value, list) else None)


def _read_members(path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield all members in order. Raise InputError where the tar is compressed, cut off, damaged or concatenated.

    tarfile silently stops at the first header that it cannot read, and loops forever at a negative size.
    """
    require_uncompressed(path)
    num_bytes = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive, path.open("rb") as file:
            for member in archive:
                # Links and devices may name a size and have no bytes, a sparse file has fewer.
                stored_bytes = member.size if member.isreg() and not member.issparse() else 0
                if member.size < 0 or member.offset_data + stored_bytes > num_bytes:
                    raise tarfile.ReadError(
                        f"{printable(member.name)} would have {member.size} bytes"
                    )
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
        raise InputError(
            f"{path} is not a complete tar file ({error}): repair it, or move it away"
        ) from error


def _explain_unreadable(member: tarfile.TarInfo) -> str | None:
    if member.issym() or member.islnk():
        return f"it is a link to {printable(member.linkname)}: put the file itself into the tar"
    if member.issparse():
        return "it is stored as a sparse file: pack it without --sparse"
    return None if member.isreg() else "it is a device or a pipe, not a video file"


def _parse_sidecar(content: bytes, extension: str) -> dict[str, Any]:
    text = content.decode("utf-8", "replace").strip()
    if extension != "json":
        return {extension: text} if text else {}
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}
