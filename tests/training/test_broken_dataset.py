"""One video in twenty goes bad after the shards were made: the run ends, names them, and learns what the plan says."""

import json
import sys
from pathlib import Path

import forked
import made_videos
import pytest
from runs import read_rows
from tiny import TINY

import train
from pipeline.planning.plan import PlanRow, TrainingPlan
from training.config import parse

ROOT = Path(__file__).parents[2]
NUM_VIDEOS, BROKEN = 40, {"v07", "v31"}  # 5 %
STEPS = 25  # of 4 clips: two and a half epochs, so each broken video comes up again after it was written down
SETTINGS = [*TINY, "data.num_workers=2", f"steps={STEPS}", "checkpoint_every=100"]


class PlanThatKnows(TrainingPlan):
    """Puts the replacements in the place of the broken videos from the start."""

    def row(self, position: int) -> PlanRow:
        row, attempt = super().row(position), 0
        while self._dataset.samples[row.sample].key in BROKEN:
            attempt += 1
            row = self.replacement(row, attempt)
        return row


def train_here(shards: Path, run: Path) -> list[float]:
    train.train(parse([*SETTINGS, f"data.shards={shards}", f"run={run}"]))
    return [row["loss"] for row in read_rows(run)]


def test_a_run_over_broken_videos_is_the_one_that_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos = [(f"v{i:02d}", made_videos.encode(12, first=i, pattern=True)) for i in range(NUM_VIDEOS)]
    intact = made_videos.write_shards(tmp_path / "intact", videos, per_shard=8)
    broken = made_videos.broken_copy(intact, tmp_path / "broken", BROKEN).folder
    command = [sys.executable, str(ROOT / "train.py"), *SETTINGS, f"data.shards={broken}", f"run={tmp_path / 'run'}"]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr

    entries = [json.loads(line) for line in (tmp_path / "run/quarantine.jsonl").read_text().splitlines()]
    assert sorted(entry["key"] for entry in entries) == sorted(BROKEN), "each once"
    assert all(str(broken / "shard-") in entry["where"] and entry["reason"] for entry in entries)

    curve = [row["loss"] for row in read_rows(tmp_path / "run")]
    assert len(curve) == STEPS
    assert train_here(intact, tmp_path / "whole") != curve
    monkeypatch.setattr(train, "TrainingPlan", PlanThatKnows)
    assert train_here(intact, tmp_path / "knowing") == curve, "the clips are not those of the plan"
