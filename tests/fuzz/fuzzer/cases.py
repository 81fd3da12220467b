"""A case: which target, which seed, and so which edits of which material; the same on every machine."""

import base64
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from fuzzer.edits import FileEdit, FolderEdit

Entry = tuple[str, bytes]  # file, link or folder, and its bytes or where it leads
Tree = dict[str, Entry]


class Op(NamedTuple):
    """An edit of one of the files that match `glob`, or, where that is empty, of the whole folder."""

    name: str
    glob: str
    edit: FileEdit | FolderEdit

    def apply(self, root: Path, seed: int) -> None:
        rng = Random(seed)
        if not self.glob:
            self.edit(root, rng)  # type: ignore[arg-type, call-arg]
            return
        files = sorted(path for path in root.glob(self.glob) if path.is_file() and not path.is_symlink())
        if files:
            path = rng.choice(files)
            path.write_bytes(self.edit(path.read_bytes(), rng))  # type: ignore[arg-type, operator]


def ops(glob: str, edits: Sequence[FileEdit | FolderEdit]) -> tuple[Op, ...]:
    """One for each; an edit that stands there twice is drawn twice as often."""
    return tuple(Op(f"{glob or 'folder'}:{edit.__name__}", glob, edit) for edit in edits)


class Step(NamedTuple):
    """A command of ours as its `main` is called, with the exit codes by which it may refuse what it is given."""

    name: str
    call: Callable[[], int | None]
    refuses: tuple[int, ...] = (2,)
    goes_on: bool = False


@dataclass(frozen=True)
class Ended:
    """How a step ended."""

    name: str
    code: int
    stdout: str
    stderr: str


class Place(NamedTuple):
    """The folders of a case."""

    folder: Path
    material: Path  # what was given, before it was edited

    @property
    def given(self) -> Path:
        return self.folder / "given"

    @property
    def out(self) -> Path:
        return self.folder / "out"


class Limits(NamedTuple):
    """Of one command."""

    seconds: float = 10.0  # of processor time, which other work on the machine does not change
    wait: float = 40.0  # seconds by the clock, for what waits for something that never comes
    num_bytes: int = 2**30  # beyond what the imports take


@dataclass(frozen=True)
class Target:
    """What is fuzzed: material, edits of it, the commands that get it, and what must be true of what they made."""

    name: str
    material: str  # name of what `materials` builds
    ops: tuple[Op, ...]
    steps: Callable[[Place], list[Step]]
    judge: Callable[[Place, list[Ended]], Iterator[str]]
    thin: Callable[[Path, Random], None] = lambda root, rng: None  # takes away what a case does not need
    changes_given: bool = False  # a run folder that is gone on with, say
    weight: int = 1  # how often it is drawn
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Case:
    """`edits`: names of ops with their seeds; None: those that the seed draws. `tree`: instead, the entries that differ
    from the material, None where one is gone: what a finding is kept as, whatever becomes of the edits."""

    target: str
    seed: int
    edits: tuple[tuple[str, int], ...] | None = None
    tree: dict[str, Entry | None] | None = field(default=None, repr=False)

    def drawn(self, target: Target) -> "Case":
        if self.edits is not None:
            return self
        rng = Random(f"{self.target} {self.seed}")
        count = rng.choice((1, 1, 1, 2, 2, 3, 5)) if target.ops else 0
        chosen = tuple((rng.choice(target.ops).name, rng.getrandbits(32)) for _ in range(count))
        return Case(self.target, self.seed, chosen)

    def prepare(self, target: Target, material: Path, given: Path) -> None:
        """Make the folder `given` out of the material."""
        shutil.copytree(material, given, symlinks=True)
        if self.tree is not None:
            write_tree(given, self.tree)
            return
        target.thin(given, Random(f"thin {self.seed}"))
        by_name = {op.name: op for op in target.ops}
        for name, seed in self.drawn(target).edits or ():
            by_name[name].apply(given, seed)

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"target": self.target, "seed": self.seed, "edits": self.edits}
        if self.tree is not None:
            said["tree"] = {name: entry and [entry[0], _packed(entry[1])] for name, entry in self.tree.items()}
        return said

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "Case":
        edits = None if said["edits"] is None else tuple((name, seed) for name, seed in said["edits"])
        tree = said.get("tree")
        if tree is not None:
            tree = {name: entry and (entry[0], _unpacked(entry[1])) for name, entry in tree.items()}
        return cls(said["target"], said["seed"], edits, tree)


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def read_tree(root: Path) -> Tree:
    """Everything below a folder."""
    tree: Tree = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            tree[name] = "link", str(path.readlink()).encode(errors="surrogateescape")
        elif path.is_dir():
            tree[name] = "folder", b""
        else:
            tree[name] = "file", path.read_bytes()
    return tree


def differences(before: Tree, after: Tree) -> dict[str, Entry | None]:
    """What makes `after` out of `before`."""
    return {
        name: after.get(name) for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)
    }


def write_tree(root: Path, changes: dict[str, Entry | None]) -> None:
    for name in sorted(changes, reverse=True):  # what is inside a folder before the folder
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name, entry in sorted(changes.items()):
        if entry is None:
            continue
        kind, content = entry
        path = root / name
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(content.decode(errors="surrogateescape"))
        else:
            path.write_bytes(content)
