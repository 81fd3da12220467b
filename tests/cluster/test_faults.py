"""A few of faults.py's faults, in a row on one run; `python tests/cluster/faults.py` does them all, and random ones."""

from collections.abc import Iterator

import pytest
from faults import FAULTS, NEEDS, PASSES, Campaign, in_a_row, make_shards, order_at_other_sizes


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    folder = tmp_path_factory.mktemp("cluster")
    with Campaign(folder, make_shards(folder)) as campaign:
        yield campaign


def test_a_struck_run_ends_with_the_weights_of_an_undisturbed_one(campaign: Campaign) -> None:
    names = ["kill -9 of a node", "store: other bytes, once", "SIGTERM to all"]
    rows, differs = in_a_row(campaign, names, len(names), seed=0)
    assert differs == ""
    assert [row["fault"] for row in rows] == names
    assert all(row["losses_equal"] for row in rows)
    assert [row["happens"] for row in rows] == ["ends, goes on", "goes on", "ends, goes on"]
    assert rows[2]["steps_lost"] == 0, "a run that is asked to stop saves"


def test_fewer_processes_go_on_with_the_same_clips_in_the_same_order(campaign: Campaign) -> None:
    assert order_at_other_sizes(campaign) < 1e-5


def test_every_name_is_a_fault() -> None:
    assert FAULTS.keys() > PASSES
    assert NEEDS.keys() < FAULTS.keys()
