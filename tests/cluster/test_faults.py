"""A few of faults.py's faults, in a row on one run; `python tests/cluster/faults.py` does them all, and random ones."""

from collections.abc import Iterator

import pytest
from faults import (
    CHECKPOINT_EVERY,
    FAULTS,
    NEEDS,
    PASSES,
    Campaign,
    in_a_row,
    make_shards,
)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    folder = tmp_path_factory.mktemp("cluster")
    with Campaign(folder, make_shards(folder)) as campaign:
        yield campaign


def test_a_struck_run_ends_as_an_undisturbed_one(campaign: Campaign) -> None:
    names = ["kill -9 of a node"]  # signals, and processes that end alone, or are fewer: training/test_processes.py
    rows, differs, _ = in_a_row(campaign, names, 0)
    assert differs == ""
    assert [row["fault"] for row in rows] == names
    assert all(row["losses_equal"] for row in rows)
    assert all(row["happens"] == "ends, goes on" for row in rows), "something was left running"
    assert rows[0]["steps_lost"] <= CHECKPOINT_EVERY


def test_every_name_is_a_fault() -> None:
    assert FAULTS.keys() > PASSES
    assert NEEDS.keys() < FAULTS.keys()
