import json
from pathlib import Path

import pytest
from made_videos import encode, write_shards

import train
from benchmarks import ablations
from common.errors import InputError
from training.config import parse

TINY = [
    "model.encoder_depth=1", "model.decoder_depth=1", "model.num_frames=4", "model.image_size=32", "global_batch=2",
    "device=cpu", "data.num_threads=1", "evaluation.every=null", "data.frame_stride=1",
]  # fmt: skip


def test_a_table_with_learning_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    videos = [(f"v{i}", encode(20, first=i, pattern=True)) for i in range(4)]
    shards = write_shards(tmp_path / "shards", videos)
    monkeypatch.setattr(ablations, "train", lambda recipe: train.train(parse(["--config", str(recipe)])))
    monkeypatch.setattr(ablations, "in_fresh_process", lambda function, *arguments: function(*arguments))
    recipe = str(ablations.ROOT / "configs/demo.yaml")
    arguments = ["--table", "f", "--config", recipe, "--batch-size", "2", "--measure"]
    trained = ["--train", "3", "--shards", str(shards), "--videos", str(shards), "--output", str(tmp_path / "out")]
    ablations.main([*arguments, *trained, *TINY])

    rows = json.loads((tmp_path / "out/table_1f.json").read_text())["rows"]
    assert [row["row"] for row in rows] == [
        "sampler=mlp", "sampler_width=384", "sampler_width=768", "sampler_width=384 sampler_depth=2",
    ]  # fmt: skip
    assert [row["paper_memory_gb"] for row in rows] == [11.8, 14.0, 14.4, 17.1]
    # Half the width is half of this recipe's width too: fewer parameters; two such blocks cost more than one.
    parameters = [row["parameters_m"] for row in rows]
    assert parameters[0] < parameters[1] < parameters[3] < parameters[2]
    for row in rows:
        assert 0 < row["predicted_peak_gib"] < 1
        assert row["cpu_ms_per_clip"] > 0
        assert 0 < row["learnt_reconstruction_loss"] < 3
        assert -1 <= row["learnt_correlation"] <= 1
    assert "| paper_top1 |" in (tmp_path / "out/table_1f.md").read_text()
    for run in (tmp_path / "out/runs").glob("*/config.yaml"):
        assert "steps: 3" in run.read_text()


def test_epochs_become_a_share_of_the_steps() -> None:
    options, extra = ablations.parse_arguments(["--table", "e", "--train", "80", "--shards", "s", "--videos", "v"])
    assert ablations.configured(["epochs=200"], options, extra).steps == 20
    assert ablations.configured(["epochs=800"], options, extra).steps == 80


def test_training_needs_shards_and_videos() -> None:
    with pytest.raises(InputError, match="--train needs --shards"):
        ablations.main(["--table", "a", "--train", "10"])
    with pytest.raises(InputError, match=r"model\.nonsense"):
        ablations.main(["--table", "a", "model.nonsense=1"])
