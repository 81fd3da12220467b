"""No known hole in what reads untrusted bytes: neither in the pins nor in the oldest releases that are allowed.

`tests/advisories.json` is pinned, so that this needs no network; every entry names its source. To look for newer ones:
`pip install pip-audit && pip-audit --no-deps --disable-pip -r constraints.txt`, and add what it finds.
"""

import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
ADVISORIES = json.loads((ROOT / "tests" / "advisories.json").read_text(encoding="utf-8"))


def pinned() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def oldest() -> dict[str, Version]:
    """The lower bounds of what pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = map(Requirement, project["dependencies"])
    return {
        canonicalize_name(requirement.name): Version(bound.version)
        for requirement in asked
        for bound in requirement.specifier
        if bound.operator == ">="
    }


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda advisory: f"{advisory['package']} {advisory['id']}")
def test_no_release_with_a_known_hole_is_installed_or_allowed(advisory: dict[str, str]) -> None:
    affected = Requirement(advisory["package"] + advisory["affected"])
    name = canonicalize_name(affected.name)
    assert name in pinned(), "an entry about nothing that is installed"
    for versions, where in ((pinned(), "constraints.txt"), (oldest(), "pyproject.toml")):
        if name in versions:
            assert versions[name] not in affected.specifier, f"{where} allows {name} {versions[name]}: {advisory}"


def test_every_advisory_has_a_source() -> None:
    assert all(advisory["source"].startswith("https://github.com/") and advisory["id"] for advisory in ADVISORIES)


def test_what_is_imported_is_asked_for() -> None:
    assert "pyyaml" in oldest()
