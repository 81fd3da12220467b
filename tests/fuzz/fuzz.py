"""Run the commands on randomly damaged files, and check what SECURITY.md promises: `make fuzz MINUTES=60`.

A case is a target and a seed, which determine the damage; `--targets check --seed 17 --cases 1` repeats one. Every case
runs in a fork of this process, which has imported everything and computed nothing.
"""

import argparse
import os
import resource
import runpy
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from damage import damage
from shard_making import run_here
from tiny import TINY

import export  # noqa: F401
import train  # noqa: F401
import visualize  # noqa: F401
from shard_tools.workers import ENGINES

ROOT = Path(__file__).parents[2]
SECONDS = 10  # of processor time, imports done
MEMORY = 2**30  # bytes beyond what the imports take
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
    "encode": Target("videos", "*/*.mp4", MAKE + "{given} {out}/shards --preset=ultrafast", (0, 2, 3)),
    "list": Target("list", "list.csv", MAKE + "{given}/list.csv {out}/shards --encode=copy", (0, 2, 3)),
    "tar": Target("tar", "videos.tar", MAKE + "{given}/videos.tar {out}/shards --encode=copy", (0, 2, 3)),
    "check": Target("run", "shards/*", "shard_tools/check_shards.py {given}/shards --workers=1", (0, 1, 2)),
    "add": Target("run", "shards/*", MAKE + "{given}/videos {given}/shards --frame-stride=2", (0, 2, 3), True),
    "preview": Target("run", "shards/*", PREVIEW + "{given}/shards"),
    "train": Target("run", "shards/*", TRAIN + "{given}/shards run={out}/run"),
    "resume": Target("run", "run/**/*", TRAIN + "{given}/shards run={given}/run", changes_given=True),
    "config": Target("run", "run/config.yaml", "train.py --config={given}/run/config.yaml run={out}/run"),
    "visualize": Target("run", "run/**/*", "visualize.py {given}/run {given}/shards --clips=1 --output={out}"),
    "weights": Target("run", WEIGHTS, f"export.py import {{given}}/{WEIGHTS} {{out}}/imported.safetensors"),
}


def make_materials(folder: Path) -> None:
    """Make small videos, a list and a tar of them, shards, and a run that stopped before its last step."""
    videos, run = folder / "videos", folder / "run"
    draw = f"shard_tools/synthetic_videos.py {videos} --num-videos=5 --size=64 --num-frames=12"
    _run_in_fork(f"{draw} --classes right left", folder / "make")
    for name in ("list", "tar", "run"):
        (folder / name).mkdir()
    files = sorted(videos.glob("*/*.mp4"))
    lines = "".join(f"{path},{path.parent.name}\n" for path in files)
    (folder / "list" / "list.csv").write_text(f"path,label\n{lines}")
    shutil.make_archive(str(folder / "tar" / "videos"), "tar", videos)
    shutil.copytree(videos, run / "videos")
    _run_in_fork(f"{MAKE} {videos} {run}/shards --frame-stride=2", folder / "make")
    _run_in_fork(f"{TRAIN}{run}/shards run={run}/run", folder / "make")
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
    command = target.command.format(given=given, out=out)
    code, stdout, stderr, memory = _run_in_fork(command, folder / "command", check=False)
    found = list(_complaints(code, stdout + stderr, stderr, target.codes))
    if memory > MEMORY:
        found.append(f"it takes {memory / 2**30:.1f} GiB of memory")
    if not target.changes_given and _read(given) != before:
        found.append("the input has changed")
    if list(folder.rglob("*.partial")):
        found.append("half-written files are left")
    if name == "check" and code == 0 and _checked(intact) != _checked(before):
        found.append("check_shards finds nothing wrong")
    return found


def _complaints(code: int, output: str, stderr: str, codes: Sequence[int]) -> Iterator[str]:
    last = ([line for line in stderr.replace("\r", "\n").split("\n") if line.strip()] or [""])[-1]
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
    return {str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in found}


def _checked(files: dict[str, bytes | str]) -> dict[str, bytes | str]:
    return {name: content for name, content in files.items() if not name.endswith("rejected.jsonl")}


def _run_in_fork(command: str, log: Path, check: bool = True) -> tuple[int, str, str, int]:
    """Run a script in a fork; return its exit code, stdout, stderr, and memory in bytes."""
    log.mkdir(exist_ok=True)
    base = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become(command.split(), log)
    _, status, usage = os.wait4(child, 0)
    stdout, stderr = ((log / name).read_text(errors="replace") for name in ("out", "err"))
    code = os.waitstatus_to_exitcode(status)
    if check and code:
        raise RuntimeError(f"{command} failed: {stderr}")
    return code, stdout, stderr, 1024 * usage.ru_maxrss - base


def _become(command: list[str], log: Path) -> None:
    code = 1
    try:
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(log / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        os.environ |= {"TMPDIR": str(log), "HOME": str(log)}
        tempfile.tempdir = None
        ENGINES["processes"] = run_here  # a pool's processes would import everything again
        sys.argv = command
        runpy.run_path(str(ROOT / command[0]), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--cases", type=int, help="stop after so many cases")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first case (default: the time)")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    options = parser.parse_args()
    found, cases, end = 0, 0, time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="adamae-fuzz-") as scratch:
        make_materials(Path(scratch))
        while time.monotonic() < end and cases != options.cases:
            name, seed = options.targets[cases % len(options.targets)], options.seed + cases // len(options.targets)
            folder = Path(scratch) / "case"
            folder.mkdir()
            complaints = run_case(name, seed, folder)
            if complaints:
                print(f"--targets {name} --seed {seed} --cases 1: {'; '.join(complaints)}", flush=True)
            shutil.rmtree(folder)
            found, cases = found + bool(complaints), cases + 1
    print(f"{cases} cases, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
