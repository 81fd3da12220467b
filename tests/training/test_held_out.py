"""Metrics of held-out videos: checked by hand, the same every time, without effect on training."""

from pathlib import Path

import pytest
import torch
from made_videos import broken_copy
from tiny import TINY

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import parse
from adamae.training.distributed import Distributed
from adamae.training.held_out import HeldOut, rankme

ALONE = Distributed("cpu")


def test_the_rank_of_features() -> None:
    assert rankme(torch.ones(20, 8)) == pytest.approx(1, abs=1e-3)
    # Eight corners of a simplex span seven dimensions around their mean, wherever that is.
    corners = torch.eye(8).repeat(4, 1)
    assert rankme(corners) == pytest.approx(7, abs=1e-3)
    assert rankme(corners + 100) == pytest.approx(7, abs=1e-3)


def test_every_evaluation_finds_the_same_and_leaves_no_trace(synthetic_shards: Path) -> None:
    config = parse(
        [*TINY, f"data.shards={synthetic_shards}", f"evaluation.shards={synthetic_shards}"]
    )
    model = AdaMAE(config.model)
    held_out = HeldOut(config, ShardDataset.open(synthetic_shards))
    random = torch.get_rng_state()
    first = held_out.evaluate(model, ALONE)
    baselines = {"pixel_top1", "difference_top1", "majority_top1"}
    baselines |= {"knn_videos", "knn_neighbors", "num_videos"}
    assert set(first) == {"reconstruction_loss", "knn_top1", "knn_error", "rankme", *baselines}
    assert held_out.evaluate(None, ALONE) == {name: first[name] for name in baselines}
    assert held_out.evaluate(model, ALONE) == first
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    # The model is not trained, so it does not even predict the mean (1).
    assert 0.9 < first["reconstruction_loss"] < 2


def test_a_model_without_a_decoder_is_measured_by_its_features(synthetic_shards: Path) -> None:
    views = ["model.views=2", "data.repeats=2", "model.target=none", "model.masking=random"]
    shards = [f"data.shards={synthetic_shards}", f"evaluation.shards={synthetic_shards}"]
    config = parse([*TINY, *views, *shards])
    held_out = HeldOut(config, ShardDataset.open(synthetic_shards))
    metrics = held_out.evaluate(AdaMAE(config.model), ALONE)
    assert "reconstruction_loss" not in metrics
    assert {"knn_top1", "rankme"} <= metrics.keys()


def test_a_neighbor_that_does_not_decode_is_left_out(
    synthetic_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A held-out video that does not decode is an error, as every one of them counts."""
    key = ShardDataset.open(synthetic_shards).samples[3].key
    broken = tmp_path / "broken"
    broken_copy(synthetic_shards, broken, {key})
    settings = [*TINY, f"data.shards={broken}", f"evaluation.shards={synthetic_shards}"]
    held_out = HeldOut(parse(settings), ShardDataset.open(broken))
    metrics = held_out.evaluate(None, ALONE)
    warning = "1 of 16 neighbors of k-NN cannot be decoded and are left out"
    assert capsys.readouterr().err.count(warning) == 1
    # All others have the neighbors that they would have without it.
    assert metrics["knn_videos"] == 16
    settings = [*TINY, f"data.shards={synthetic_shards}", f"evaluation.shards={broken}"]
    with pytest.raises(InputError, match=key):
        HeldOut(parse(settings), ShardDataset.open(synthetic_shards)).evaluate(None, ALONE)
