import numpy as np

from benchmarks.data import shuffle_quality
from benchmarks.data.shuffle_quality import PER_SHARD, buffered, quality, streams


def test_a_full_shuffle_is_one_and_the_files_order_is_far_from_it() -> None:
    full, whole = (
        quality(np.random.default_rng(0).permutation(40 * PER_SHARD), 512),
        quality(np.arange(40 * PER_SHARD), 512),
    )
    for column in ("same_shard", "neighbours", "chi_square", "sorted"):
        assert 0.8 < full[column] < 1.2
    assert whole["same_shard"] > 15
    assert whole["shards"] == 2
    assert whole["sorted"] > 10


def test_larger_windows_and_buffers_shuffle_better() -> None:
    found = {name: quality(stream, 256) for name, stream in streams(80, 256)}
    assert found["ours, 64 shards"]["same_shard"] < found["ours, 16 shards"]["same_shard"] / 2
    assert found["ours, 16 shards, 16 lanes"]["shards"] > 2 * found["ours, 16 shards"]["shards"]
    assert all(0.8 < row["chi_square"] < 1.2 for row in found.values()), "videos were dealt to shards at random"


def test_workers_of_webdataset_take_turns_until_all_are_empty(monkeypatch) -> None:
    monkeypatch.setattr(shuffle_quality, "PER_SHARD", 4)
    assert sorted(buffered(5, 3, 2)) == list(range(20))
