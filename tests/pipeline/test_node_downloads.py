"""What several nodes download, counted by a real S3 server: each its own shards, where there are lanes."""

from pathlib import Path

import pytest
from made_videos import encode, write_shards
from object_store import Proxy, upload

from pipeline.config import DataConfig
from pipeline.planning.plan import TrainingPlan
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset

NUM_SHARDS, PER_SHARD, STEP, EPOCHS = 32, 4, 16, 2
KEPT = 4  # shards that a node's cache holds


@pytest.fixture(scope="module")
def stored(s3_proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> str:
    video = encode(4)
    videos = [(f"v{number:03d}", video) for number in range(NUM_SHARDS * PER_SHARD)]
    folder = write_shards(tmp_path_factory.mktemp("egress") / "many", videos, per_shard=PER_SHARD)
    return upload(s3_proxy.url, folder, "bucket", "many")


def read_epochs(url: str, cache: Path, node: int, nodes: int, lanes: int) -> None:
    """Have a node's clips here, batch after batch, as the loader does, but decode none."""
    config = DataConfig(
        url, frame_stride=1, cache_dir=str(cache), num_threads=1, canonical_nodes=lanes, shuffle_shards=4
    )
    shard_bytes = ShardDataset.open(config).info.shards[0].num_bytes
    config.cache_gib = KEPT * shard_bytes / 2**30
    dataset = ShardDataset.open(config)
    plan = TrainingPlan(
        dataset, config, num_frames=2, image_size=16, seed=0, batch_size=STEP // nodes, global_batch=STEP,
        rank=node, world_size=nodes,
    )  # fmt: skip
    reader = Reader(dataset, plan)
    try:
        for number in range(EPOCHS * NUM_SHARDS * PER_SHARD // STEP):
            reader.reach(number)
            for row in plan.batch(number):
                reader.download(row.sample)
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("nodes", "lanes", "least", "most"), [(1, 1, 0.9, 1.1), (2, 1, 1.8, 2.2), (2, 2, 0.9, 1.2), (4, 4, 0.8, 1.2)]
)
def test_downloads_of_an_epoch(
    store: Proxy, stored: str, tmp_path: Path, nodes: int, lanes: int, least: float, most: float
) -> None:
    """Below one: what the cache still has of the epoch before; above: shards at a lane's ends, and those of the epoch
    to come, downloaded ahead."""
    store.heal()
    for node in range(nodes):
        read_epochs(stored, tmp_path / f"node{node}", node, nodes, lanes)
    gets = sum(line.startswith("GET") and line.endswith(".tar") for line in store.requests)
    assert least <= gets / NUM_SHARDS / EPOCHS <= most
