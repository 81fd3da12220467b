"""What a release consists of.

Heavy and optional packages are imported only by what uses them, none with a known vulnerability is
pinned or allowed, and the container holds all the code and runs as the owner of the mounted
folders.

`tests/advisories.json` needs no network. To look for newer ones:
`pip install pip-audit && pip-audit --no-deps --disable-pip -r constraints.txt`, and add what it
finds.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from adamae.common.commands import COMMANDS

ROOT = Path(__file__).parents[1]
ADVISORIES = json.loads((ROOT / "tests" / "advisories.json").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PINS = [line for line in CONSTRAINTS.splitlines() if not line.startswith("#")]
HEAVY = {"torch", "timm", "torchvision", "triton", "transformers", "matplotlib", "nvidia.dali"}

HELP = """
import contextlib, io, sys
from adamae.__main__ import main
for name in sys.argv[2:]:
    sys.argv = ["adamae", name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as end:
            assert not end.code, name
    assert out.getvalue().startswith(f"usage: adamae {name} "), out.getvalue()
    assert not {HEAVY} & set(sys.modules), (name, {HEAVY} & set(sys.modules))
"""


def test_help_texts_need_no_heavy_package() -> None:
    program = HELP.replace("{HEAVY}", repr(HEAVY))
    subprocess.run(
        [sys.executable, "-c", program, "-", *COMMANDS], cwd=ROOT, check=True, timeout=300
    )


# Slow: it imports everything in a fresh process.
@pytest.mark.slow
def test_commands_start_without_optional_packages() -> None:
    program = """
import runpy, sys
for name in ("nvidia.dali", "wandb", "ray", "s3fs"):
    sys.modules[name] = None
sys.argv = ["train.py", "data.shards=nowhere"]
runpy.run_path("train.py", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def list_versions(requirements: list[str], operator: str) -> dict[str, str]:
    """Return the version after `operator`, by package."""
    versions = {}
    for requirement in map(Requirement, requirements):
        for bound in requirement.specifier:
            if bound.operator == operator:
                versions[canonicalize_name(requirement.name)] = bound.version
    return versions


@pytest.mark.parametrize(
    "advisory", ADVISORIES, ids=lambda advisory: f"{advisory['package']} {advisory['id']}"
)
def test_no_vulnerable_release_is_pinned_or_allowed(advisory: dict[str, str]) -> None:
    affected = Requirement(advisory["package"] + advisory["affected"])
    name = canonicalize_name(affected.name)
    pinned = list_versions(PINS, "==")
    oldest = list_versions(PROJECT["project"]["dependencies"], ">=")
    assert pinned[name] not in affected.specifier
    assert name not in oldest or oldest[name] not in affected.specifier
    assert advisory["source"].startswith("https://github.com/")


def test_the_image_holds_every_package() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    files = {
        "configs",
        "docs",
        "*.md",
        "*.py",
        "pyproject.toml",
        "constraints.txt",
        "launch/entrypoint.sh",
    }
    packages = {link.name for link in (ROOT / "adamae").iterdir() if link.is_dir()}
    packages.discard("__pycache__")
    assert {"adamae", *packages, *files} <= allowed


Start = Callable[..., list[str]]


@pytest.fixture
def started(tmp_path: Path) -> Start:
    """Return a function that runs the entry point and returns the command that it ends in.

    The programs that it calls are stand-ins. `mounts` are folders, with "user:group" of the owner.
    """

    def start(arguments: list[str], mounts: dict[str, str], user: str = "0") -> list[str]:
        owners = " ".join(f"{folder}) echo {owner};;" for folder, owner in mounts.items())
        mounted = " ".join(f"{folder}) exit 0;;" for folder in mounts)
        programs = {
            "id": f"echo {user}",
            "mountpoint": f'case "$2" in {mounted or "none) ;;"} esac; exit 1',
            "stat": f'case "$3" in {owners or "none) ;;"} esac',
        }
        programs |= {name: f'echo {name} "$@"' for name in ("setpriv", "python", "torchrun")}
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        command = ["/bin/sh", str(ROOT / "launch" / "entrypoint.sh"), *arguments]
        environment = {"PATH": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.stdout.split()

    return start


def test_the_container_runs_as_the_owner_of_the_mounted_folder(started: Start) -> None:
    training = ["python", "train.py", "--config", "x.yaml"]
    as_user = ["setpriv", "--reuid", "1234", "--regid", "100", "--clear-groups"]
    runs = "/adamae/runs"
    data = "/data"
    assert started(training[2:], {runs: "1234:100"}) == [*as_user, *training]
    of_both = started(training[2:], {data: "77:77", runs: "1234:100"})
    assert of_both == [*as_user, *training], "it writes to the runs"
    settings = ["data.shards=/data", "steps=3"]
    assert started(settings, {data: "1234:100"})[6:] == [*training[:2], *settings]
    made_by_docker = started(training[2:], {runs: "0:0", data: "77:77"})
    assert made_by_docker == training, "as root, whose folder it is"
    assert started(training[2:], {})[2] == "adamae"
    assert started(training[2:], {runs: "77:77"}, user="1234") == training, "--user has decided"
    several = ["torchrun", "--nproc-per-node", "2", "train.py"]
    assert started(several, {})[6:] == several
    assert started([], {})[6:] == ["python", "train.py", "--help"]


def test_every_user_has_caches_of_their_own(started: Start) -> None:
    show = ["/bin/sh", "-c", "echo $HOME $TORCHINDUCTOR_CACHE_DIR"]
    home = "/adamae/cache/1234"
    assert started(show, {}, user="1234") == [home, f"{home}/.cache/torchinductor"]
    assert started(show, {"/adamae/runs": "0:0"})[0] == "/adamae/cache/0"
