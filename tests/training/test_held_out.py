"""Metrics of held-out videos: checked by hand, the same every time, without effect on training."""

from pathlib import Path

import pytest
import torch
from made_videos import encode, write_shards
from tiny import TINY

from adamae.model.adamae import AdaMAE
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import parse
from adamae.training.distributed import Distributed
from adamae.training.evaluation import majority_top1
from adamae.training.held_out import (
    HeldOut,
    find_allowed_neighbors,
    knn_top1,
    make_thumbnails,
    rankme,
)

ALONE = Distributed("cpu")


def test_neighbors_of_the_reference_set_vote_where_allowed() -> None:
    reference = torch.tensor(
        [[1.0, 0.1], [1.0, -0.1], [1.0, 0.0], [-1.0, 0.1], [-1.0, -0.1], [-1.0, 0.0]]
    )
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    queries = torch.tensor([[1.0, 0.05], [-1.0, 0.05]])
    query_labels = torch.tensor([0, 1])
    everybody = torch.ones(2, 6, dtype=torch.bool)
    assert knn_top1(queries, query_labels, reference, labels, everybody) == 1.0
    assert knn_top1(queries, query_labels.flip(0), reference, labels, everybody) == 0.0
    other_class = labels != query_labels[:, None]
    assert knn_top1(queries, query_labels, reference, labels, other_class) == 0.0
    # The second query has no neighbor, so it is not counted.
    first_query = torch.tensor([[True] * 6, [False] * 6])
    assert knn_top1(queries, query_labels, reference, labels, first_query) == 1.0
    assert majority_top1(torch.tensor([0, 1, 1, 2])) == 0.5


def test_the_baseline_takes_the_class_of_the_nearest_mean_gray_thumbnail() -> None:
    """Colors, noise and the order of frames have no effect on it."""
    # The left half of every other clip is bright.
    clips = torch.randint(0, 100, (4, 3, 32, 48, 3), dtype=torch.uint8)
    clips[1::2, :, :, :24] += 100
    thumbnails = make_thumbnails(clips)
    assert thumbnails.shape == (4, 256)
    torch.testing.assert_close(thumbnails.mean(dim=1), clips.float().mean(dim=(1, 2, 3, 4)))
    assert torch.equal(thumbnails, make_thumbnails(clips.flip(1, 4)))
    distances = torch.cdist(thumbnails, thumbnails)
    assert distances[0, 2] < distances[0, 1]


def test_neighbors_are_of_other_sources_and_other_groups(tmp_path: Path) -> None:
    videos = [(name, encode(4, first=5 * i)) for i, name in enumerate("abcd")]
    fields = [{"group": "x"}, {"group": "x"}, {"group": "y"}, {}]
    folder = write_shards(tmp_path / "reference", videos, classes=2, fields=fields)
    reference = ShardDataset.open(folder)
    videos = [videos[0], ("e", encode(4, first=50))]
    fields = [{"group": "y"}, {}]
    folder = write_shards(tmp_path / "held", videos, classes=2, fields=fields)
    held_out = ShardDataset.open(folder)
    allowed = find_allowed_neighbors(held_out, [0, 1], reference, range(4), "group")
    assert allowed.tolist() == [[False, True, False, True], [True] * 4]


def test_the_rank_of_features() -> None:
    assert rankme(torch.ones(20, 8)) == pytest.approx(1, abs=1e-3)
    assert rankme(torch.eye(8).repeat(4, 1)) == pytest.approx(8, abs=1e-3)


def test_every_evaluation_finds_the_same_and_leaves_no_trace(synthetic_shards: Path) -> None:
    config = parse(
        [*TINY, f"data.shards={synthetic_shards}", f"evaluation.shards={synthetic_shards}"]
    )
    model = AdaMAE(config.model)
    held_out = HeldOut(config, ShardDataset.open(synthetic_shards))
    random = torch.get_rng_state()
    first = held_out.evaluate(model, ALONE)
    baselines = {"pixel_top1", "majority_top1", "knn_videos", "num_videos"}
    assert set(first) == {"reconstruction_loss", "knn_top1", "rankme", *baselines}
    assert held_out.evaluate(None, ALONE) == {name: first[name] for name in baselines}
    assert held_out.evaluate(model, ALONE) == first
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    # The model is not trained, so it does not even predict the mean (1).
    assert 0.9 < first["reconstruction_loss"] < 2
