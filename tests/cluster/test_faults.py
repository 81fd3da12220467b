"""One of faults.py's faults; `python tests/cluster/faults.py` injects them all, and random ones."""

from pathlib import Path

import pytest
from faults import CHECKPOINT_EVERY, inject_all, make_shards, make_site


@pytest.mark.slow
def test_a_run_on_two_nodes_of_which_one_is_killed_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    with make_site(tmp_path, make_shards(tmp_path)) as site:
        (row,), differs = inject_all(site, ["kill -9 of a node"], 0)
    assert differs == ""
    assert row["losses_equal"]
    assert row["happens"] == "ends, resumes", "something was left running"
    assert row["steps_lost"] <= CHECKPOINT_EVERY
