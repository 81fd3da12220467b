"""A hundred million clips are opened in a tenth of a second, and cost what a few do. Tables are sparse files here."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning.plan import TrainingPlan
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import SAMPLE, SHARD, DatasetInfo, SizeRange, TableInfo
from adamae.pipeline.shards.gops import GOP
from adamae.shard_tools.write import write_description

PER_SHARD, VIDEO_BYTES, NAME_BYTES = 250, 100_000, 48
NUM_CLIPS = 100_000_000
CHOSEN = np.random.default_rng(0).integers(0, NUM_CLIPS - 1, 256)  # whose rows are written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    samples = np.lib.format.open_memmap(folder / "samples.npy", "w+", SAMPLE, (NUM_CLIPS,))
    for column, values in {
        "label": CHOSEN % 400,
        "size": VIDEO_BYTES,
        "offset": 1536,
        "fps": 7.5,
        "num_frames": 75,
        "frame_stride": 4,
        "width": 342,
        "height": 256,
    }.items():
        samples[column][CHOSEN] = values
    for row in (CHOSEN, CHOSEN + 1):
        samples["name"][row] = row * NAME_BYTES
    names = np.memmap(folder / "names.jsonl", np.uint8, "w+", shape=(NUM_CLIPS, NAME_BYTES))
    for number in CHOSEN.tolist():
        line = f'["video_{number:09d}","x.mp4",[{number % 400}],"",0,{{}}]'
        names[number] = np.frombuffer(line.ljust(NAME_BYTES - 1).encode() + b"\n", np.uint8)
    shards = np.zeros(NUM_CLIPS // PER_SHARD, SHARD)
    shards["first_sample"] = np.arange(len(shards)) * PER_SHARD
    shards["name"] = [f"shard-{number:06d}.tar" for number in range(len(shards))]
    shards["num_samples"], shards["num_bytes"] = PER_SHARD, PER_SHARD * (VIDEO_BYTES + 2048)
    np.save(folder / "shards.npy", shards)
    np.save(folder / "gops.npy", np.empty(0, GOP))
    tables = {}
    for name, num_rows in {
        "shards": len(shards),
        "samples": NUM_CLIPS,
        "gops": 0,
        "names": NUM_CLIPS,
    }.items():
        (path,) = folder.glob(f"{name}.*")
        tables[name] = TableInfo(path.name, num_rows, path.stat().st_size, "0" * 64)
    about: dict[str, Any] = {
        "codecs": {"h264": SizeRange(NUM_CLIPS, 342, 342, 256, 256)},
        "containers": ["mp4"],
        "frame_strides": [4],
        "tables": tables,
    }
    info = DatasetInfo(
        NUM_CLIPS,
        NUM_CLIPS * 75,
        NUM_CLIPS * VIDEO_BYTES,
        [f"c{n}" for n in range(400)],
        {},
        [],
        **about,
    )
    write_description(folder, info)
    return folder


@pytest.mark.slow  # a table of 400,000 shards is written
def test_a_hundred_million_clips_are_opened_and_planned(folder: Path) -> None:
    started = time.process_time()
    dataset = ShardDataset.open(folder)
    opened = time.process_time()
    assert [dataset.samples[int(number)].key for number in CHOSEN] == [
        f"video_{number:09d}" for number in CHOSEN
    ]
    assert dataset.samples[int(CHOSEN[0])].label == CHOSEN[0] % 400
    planning = time.process_time()
    plan = TrainingPlan(dataset, DataConfig(), seed=0, num_frames=16, image_size=224, batch_size=64)
    assert len(plan.batch(0)) == 64
    planned = time.process_time()
    assert opened - started < 0.1
    assert planned - planning < 1
