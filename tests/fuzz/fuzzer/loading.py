"""The loader as a command: it writes down what it delivers."""

from collections import Counter
from pathlib import Path

import numpy as np
import torch

from pipeline.config import DataConfig
from pipeline.loader import ClipLoader
from pipeline.planning.plan import TrainingPlan
from pipeline.shards.dataset import ShardDataset

BATCH, NUM_FRAMES, SIZE, EPOCHS = 3, 4, 16, 2


def load(shards: Path, out: Path, frame_stride: int) -> None:
    """Write two epochs of clips, with what the plan says of them, to `out`/clips.npz."""
    config = DataConfig(
        shards=str(shards), decoder="pyav", num_threads=1, prefetch=1, frame_stride=frame_stride, max_bad_fraction=0.99,
        decode_timeout_s=5,
    )  # fmt: skip
    dataset = ShardDataset.open(config)
    plan = TrainingPlan(dataset, config, num_frames=NUM_FRAMES, image_size=SIZE, seed=0, batch_size=BATCH)
    claims = Counter(dataset.samples[place].key for place in range(len(dataset.samples)))
    clips, keys, labels, frames, boxes = [], [], [], [], []
    with ClipLoader(dataset, plan, torch.device("cpu"), config, out / "quarantine.jsonl") as loader:
        batches = loader.batches(first=0)
        for number in range(-(-EPOCHS * len(dataset.samples) // BATCH)):
            batch = next(batches)
            for place, row in enumerate(plan.batch(number)):
                sample = dataset.samples[row.sample]
                if batch.keys[place] != sample.key or claims[sample.key] > 1:
                    continue  # it stands in for one that does not decode, with frames and a crop of its own, or may do
                clips.append(batch.clip[place].numpy())
                keys.append(sample.key)
                labels.append(int(batch.labels[place]))
                frames.append(row.frames)
                boxes.append((*row.crop, row.flip, sample.width, sample.height))
    np.savez(out / "clips.npz", clips=clips, keys=keys, labels=labels, frames=frames, boxes=boxes)
