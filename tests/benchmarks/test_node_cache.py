from pathlib import Path

from benchmarks.data import node_cache


def test_what_is_kept_by_its_next_use_is_downloaded_less(tmp_path: Path) -> None:
    row = node_cache.downloads(tmp_path, 40, 0.5)
    assert row["downloads"] < 0.6
    assert row["least_recently_used"] > 0.65


def test_a_miss_is_timed(tmp_path: Path) -> None:
    row = node_cache.miss(tmp_path, 20)
    assert row["ms"] > 0
