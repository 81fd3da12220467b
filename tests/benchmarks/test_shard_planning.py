import json
from pathlib import Path

import pytest

from benchmarks.data import shard_planning


def test_every_part_of_it_has_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = ["--work", str(tmp_path), "--output", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", ["shard_planning.py", "--sources", "2000", "--parts", "2", *folders])
    shard_planning.main()
    results = json.loads((tmp_path / "results" / "shard_planning.json").read_text(encoding="utf-8"))
    (row,) = results["rows"]
    assert (row["sources"], row["part_shards"]) == (2000, 4)
    assert row["first_shards_ms"] > 0
    assert row["last_shards_ms"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
