"""The comparison of masking strategies, with points of two steps."""

import json
from pathlib import Path

import pytest

from benchmarks import masking_study
from benchmarks.harness import Row
from benchmarks.masking_study import PRESETS, Point, Study, paired_gain, parse_arguments, run_study, summarize
from common.errors import InputError
from training.config import parse

TINY = [
    "model.num_frames=4", "model.image_size=32", "batch_size=4", "steps=2", "data.num_workers=1", "log_every=1",
    "optimizer.warmup_ratio=0", "device=cpu",
]  # fmt: skip
GIVEN = ["--shards", "here", "--validation", "there"]


@pytest.mark.slow  # seven runs of training and evaluation
def test_a_study_resumes_and_is_added_to(tmp_path: Path, synthetic_shards: Path, monkeypatch) -> None:
    command = [
        "--shards", str(synthetic_shards), "--validation", str(synthetic_shards), "--seeds", "0", "--labels", "8",
        "--output", str(tmp_path), *TINY,
    ]  # fmt: skip
    first = ["--strategies", "adaptive", "--ratios", "0.75"]
    run_study(parse_arguments([*command, *first]))
    rows = json.loads((tmp_path / "points.json").read_text())["rows"]
    assert [(row["strategy"], row["mask_ratio"], row["label_set"]) for row in rows] == [("adaptive", 0.75, 0)]
    for name in ("attentive_probe_top1", "finetune_top1"):
        assert 0 <= rows[0][name] <= 1, name
    finetuned = (tmp_path / "points/adaptive-0.75-seed0/finetune-labels0/config.yaml").read_text()
    assert "adaptive-0.75-seed0/pretrain" in finetuned
    assert "subset: 8\n  subset_seed: 0" in finetuned

    run_study(parse_arguments([*command, "--strategies", "scratch"]))
    both = json.loads((tmp_path / "points.json").read_text())["rows"]
    assert both[:1] == rows
    assert [row["strategy"] for row in both[1:]] == ["scratch"]
    assert "attentive_probe_top1" not in both[1]

    monkeypatch.setattr(masking_study, "train", lambda _: pytest.fail("a finished point was trained again"))
    run_study(parse_arguments([*command, *first]))
    for other in ("optimizer.base_lr=1", "--labels=7"):
        with pytest.raises(InputError, match="made with other settings"):
            run_study(parse_arguments([*command, other, *first]))


def make_row(strategy: str, ratio: float, seed: int, label_set: int, top1: float) -> Row:
    key = {"strategy": strategy, "mask_ratio": ratio, "seed": seed, "label_set": label_set}
    return {**key, "finetune_top1": top1, "attentive_probe_top1": top1}


def test_a_gain_is_paired_and_its_error_is_over_what_is_independent() -> None:
    random = [make_row("random", 0.9, seed, labels, 0.5 + 0.1 * seed) for seed in range(3) for labels in range(2)]
    other = [{**row, "strategy": "other", "finetune_top1": row["finetune_top1"] + 0.05} for row in random]
    other[0]["finetune_top1"] += 0.06  # of seed 0, label set 0
    gain, error = paired_gain(other, random, "finetune_top1")
    assert gain == pytest.approx(0.06)
    assert error == pytest.approx(max(0.03 / 3**0.5 / 3**0.5, 0.02 / 2**0.5 / 2**0.5))
    best, base = summarize([*random, *other])
    assert (best["strategy"], best["finetune_top1_gain"], best["seeds"]) == ("other", 0.06, 3)
    assert (base["finetune_top1"], base["finetune_top1_std"]) == (0.6, 0.1)
    assert paired_gain(other[:1], random, "finetune_top1")[1] is None
    assert summarize([*random[:2], *other[2:]])[0]["finetune_top1_gain"] is None, "of other seeds"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_train_scratch_once(preset: str, tmp_path: Path) -> None:
    study = Study(parse_arguments(["--preset", preset, *GIVEN, "--seeds", "0", "1"]), tmp_path)
    assert len(study.points) == 2 * len(PRESETS[preset]["points"])
    assert study.stages(study.points[0]) == [("pretrain", None), ("attentive_probe", 0), ("finetune", 0)]
    recipe = parse(study.overrides(Point("scratch", None, 0), "finetune", 0))
    assert recipe.finetune.layer_decay >= 0.9, "from scratch, its first layers hardly learn"
    ratios = ["--strategies", "tube", "scratch", "--ratios", "0.5", "0.9", "--seeds", "7"]
    study = Study(parse_arguments(["--preset", preset, *GIVEN, *ratios]), tmp_path)
    assert study.points == [Point("tube", 0.5, 7), Point("tube", 0.9, 7), Point("scratch", None, 7)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shards", "x"], "the following arguments are required: --validation"),
        ([*GIVEN, "--strategies", "tube"], "give --ratios with --strategies that mask"),
        ([*GIVEN, "--strategies", "scratch", "--ratios", "0.75"], "give --ratios with --strategies that mask"),
        ([*GIVEN, "--label-sets", "2"], "--label-sets needs --labels"),
        (["--strategies", "adaptive:model.foo=1", "--ratios", ".9", *GIVEN], "model.foo"),
        (["--strategies", "tube", "--ratios", "0.999", *GIVEN], "0.999"),
    ],
)
def test_bad_arguments_are_refused_before_training(arguments: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        run_study(parse_arguments([*arguments, "--output", str(tmp_path)]))


def test_a_strategy_names_settings(tmp_path: Path) -> None:
    strategies = ["random:model.decoder_depth=1,steps=7", "scratch:steps=9"]
    study = Study(parse_arguments([*GIVEN, "--strategies", *strategies, "--ratios", "0.9", "--seeds", "3"]), tmp_path)
    assert study.stages(study.points[1]) == [("finetune", 0)]
    assert parse(study.overrides(study.points[1], "finetune", 0)).steps == 9
    config = parse(study.overrides(study.points[0], "pretrain", None))
    assert (config.steps, config.seed, config.model.masking, config.model.decoder_depth) == (7, 3, "random", 1)
