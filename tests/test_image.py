"""The container holds all the code, and its entry point runs as the owner of the mounted folders."""

import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_image_holds_every_package() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    files = {"configs", "docs", "*.md", "*.py", "pyproject.toml", "constraints.txt", "launch/entrypoint.sh"}
    assert {*packages, *files} <= allowed


@pytest.fixture
def started(tmp_path: Path):
    """Run the entry point with stand-ins for the programs it calls; return the command that it ends in."""

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
        return subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True).stdout.split()

    return start


def test_the_container_runs_as_the_owner_of_the_mounted_folder(started) -> None:
    training = ["python", "train.py", "--config", "x.yaml"]
    as_user = ["setpriv", "--reuid", "1234", "--regid", "100", "--clear-groups"]
    runs, data = "/adamae/runs", "/data"
    assert started(training[2:], {runs: "1234:100"}) == [*as_user, *training]
    assert started(training[2:], {data: "77:77", runs: "1234:100"}) == [*as_user, *training], "it writes there"
    settings = ["data.shards=/data", "steps=3"]
    assert started(settings, {data: "1234:100"})[6:] == [*training[:2], *settings]
    made_by_docker = started(training[2:], {runs: "0:0", data: "77:77"})
    assert made_by_docker == training, "as root, whose folder it is"
    assert started(training[2:], {})[2] == "adamae"
    assert started(training[2:], {runs: "77:77"}, user="1234") == training, "--user has decided"
    several = ["torchrun", "--nproc-per-node", "2", "train.py"]
    assert started(several, {})[6:] == several
    assert started([], {})[6:] == ["python", "train.py", "--help"]


def test_every_user_has_caches_of_their_own(started) -> None:
    show = ["/bin/sh", "-c", "echo $HOME $TORCHINDUCTOR_CACHE_DIR"]
    assert started(show, {}, user="1234") == ["/adamae/cache/1234", "/adamae/cache/1234/.cache/torchinductor"]
    assert started(show, {"/adamae/runs": "0:0"})[0] == "/adamae/cache/0"
