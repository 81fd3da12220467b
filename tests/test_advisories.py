"""No release with a known vulnerability is pinned, or allowed by the ranges, of what reads untrusted bytes.

`tests/advisories.json` needs no network. To look for newer ones: `pip install pip-audit && pip-audit --no-deps
--disable-pip -r constraints.txt`, and add what it finds.
"""

import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ADVISORIES = json.loads((ROOT / "tests" / "advisories.json").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"]


def list_versions(requirements: list[str], operator: str) -> dict[str, str]:
    """Return the version after `operator`, by package."""
    return {
        canonicalize_name(requirement.name): bound.version
        for requirement in map(Requirement, requirements)
        for bound in requirement.specifier
        if bound.operator == operator
    }


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda advisory: f"{advisory['package']} {advisory['id']}")
def test_no_vulnerable_release_is_pinned_or_allowed(advisory: dict[str, str]) -> None:
    affected = Requirement(advisory["package"] + advisory["affected"])
    name = canonicalize_name(affected.name)
    pinned, oldest = list_versions(PINS, "=="), list_versions(PROJECT["dependencies"], ">=")
    assert pinned[name] not in affected.specifier
    assert name not in oldest or oldest[name] not in affected.specifier
    assert advisory["source"].startswith("https://github.com/")
