import json
import operator
from pathlib import Path

from benchmarks import ablations

TINY = ["size=tiny", "encoder_depth=1", "decoder_depth=1", "num_frames=4", "image_size=32", "mask_ratio=0.5"]


def test_a_row_has_its_cost_beside_the_papers(tmp_path: Path, monkeypatch) -> None:
    table = ablations.read_yaml(ablations.ROOT / "benchmarks/ablations.yaml")["f"]
    monkeypatch.setattr(ablations, "read_yaml", lambda _: {"f": {**table, "rows": table["rows"][1:3]}})
    monkeypatch.setattr(ablations, "in_fresh_process", operator.call)
    tiny = [f"model.{text}" for text in TINY]
    ablations.main(["--table", "f", "--batch-size", "2", "--measure", "--output", str(tmp_path), *tiny])
    rows = json.loads((tmp_path / "table_1f.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["sampler_width=384", "sampler_width=768"]
    assert [row["paper_memory_gb"] for row in rows] == [14.0, 14.4]
    assert rows[0]["parameters_m"] < rows[1]["parameters_m"]
    for row in rows:
        assert 0 < row["predicted_peak_gib"] < 1
        assert row["cpu_ms_per_clip"] > 0


def test_rows_with_a_teacher_have_one_of_the_encoders_size(tmp_path: Path) -> None:
    pixels, teacher = (
        ablations.count_cost(ablations.make_model_config([f"model.target={target}"], ["model.size=tiny"], tmp_path), 2)
        for target in ("pixels", "teacher")
    )
    assert teacher["gflop_per_clip"] > pixels["gflop_per_clip"]
    assert teacher["predicted_peak_gib"] != pixels["predicted_peak_gib"]
