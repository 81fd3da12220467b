"""Run the commands on randomly damaged files, and check what SECURITY.md promises.

`make fuzz MINUTES=60` runs it. A case is a target and a seed, which determine the damage;
`--targets check --seed 17 --cases 1` repeats one. Every case runs in a fork of a process that has
imported everything and computed nothing, with limits of time and memory.
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
# EX_IOERR of sysexits.h: the disk, not the input.
DISK_ERROR = 74
MAKE = "shard_tools/make_shards.py --workers=1 --max-rejects=1 --samples-per-shard=3 "
TRAIN = f"train.py {' '.join(TINY)} steps=3 checkpoint_every=1 data.shards="
PREVIEW = "preview.py --num-clips=2 model.num_frames=4 model.image_size=32 --output={out}/preview "
WEIGHTS = "run/checkpoints/step-00000002/model.safetensors"


@dataclass(frozen=True)
class Target:
    """Which files of which material are damaged, and the command that reads them."""

    material: str
    # A pattern.
    files: str
    command: str
    # Exit codes that are no finding.
    codes: Sequence[int] = (0, 2)
    changes_input: bool = False


TARGETS = {
    "copy": Target("videos", "*/*.mp4", MAKE + "{input} {out}/shards --encode=copy", (0, 2, 3)),
    "encode": Target(
        "videos", "*/*.mp4", MAKE + "{input} {out}/shards --preset=ultrafast", (0, 2, 3)
    ),
    "list": Target(
        "list", "list.csv", MAKE + "{input}/list.csv {out}/shards --encode=copy", (0, 2, 3)
    ),
    "tar": Target(
        "tar", "videos.tar", MAKE + "{input}/videos.tar {out}/shards --encode=copy", (0, 2, 3)
    ),
    "check": Target(
        "run", "shards/*", "shard_tools/check_shards.py {input}/shards --workers=1", (0, 1, 2)
    ),
    "add": Target(
        "run", "shards/*", MAKE + "{input}/videos {input}/shards --frame-stride=2", (0, 2, 3), True
    ),
    "preview": Target("run", "shards/*", PREVIEW + "{input}/shards"),
    "train": Target("run", "shards/*", TRAIN + "{input}/shards run={out}/run"),
    "resume": Target(
        "run", "run/**/*", TRAIN + "{input}/shards run={input}/run", changes_input=True
    ),
    "config": Target(
        "run", "run/config.yaml", "train.py --config={input}/run/config.yaml run={out}/run"
    ),
    "visualize": Target(
        "run", "run/**/*", "visualize.py {input}/run {input}/shards --clips=1 --output={out}"
    ),
    "weights": Target(
        "run", WEIGHTS, f"export.py import {{input}}/{WEIGHTS} {{out}}/imported.safetensors"
    ),
}


def make_materials(folder: Path) -> None:
    """Make small videos, a list and a tar of them, shards, and a run that lacks its last step."""
    videos = folder / "videos"
    run = folder / "run"
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
    """Run a target's command on a damaged copy of its material; return what went wrong."""
    target = TARGETS[name]
    rng = Random(f"{name} {seed}")
    material = folder / "input"
    out = folder / "out"
    shutil.copytree(folder.parent / target.material, material)
    out.mkdir()
    files = sorted(path for path in material.glob(target.files) if path.is_file())
    intact = _read(material)
    for path in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2, 4)))):
        damage(path, rng)
    before = _read(material)
    done = _run(target.command.format(input=material, out=out), folder)
    complaints = list(_complain(done, target.codes))
    if not target.changes_input and _read(material) != before:
        complaints.append("the input has changed")
    if list(folder.rglob("*.partial")):
        complaints.append("half-written files are left")
    is_intact = _without_rejects(intact) == _without_rejects(before)
    if name == "check" and done.returncode == 0 and not is_intact:
        complaints.append("check_shards finds nothing wrong")
    return complaints


def _run(command: str, home: Path) -> "CompletedProcess[str]":
    """Run a script within the limits, with its temporary files in `home`."""
    return forked.run([sys.executable, LIMITED, *command.split()], os.environ | {"HOME": str(home)})


def _complain(done: "CompletedProcess[str]", codes: Sequence[int]) -> Iterator[str]:
    """Yield what is wrong with how a command ended: a traceback, a signal, another exit code, …"""
    code = done.returncode
    output = done.stdout + done.stderr
    lines = [line for line in done.stderr.replace("\r", "\n").split("\n") if line.strip()]
    last = lines[-1] if lines else ""
    if "Traceback (most recent call last)" in output:
        yield f"traceback: {last}"
    elif code < 0:
        yield f"signal {-code}"
    elif code not in (*codes, DISK_ERROR):
        yield f"exit code {code}: {last}"
    elif code > 1 and not last.startswith("error: "):
        yield f"exit code {code} without a sentence: {last!r}"
    controls = {char for char in output if char < " "} - set("\n\r\t")
    if controls:
        yield f"control characters on the terminal: {sorted(controls)}"


def _read(folder: Path) -> dict[str, bytes | str]:
    """Return every file's bytes, and where links lead."""
    contents: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            contents[str(path)] = os.readlink(path)
        elif path.is_file():
            contents[str(path)] = path.read_bytes()
    return contents


def _without_rejects(files: dict[str, bytes | str]) -> dict[str, bytes | str]:
    """Return the files that check_shards.py checks."""
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
    num_findings = 0
    num_cases = 0
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="adamae-fuzz-") as scratch:
        make_materials(Path(scratch))
        while time.monotonic() < end and num_cases != options.cases:
            # Each seed goes through all targets.
            seed_offset, index = divmod(num_cases, len(options.targets))
            name = options.targets[index]
            seed = options.seed + seed_offset
            folder = Path(scratch) / "case"
            folder.mkdir()
            complaints = run_case(name, seed, folder)
            if complaints:
                case = f"--targets {name} --seed {seed} --cases 1"
                print(f"{case}: {'; '.join(complaints)}", flush=True)
                num_findings += 1
            shutil.rmtree(folder)
            num_cases += 1
    print(f"{num_cases} cases, {num_findings} findings")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
