import json
from pathlib import Path

from benchmarks import index_scale


def test_a_dataset_of_tables_is_opened_and_planned(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(index_scale, "in_fresh_process", lambda function, *arguments: function(*arguments))
    index_scale.main(["--clips", "3000", "--work", str(tmp_path), "--output", str(tmp_path / "out")])
    (row,) = json.loads((tmp_path / "out/index_scale.json").read_text())["rows"]
    assert row["clips"] == 3000
    assert row["open_ms"] > 0 < row["batch_ms"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
