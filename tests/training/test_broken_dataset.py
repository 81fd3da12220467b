"""One video in twenty goes bad after the shards were made: the run ends, names them, and learns what the plan says."""

import json
import sys
from pathlib import Path

import forked
import made_videos
import pytest
import torch
from runs import read_rows
from tiny import TINY

import train
from pipeline.planning.plan import PlanRow, TrainingPlan
from pipeline.shards.dataset import ShardDataset
from training.config import parse

ROOT = Path(__file__).parents[2]
NUM_VIDEOS, BROKEN = 40, {"v07", "v31"}  # 5 %
STEPS = 25  # of 4 clips: two and a half epochs, so each broken video comes up again after it was written down
SETTINGS = [*TINY, "data.num_workers=2", f"steps={STEPS}", "checkpoint_every=100"]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    videos = [(f"v{i:02d}", made_videos.encode(12, first=i, pattern=True)) for i in range(NUM_VIDEOS)]
    return made_videos.write_shards(tmp_path_factory.mktemp("shards") / "intact", videos, per_shard=8)


@pytest.fixture(scope="module")
def broken(intact: Path) -> Path:
    return Path(made_videos.broken_copy(intact, intact.with_name("broken"), BROKEN).folder)


class PlanThatKnows(TrainingPlan):
    """Puts the replacements in the place of the broken videos from the start."""

    def row(self, position: int) -> PlanRow:
        row, attempt = super().row(position), 0
        while self._dataset.samples[row.sample].key in BROKEN:
            attempt += 1
            row = self.replacement(row, attempt)
        return row


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_rows(run)]


def train_here(shards: Path, run: Path) -> list[float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train.train(parse([*SETTINGS, f"data.shards={shards}", f"run={run}"]))
    finally:
        torch.set_num_threads(threads)
    return losses(run)


def test_a_run_over_broken_videos_is_the_one_that_the_plan_says(
    intact: Path, broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, str(ROOT / "train.py"), *SETTINGS, f"data.shards={broken}", f"run={tmp_path / 'run'}"]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr

    entries = [json.loads(line) for line in (tmp_path / "run/quarantine.jsonl").read_text().splitlines()]
    assert sorted(entry["key"] for entry in entries) == sorted(BROKEN), "each once"
    assert all(str(broken / "shard-") in entry["where"] and entry["reason"] for entry in entries)

    curve = losses(tmp_path / "run")
    assert len(curve) == STEPS
    whole = train_here(intact, tmp_path / "whole")
    first = next(step for step in range(STEPS) if curve[step] != whole[step])
    monkeypatch.setattr(train, "TrainingPlan", PlanThatKnows)
    assert train_here(intact, tmp_path / "knowing") == curve, "the clips are not those of the plan"

    config = parse([*SETTINGS, f"data.shards={intact}", f"run={tmp_path / 'no'}"])
    plan = TrainingPlan(
        ShardDataset.open(intact), config.data, num_frames=4, image_size=32, seed=config.seed, batch_size=4
    )
    samples = ShardDataset.open(intact).samples
    shows_broken = [any(samples[row.sample].key in BROKEN for row in plan.batch(step)) for step in range(STEPS)]
    assert first == shows_broken.index(True) > 0, "the curves part where the plan shows the first broken video"
