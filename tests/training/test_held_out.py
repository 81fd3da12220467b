"""Evaluation during training: right by hand, the same every time, without a trace in the training."""

import pytest
import torch
from runs import read_rows
from tiny import TINY

from model.adamae import AdaMAE
from train import train
from training.config import parse
from training.distributed import Distributed
from training.evaluation import HeldOut, knn_top1, rankme

ALONE = Distributed("cpu")
SMALL = [*TINY, "model.encoder_depth=1", "model.decoder_depth=1", "steps=2"]


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    monkeypatch.setattr("kernels.launch.triton_on_cpu", False)  # as outside of tests: the interpreter is slow


def test_neighbors_vote_and_nobody_for_itself():
    directions = torch.tensor([[1.0, 0.1], [1.0, -0.1], [1.0, 0.0], [-1.0, 0.1], [-1.0, -0.1], [-1.0, 0.0]])
    assert knn_top1(directions, torch.tensor([0, 0, 0, 1, 1, 1])) == 1.0
    assert knn_top1(directions, torch.tensor([0, 0, 1, 1, 1, 0])) == 0.0  # the nearest is of the other class
    assert knn_top1(torch.eye(2), torch.tensor([0, 1])) == 0.0  # each has only the other


def test_the_rank_of_features():
    assert rankme(torch.ones(20, 8)) == pytest.approx(1, abs=1e-3)
    assert rankme(torch.eye(8).repeat(4, 1)) == pytest.approx(8, abs=1e-3)


def test_every_evaluation_finds_the_same_and_leaves_no_trace(synthetic_shards):
    config = parse([*SMALL, f"data.shards={synthetic_shards}", f"evaluation.shards={synthetic_shards}"])
    model = AdaMAE(config.model)
    held_out = HeldOut(config)
    random = torch.get_rng_state()
    first = held_out.evaluate(model, ALONE)
    assert set(first) == {"reconstruction_loss", "knn_top1", "rankme"}
    assert held_out.evaluate(model, ALONE) == first
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert 0.9 < first["reconstruction_loss"] < 2  # of a model that is not trained


def test_two_ranks_find_what_one_does(synthetic_shards, monkeypatch):
    config = parse([*SMALL, f"data.shards={synthetic_shards}", f"evaluation.shards={synthetic_shards}"])
    model, held_out, parts = AdaMAE(config.model), HeldOut(config), []
    rank = Distributed("cpu")
    rank.world_size = 2
    whole = held_out.evaluate(model, ALONE)
    monkeypatch.setattr("training.evaluation.sum_over_ranks", lambda part: parts.append(part) or part)
    rank.rank = 1
    held_out.evaluate(model, rank)
    others = iter(parts)
    monkeypatch.setattr("training.evaluation.sum_over_ranks", lambda part: part + next(others))
    rank.rank = 0
    assert held_out.evaluate(model, rank) == whole


def test_a_run_evaluates_itself_and_has_a_report(synthetic_shards, tmp_path):
    run = tmp_path / "run"
    given = [f"data.shards={synthetic_shards}", f"evaluation.shards={synthetic_shards}", f"run={run}"]
    train(parse([*SMALL, *given, "evaluation.every=1"]))
    evaluated = [row for row in read_rows(run) if "evaluation/reconstruction_loss" in row]
    assert [line["step"] for line in evaluated] == [1, 2]
    assert {"evaluation/knn_top1", "evaluation/rankme"} <= set(evaluated[0])
    text = (run / "report.html").read_text()
    assert "step 2 of 2 (100%), finished" in text
    assert "evaluation/reconstruction_loss" in text
    assert text.count("<img") == len(list((run / "figures").glob("*.png"))) == 2
    written = b"".join(file.read_bytes() for file in (run / "tensorboard").iterdir())
    assert b"mask_ratio: 0.75" in written  # the configuration, as text
    assert b"evaluation/knn_top1" in written
