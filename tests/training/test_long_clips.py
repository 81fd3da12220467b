"""The recipe for long clips at a tiny size: positions, and clips longer than their videos."""

from pathlib import Path

import pytest
import torch
from tiny import TINY

from model.tokenizer import position_table
from model.weights.pretrained import load
from train import train
from training.config import parse
from training.logger import read_rows

RECIPE = Path(__file__).parents[2] / "configs/long_clips.yaml"


@pytest.mark.parametrize("num_frames", [32, 128])
def test_a_run_on_clips_longer_than_their_videos(num_frames: int, tiny_run, synthetic_shards, tmp_path: Path) -> None:
    tiny = [word for word in TINY if "num_frames" not in word]
    more = [f"model.num_frames={num_frames}", "steps=2", "global_batch=2", "batch_size=2", f"init_from={tiny_run}"]
    config = parse(["--config", str(RECIPE), *tiny, *more, f"data.shards={synthetic_shards}", f"run={tmp_path}"])
    train(config)
    assert [row["loss"] > 0 for row in read_rows(tmp_path / "metrics.jsonl")] == [True, True]
    assert load(tmp_path).state["token_sampler.positions"].shape[0] == num_frames // 2 * 16
    assert config.model.num_reconstructed == int(0.15 * (config.model.num_tokens - config.model.num_visible))


def test_a_place_has_the_same_position_whatever_the_number_of_frames() -> None:
    tables = [position_table("separable-3d", (time, 2, 3), 48) for time in (16, 32, 64)]
    for table in tables[1:]:
        assert torch.equal(table[: 16 * 6], tables[0])
    assert len({tuple(row) for row in tables[2].tolist()}) == 64 * 6, "all tokens differ"
