from benchmarks.data import egress


def test_lanes_keep_nodes_off_each_others_shards(monkeypatch) -> None:
    monkeypatch.setattr(egress, "PER_SHARD", 16)
    monkeypatch.setattr(egress, "GLOBAL_BATCH", 80)
    monkeypatch.setattr(egress, "GPUS", 2)
    monkeypatch.setattr(egress, "KEPT", 24)
    alone, shared, own = (egress.egress((400, nodes, lanes, 1)) for nodes, lanes in ((1, 1), (10, 1), (10, 10)))
    assert alone["downloads"] == 1
    assert shared["downloads"] > 5
    assert own["downloads"] < 1.05
    assert own["most"] < 0.11
