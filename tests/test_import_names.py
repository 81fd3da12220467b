"""Import names begin with `adamae`, in a clone and from a wheel.

So a project may have packages of the names that folders at the top of the repository have.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import adamae

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(file.stem for file in ROOT.glob("*.py") if file.name != "hubconf.py")
# Stands in for Hugging Face's package, from which transformers takes classes and decorators.
KERNELS = """
class Anything:
    def __init__(self, *_, **__): pass
    def __call__(self, decorated): return decorated

def __getattr__(name):
    return Anything
"""
KERNELS_METADATA = "Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"


def run_python(program: str, cwd: Path, *paths: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what git knows."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name, follow_symlinks=False)
    run_python("from setuptools import build_meta; build_meta.build_wheel('..')", folder / "tree")
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_every_public_name_can_be_imported() -> None:
    for name in adamae.__all__:
        assert hasattr(adamae, name)


def test_the_wheel_holds_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"adamae"}
    assert {f"adamae/{command}.py" for command in COMMANDS} < set(names)
    assert {"adamae/training/report.html.jinja", "adamae/configs/demo.yaml"} < set(names)


def test_the_wheel_puts_adamae_on_the_path(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (file,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
    assert "adamae = adamae.__main__:main" in archive.read(file).decode().splitlines()


@pytest.mark.parametrize("command", ["adamae", "adamae train", "adamae shards", "adamae demo"])
def test_an_installed_wheel_runs_commands(command: str, wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    words = [sys.executable, "-m", *command.split(), "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout + done.stderr


@pytest.mark.parametrize("is_package", [True, False], ids=["packages", "folders"])
def test_a_project_may_have_packages_of_the_same_names(
    is_package: bool, wheel: Path, tmp_path: Path
) -> None:
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    for name in ("common", "model", "pipeline"):
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "own.py").touch()
        if is_package:
            (tmp_path / "project" / name / "__init__.py").touch()
    program = """
import adamae, common.own, model.own, pipeline.own
adamae.ClipDataset
print(adamae.__file__)
"""
    for path in (installed, ROOT):
        imported_from = run_python(program, tmp_path / "project", path).strip()
        assert imported_from == str(path / "adamae/__init__.py")


@pytest.fixture
def hugging_face_kernels(tmp_path: Path) -> Path:
    """Write a package of the name and of a version of Hugging Face's `kernels`."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    folder = tmp_path / "site"
    info = folder / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(KERNELS_METADATA.format(version=KERNELS_MIN_VERSION))
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(KERNELS)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_a_clone_hide_no_package(command: str, hugging_face_kernels: Path) -> None:
    program = f"""
import runpy, sys
# Python does so for a script.
sys.path.insert(0, {str(ROOT)!r})
sys.argv = [{command!r}, "--help"]
try:
    runpy.run_path({str(ROOT / f"{command}.py")!r}, run_name="__main__")
except SystemExit as end:
    assert not end.code
import kernels
assert kernels.__file__.startswith({str(hugging_face_kernels)!r}), kernels.__file__
"""
    run_python(program, ROOT, hugging_face_kernels)


# Slow: it imports transformers in a fresh process.
@pytest.mark.slow
def test_transformers_is_imported_from_a_clone(hugging_face_kernels: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import adamae
from transformers import VideoMAEModel
assert sys.modules["kernels"].__file__.startswith({str(hugging_face_kernels)!r})
"""
    run_python(program, ROOT, hugging_face_kernels)
