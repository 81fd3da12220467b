"""Runs whose videos have several views: resume, ranks, weights, and what does not go together."""

import shutil
from pathlib import Path

import pytest
import torchrun
from runs import is_same, load_weights, read_rows

from adamae import export
from adamae.common.errors import InputError
from adamae.model.load_adamae import load_adamae
from adamae.model.weights import pretrained
from adamae.model.weights.load_model import load_encoder
from adamae.train import train
from adamae.training.config import parse

VIEWS = ["model.views=2", "data.repeats=2", "data.views_apart_s=0.5", "model.masking=random"]
ALONE = [*VIEWS, "model.target=none"]


@pytest.fixture
def arguments(arguments: list[str]) -> list[str]:
    """Return the command line of a run of four steps of four videos, two views each."""
    return [*arguments, "batch_size=8", "steps=4", "checkpoint_every=2"]


@pytest.mark.parametrize(
    "objective",
    [pytest.param(VIEWS, marks=pytest.mark.slow, id="both"), pytest.param(ALONE, id="alone")],
)
def test_a_run_of_views_resumes_bit_by_bit_and_says_how_it_goes(
    objective: list[str], arguments: list[str], synthetic_shards: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = [*arguments, *objective]
    evaluated = ["evaluation.every=4", f"evaluation.shards={synthetic_shards}"]
    assert train(parse([*arguments, *evaluated]))
    whole = load_weights(run, 4)
    rows = read_rows(run)
    assert [row["views_loss"] > 0 for row in rows if "loss" in row] == [True] * 4
    assert ("reconstruction_loss" in rows[0]) == (objective is VIEWS)
    assert ("evaluation/reconstruction_loss" in rows[-1]) == (objective is VIEWS)
    assert rows[-1]["evaluation/knn_top1"] >= 0
    assert rows[-1]["evaluation/rankme"] > 1
    shutil.rmtree(run / "checkpoints/step-00000004")
    assert train(parse([*arguments, *evaluated]))
    assert is_same(load_weights(run, 4), whole)


def test_two_ranks_compare_the_views_of_both(arguments: list[str], tmp_path: Path) -> None:
    """A step of two ranks is that of one with as many clips, but for rounding."""
    arguments = [*arguments, *ALONE]
    run = tmp_path / "run"
    train(parse(arguments))
    alone = read_rows(run)
    shutil.rmtree(run)
    torchrun.run([*arguments, "batch_size=4", "global_batch=8"], tmp_path / "log")
    for one, two in zip(alone, read_rows(run), strict=True):
        for name in ("views_loss", "grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-4), one["step"]


def test_weights_of_views_are_read_started_from_and_exported(
    arguments: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(parse([*arguments, *ALONE, "steps=1"]))
    state = pretrained.load(run).state
    assert any(name.startswith("views.projector") for name in state)
    assert not any(name.startswith("decoder") for name in state)
    with pytest.raises(InputError, match=r"model\.target=none and predicts nothing: load its enc"):
        load_adamae(run)
    for word, name in (("encoder", "out"), ("huggingface", "hub")):
        export.main(
            export.parse_arguments(["export", str(run), str(tmp_path / name), "--to", word])
        )
    exported = tmp_path / "out/encoder.safetensors"
    again = load_encoder(exported)
    assert is_same(again.state_dict(), load_encoder(run).state_dict())
    assert again.config.views == 1
    # Masked prediction begins with the encoder, and a new decoder.
    masked = [*arguments, "steps=1", f"run={tmp_path / 'masked'}", f"init_from={run}"]
    train(parse([*masked, "model.views=1", "model.target=pixels", "model.masking=random"]))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("data.repeats=4", "model.views is 2 and data.repeats 4: the views"),
        ("task=finetune", "model.views is for pre-training: remove it with task=finetune"),
        ("batch_size=2", "global_batch is 2, all views of one video"),
        ("batch_size=4 global_batch=8", "several forward passes of batch_size=4, and model.views"),
        ("model.target=none model.decoder_share=.5", "model.decoder_share does nothing with model"),
    ],
)
def test_what_views_cannot_do_is_one_sentence_at_the_start(
    arguments: list[str], tmp_path: Path, overrides: str, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        train(parse([*arguments, *VIEWS, *overrides.split()]))
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_few_and_short_videos_are_named_at_the_start(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(parse([*arguments, *VIEWS, "steps=1"]))
    log = capsys.readouterr().err
    assert "a step compares 2 views of each of 4 videos" in log
    assert "holds some twice" not in log
    assert "videos are too short for clips that begin" not in log
    shutil.rmtree(tmp_path / "run")
    few = ["data.views_apart_s=60", "data.subset=3", "steps=1"]
    train(parse([*arguments, *VIEWS, *few]))
    log = capsys.readouterr().err
    assert "WARNING: there are 3 videos, so a step holds some twice" in log
    assert "lower batch_size (or global_batch) to 6" in log
    assert "16 of 16 videos are too short for clips that begin 60 s apart" in log
