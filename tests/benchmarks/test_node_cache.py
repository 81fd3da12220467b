from benchmarks import node_cache


def test_keeping_what_came_first_serves_what_fits() -> None:
    rows = node_cache.simulate(num_shards=40, nodes=4)
    for row in rows:
        assert abs(row["keep_first"] - row["cache"]) < 0.01
        assert row["keep_first"] <= row["optimal"] <= 1
        assert row["keep_first"] >= row["lru"]
        assert row["unbound"] < row["cache"] / 2
