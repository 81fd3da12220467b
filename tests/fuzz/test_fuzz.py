"""The fuzzer on a fixed set of cases, what it has ever found, and whether it would see a fault at all."""

import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from fuzzer.cases import Case, read_tree
from fuzzer.materials import Materials
from fuzzer.planted import FAULTS
from fuzzer.targets import TARGETS
from fuzzer.workers import FINDINGS, Worker, cases, read_finding, run_all, shrunk, write_finding

# Always the same cases, the first ones of the same seed: a fast machine and a slow one judge alike.
SEED = 0
NUM_CASES = int(os.environ.get("ADAMAE_FUZZ_CASES", "50"))  # a minute or two


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.mark.timeout(900)
def test_no_case_of_a_fixed_seed_finds_anything(worker: Worker) -> None:
    found = []
    for result in islice(run_all([worker], cases(worker.weights, SEED)), NUM_CASES):
        assert not result.skipped, f"{result.case.target} {result.case.seed} cannot be made: {result.skipped}"
        if result.complaints:
            found.append(f"{result.case.target} {result.case.seed}: {'; '.join(result.complaints)}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", sorted(FINDINGS.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_once_stays_mended(worker: Worker, path: Path) -> None:
    assert worker.run(read_finding(path)).complaints == []


@pytest.mark.parametrize("command", FAULTS, ids=lambda command: command.__name__)
def test_a_planted_fault_is_seen(worker: Worker, command) -> None:
    complaints = worker.run(Case(f"planted-{command.__name__}", 0)).complaints
    assert any(FAULTS[command] in complaint for complaint in complaints), complaints


@pytest.mark.parametrize("name", ["fine", "one_sentence"])
def test_what_is_right_is_no_finding(worker: Worker, name: str) -> None:
    assert worker.run(Case(f"planted-{name}", 0)).complaints == []


def test_a_finding_is_shrunk_and_plays_again_from_its_file(worker: Worker, tmp_path: Path) -> None:
    line, ff = ("*.yaml:add_line", 1), ("*.yaml:add_ff", 2)
    found = worker.run(Case("planted-ff", 0, (line, ff, line, ff, line)))
    smallest = shrunk(worker, found)
    assert smallest is not None
    assert smallest.case.edits == (ff,)
    again = read_finding(write_finding(tmp_path, smallest))
    assert again.tree is not None
    assert worker.run(again).complaints == found.complaints
    without_edits = Case(again.target, again.seed, (), again.tree)
    assert worker.run(without_edits).complaints == found.complaints, "what is kept are the files"


def test_the_same_seed_gives_the_same_cases_and_the_same_files(tmp_path: Path) -> None:
    weights = {name: target.weight for name, target in TARGETS.items()}
    drawn = [list(islice(cases(weights, 0), 60)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != list(islice(cases(weights, 1), 60))
    target, material = TARGETS["configuration"], Materials(tmp_path / "materials").folder("config")
    trees = []
    for seed in (1, 1, 2):
        Case("configuration", seed).prepare(target, material, tmp_path / "given")
        trees.append(read_tree(tmp_path / "given"))
        shutil.rmtree(tmp_path / "given")
    assert trees[0] == trees[1] != trees[2]
