"""The container gets all the code: `.dockerignore` names what is let in."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_image_holds_every_package() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {package.split(".")[0] for package in packages}
    assert {*rooms, "configs", "*.py", "pyproject.toml", "constraints.txt"} <= let_in
