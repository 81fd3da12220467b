import json
from pathlib import Path

import pytest

from benchmarks import ablations
from common.errors import InputError

TINY = [
    "model.encoder_depth=1", "model.decoder_depth=1", "model.num_frames=4", "model.image_size=32", "global_batch=2",
    "device=cpu", "data.num_threads=1", "evaluation.every=null", "data.frame_stride=2",
]  # fmt: skip


def test_a_table_with_trained_columns(
    tmp_path: Path, synthetic_shards: Path, synthetic_videos: Path, monkeypatch
) -> None:
    table = ablations.read_yaml(ablations.ROOT / "benchmarks/ablations.yaml")["f"]
    monkeypatch.setattr(ablations, "read_yaml", lambda _: {"f": {**table, "rows": table["rows"][1:3]}})
    monkeypatch.setattr(ablations, "in_fresh_process", lambda function, *arguments: function(*arguments))
    recipe = str(ablations.ROOT / "configs/demo.yaml")
    arguments = ["--table", "f", "--config", recipe, "--batch-size", "2", "--measure", "--output", str(tmp_path)]
    trained = ["--train", "2", "--shards", str(synthetic_shards), "--videos", str(synthetic_videos)]
    ablations.main([*arguments, *trained, *TINY])

    rows = json.loads((tmp_path / "table_1f.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["sampler_width=384", "sampler_width=768"]
    assert [row["paper_memory_gb"] for row in rows] == [14.0, 14.4]
    assert rows[0]["parameters_m"] < rows[1]["parameters_m"], "half of this recipe's width too"
    for row in rows:
        assert 0 < row["predicted_peak_gib"] < 1
        assert row["cpu_ms_per_clip"] > 0
        assert 0 < row["trained_reconstruction_loss"] < 3
        assert -1 <= row["trained_correlation"] <= 1


def test_epochs_become_a_fraction_of_the_steps(tmp_path: Path) -> None:
    options, extra = ablations.parse_arguments(["--table", "e", "--train", "80", "--shards", "s", "--videos", "v"])
    assert ablations.make_config(["epochs=200"], options, extra, tmp_path).steps == 20
    assert ablations.make_config(["epochs=800"], options, extra, tmp_path).steps == 80


def test_rows_with_a_teacher_have_one_of_the_encoders_size(tmp_path: Path) -> None:
    options, extra = ablations.parse_arguments(["--table", "g", "model.size=tiny"])
    pixels, teacher = (
        ablations.count_cost(ablations.make_config([f"model.target={target}"], options, extra, tmp_path).model, 2)
        for target in ("pixels", "teacher")
    )
    assert teacher["gflop_per_clip"] > pixels["gflop_per_clip"]
    assert teacher["predicted_peak_gib"] != pixels["predicted_peak_gib"]
    named, extra = ablations.parse_arguments(["--table", "g", "--teacher", "RUN"])
    assert ablations.make_config(["model.target=teacher"], named, extra, tmp_path).model.teacher == "RUN"


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--train", "10"], "--train needs --shards"), (["model.nonsense=1"], r"model\.nonsense")]
)
def test_bad_arguments_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ablations.main(["--table", "a", *arguments])
