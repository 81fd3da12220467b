"""Run the commands on randomly damaged files, and check what SECURITY.md promises: `make fuzz MINUTES=60`.

A case is a target and a seed, which determine the damage; `--targets check --seed 17 --cases 1` repeats one. Every case
runs in a fork of a process that has imported everything and computed nothing, with limits of time and memory.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from subprocess import CompletedProcess

import forked
from damage import damage
from tiny import TINY

ROOT = Path(__file__).parents[2]
LIMITED = Path(__file__).with_name("limited.py")
DISK_ERROR = 74
MAKE = "shard_tools/make_shards.py --workers=1 --max-rejects=1 --samples-per-shard=3 "
TRAIN = f"train.py {' '.join(TINY)} steps=3 checkpoint_every=1 data.shards="
PREVIEW = "preview.py --num-clips=2 model.num_frames=4 model.image_size=32 --output={out}/preview "
WEIGHTS = "run/checkpoints/step-00000002/model.safetensors"


@dataclass(frozen=True)
class Target:
    """Which files of which material are damaged, and the command that reads them."""

    material: str
    files: str  # glob
    command: str
    codes: Sequence[int] = (0, 2)
    changes_given: bool = False


TARGETS = {
    "copy": Target("videos", "*/*.mp4", MAKE + "{given} {out}/shards --encode=copy", (0, 2, 3)),
    "encode": Target(
        "videos", "*/*.mp4", MAKE + "{given} {out}/shards --preset=ultrafast", (0, 2, 3)
    ),
    "list": Target(
        "list", "list.csv", MAKE + "{given}/list.csv {out}/shards --encode=copy", (0, 2, 3)
    ),
    "tar": Target(
        "tar", "videos.tar", MAKE + "{given}/videos.tar {out}/shards --encode=copy", (0, 2, 3)
    ),
    "check": Target(
        "run", "shards/*", "shard_tools/check_shards.py {given}/shards --workers=1", (0, 1, 2)
    ),
    "add": Target(
        "run", "shards/*", MAKE + "{given}/videos {given}/shards --frame-stride=2", (0, 2, 3), True
    ),
    "preview": Target("run", "shards/*", PREVIEW + "{given}/shards"),
    "train": Target("run", "shards/*", TRAIN + "{given}/shards run={out}/run"),
    "resume": Target(
        "run", "run/**/*", TRAIN + "{given}/shards run={given}/run", changes_given=True
    ),
    "config": Target(
        "run", "run/config.yaml", "train.py --config={given}/run/config.yaml run={out}/run"
    ),
    "visualize": Target(
        "run", "run/**/*", "visualize.py {given}/run {given}/shards --clips=1 --output={out}"
    ),
    "weights": Target(
        "run", WEIGHTS, f"export.py import {{given}}/{WEIGHTS} {{out}}/imported.safetensors"
    ),
}


def make_materials(folder: Path) -> None:
    """Make small videos, a list and a tar of them, shards, and a run that stopped before its last step."""
    videos, run = folder / "videos", folder / "run"
    drawing = f"shard_tools/synthetic_videos.py {videos} --num-videos=5 --size=64 --num-frames=12"
    _run(f"{drawing} --classes right left", folder).check_returncode()
    for name in ("list", "tar", "run"):
        (folder / name).mkdir()
    files = sorted(videos.glob("*/*.mp4"))
    lines = "".join(f"{path},{path.parent.name}\n" for path in files)
    (folder / "list" / "list.csv").write_text(f"path,label\n{lines}")
    shutil.make_archive(str(folder / "tar" / "videos"), "tar", videos)
    shutil.copytree(videos, run / "videos")
    _run(f"{MAKE} {videos} {run}/shards --frame-stride=2", folder).check_returncode()
    _run(f"{TRAIN}{run}/shards run={run}/run", folder).check_returncode()
    shutil.rmtree(run / "run/checkpoints/step-00000003")


def run_case(name: str, seed: int, folder: Path) -> list[str]:
    """Damage a copy of the target's material, run its command, and return what is wrong with how it ended."""
    target, rng = TARGETS[name], Random(f"{name} {seed}")
    given, out = folder / "given", folder / "out"
    shutil.copytree(folder.parent / target.material, given)
    out.mkdir()
    files = sorted(path for path in given.glob(target.files) if path.is_file())
    intact = _read(given)
    for path in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2, 4)))):
        damage(path, rng)
    before = _read(given)
    done = _run(target.command.format(given=given, out=out), folder)
    found = list(_complaints(done, target.codes))
    if not target.changes_given and _read(given) != before:
        found.append("the input has changed")
    if list(folder.rglob("*.partial")):
        found.append("half-written files are left")
    if name == "check" and done.returncode == 0 and _checked(intact) != _checked(before):
        found.append("check_shards finds nothing wrong")
    return found


def _run(command: str, home: Path) -> "CompletedProcess[str]":
    """Run a script within the limits, which keeps temporary files in `home`."""
    return forked.run([sys.executable, LIMITED, *command.split()], os.environ | {"HOME": str(home)})


def _complaints(done: "CompletedProcess[str]", codes: Sequence[int]) -> Iterator[str]:
    code, output = done.returncode, done.stdout + done.stderr
    last = ([line for line in done.stderr.replace("\r", "\n").split("\n") if line.strip()] or [""])[
        -1
    ]
    if "Traceback (most recent call last)" in output:
        yield f"traceback: {last}"
    elif code < 0:
        yield f"signal {-code}"
    elif code not in (*codes, DISK_ERROR):
        yield f"exit code {code}: {last}"
    elif code > 1 and not last.startswith("error: "):
        yield f"exit code {code} without a sentence: {last!r}"
    if controls := {char for char in output if char < " " and char not in "\n\r\t"}:
        yield f"control characters on the terminal: {sorted(controls)}"


def _read(folder: Path) -> dict[str, bytes | str]:
    """Return every file's bytes, and where links lead."""
    found = sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in found
    }


def _checked(files: dict[str, bytes | str]) -> dict[str, bytes | str]:
    return {name: content for name, content in files.items() if not name.endswith("rejected.jsonl")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--cases", type=int, help="stop after so many cases")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the first case (default: the time)"
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    options = parser.parse_args()
    found, cases, end = 0, 0, time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="adamae-fuzz-") as scratch:
        make_materials(Path(scratch))
        while time.monotonic() < end and cases != options.cases:
            name, seed = (
                options.targets[cases % len(options.targets)],
                options.seed + cases // len(options.targets),
            )
            folder = Path(scratch) / "case"
            folder.mkdir()
            complaints = run_case(name, seed, folder)
            if complaints:
                print(
                    f"--targets {name} --seed {seed} --cases 1: {'; '.join(complaints)}", flush=True
                )
            shutil.rmtree(folder)
            found, cases = found + bool(complaints), cases + 1
    print(f"{cases} cases, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
