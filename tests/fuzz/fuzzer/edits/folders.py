"""Edits of a folder: files and folders that are gone, in each other's place, or should not be there."""

import shutil
from pathlib import Path
from random import Random

STRAYS = (
    *(
        "step-",
        "step-x",
        "step--0000005",
        "step-00000099",
        "step-000000000099",
        "step-1e3",
        "step-٣",
        "step-00000001.bak",
    ),
    *(".step-00000002.partial", "model.safetensors", "optimizer.pt", ".DS_Store", "é", "best", "a\nb", "\x1b[31m"),
)


def lost(root: Path, rng: Random) -> None:
    path = _some(root, rng)
    if path is None:
        return
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def emptied(root: Path, rng: Random) -> None:
    path = _some(root, rng, "file")
    if path:
        path.write_bytes(b"")


def folder_for_file(root: Path, rng: Random) -> None:
    path = _some(root, rng, "file")
    if path:
        path.unlink()
        path.mkdir()


def file_for_folder(root: Path, rng: Random) -> None:
    path = _some(root, rng, "folder")
    if path:
        shutil.rmtree(path)
        path.write_bytes(b"no folder")


def stray(root: Path, rng: Random) -> None:
    """Something that nobody put there, empty or a copy of what is beside it."""
    beside = _some(root, rng)
    if beside is None:
        return
    path = beside.with_name(rng.choice(STRAYS))
    if path.exists():
        return
    if rng.random() < 0.4:
        path.mkdir()
    elif beside.is_dir():
        shutil.copytree(beside, path, symlinks=True)
    else:
        shutil.copyfile(beside, path)


def mixed_up(root: Path, rng: Random) -> None:
    """A file holds what belongs into another of the same kind."""
    one = _some(root, rng, "file")
    alike = sorted(path for path in root.rglob(f"*{one.suffix}") if path.is_file()) if one else []
    if one and alike:
        one.write_bytes(rng.choice(alike).read_bytes())


def link_to_itself(root: Path, rng: Random) -> None:
    path = _some(root, rng, "file")
    if path:
        path.unlink()
        path.symlink_to(path.name)


def _some(root: Path, rng: Random, kind: str = "") -> Path | None:
    found = sorted(path for path in root.rglob("*") if not path.is_symlink())
    if kind:
        found = [path for path in found if path.is_dir() == (kind == "folder")]
    return rng.choice(found) if found else None


EDITS = (lost, lost, emptied, folder_for_file, file_for_folder, stray, stray, mixed_up, link_to_itself)
