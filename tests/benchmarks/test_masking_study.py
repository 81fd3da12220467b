"""The comparison of masking strategies, with points of two steps."""

import shutil
from pathlib import Path

import pytest

from adamae.benchmarks import masking_study
from adamae.benchmarks.harness import Row
from adamae.benchmarks.masking_study import (
    PRESETS,
    Point,
    Study,
    parse_arguments,
    run_study,
    summarize,
)
from adamae.common.errors import InputError
from adamae.training.config import parse

TINY = [
    "model.num_frames=4",
    "model.image_size=32",
    "batch_size=4",
    "steps=2",
    "data.num_workers=1",
    "log_every=1",
    "optimizer.warmup_ratio=0",
    "device=cpu",
]
GIVEN = ["--shards", "here", "--validation", "there"]


@pytest.mark.slow  # seven runs of training and evaluation
def test_a_study_resumes_and_is_added_to(
    tmp_path: Path, synthetic_shards: Path, monkeypatch
) -> None:
    shards, output = str(synthetic_shards), tmp_path / "study"
    command = [
        f"--shards={shards}",
        f"--validation={shards}",
        "--seeds=3",
        "--labels=8",
        f"--output={output}",
        *TINY,
    ]
    first = ["--strategies", "adaptive", "--ratios", "0.75"]
    (row,) = run_study(parse_arguments([*command, *first]))
    assert (row["strategy"], row["mask_ratio"], row["seeds"]) == ("adaptive", 0.75, 1)
    for name in ("attentive_probe_top1", "finetune_top1", "linear_top1", "knn_top1"):
        assert 0 <= row[name] <= 1, name
    finetuned = (output / "runs/adaptive-0.75-seed3/finetune/config.yaml").read_text()
    assert "adaptive-0.75-seed3/pretrain" in finetuned
    assert "subset: 8\n  subset_seed: 3" in finetuned
    assert "subset: null" in (output / "runs/adaptive-0.75-seed3/pretrain/config.yaml").read_text()

    both = {
        row["strategy"]: row
        for row in run_study(parse_arguments([*command, "--strategies", "scratch"]))
    }
    gain = both["adaptive"].pop("finetune_top1_over_scratch")
    assert gain == pytest.approx(row["finetune_top1"] - both["scratch"]["finetune_top1"], abs=1e-3)
    assert "attentive_probe_top1" not in both["scratch"]

    shutil.rmtree(
        output / "runs"
    )  # committed are the points alone, and shards are elsewhere on another machine
    monkeypatch.setattr(
        masking_study, "train", lambda _: pytest.fail("a finished point was trained again")
    )
    (tmp_path / "moved").symlink_to(synthetic_shards)
    moved = [word.replace(shards, str(tmp_path / "moved")) for word in command]
    assert len(run_study(parse_arguments([*moved, *first]))) == 2
    for other in ("optimizer.base_lr=1", "--labels=7"):
        with pytest.raises(InputError, match="made with other settings"):
            run_study(parse_arguments([*command, other, *first]))


def make_row(strategy: str, ratio: float | None, seed: int, top1: float) -> Row:
    return {"strategy": strategy, "mask_ratio": ratio, "seed": seed, "finetune_top1": top1}


def test_gains_are_paired_by_seed() -> None:
    random = [make_row("random", 0.9, seed, 0.5 + 0.1 * seed) for seed in range(3)]
    other = [
        make_row("other", 0.9, seed, 0.5 + 0.1 * seed + gain)
        for seed, gain in enumerate((0.04, 0.05, 0.06))
    ]
    scratch = [make_row("scratch", None, seed, 0.4) for seed in (0, 1)]
    best, base, last = summarize([*random, *other, *scratch])
    assert (best["strategy"], best["finetune_top1_gain"], best["seeds"]) == ("other", 0.05, 3)
    assert best["finetune_top1_gain_error"] == pytest.approx(0.01 / 3**0.5, abs=1e-4)
    assert best["finetune_top1_over_scratch"] == pytest.approx((0.14 + 0.25) / 2)
    assert (base["finetune_top1"], base["finetune_top1_std"]) == (0.6, 0.1)
    assert "finetune_top1_gain" not in base
    assert last["strategy"] == "scratch"
    assert summarize(other[:1])[0]["finetune_top1_std"] is None
    assert "finetune_top1_gain" not in summarize([*random[:1], *other[1:]])[0], "of other seeds"
    assert summarize([random[0], random[1] | {"linear_top1": 0.4}])[0]["linear_top1"] == 0.4, (
        "not measured of all"
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_train_scratch_once(preset: str, tmp_path: Path) -> None:
    study = Study(parse_arguments(["--preset", preset, *GIVEN, "--seeds", "0", "1"]), tmp_path)
    assert len(study.points) == 2 * len(PRESETS[preset]["points"])
    assert study.points[0].tasks == ["pretrain", "attentive_probe", "finetune"]
    recipe = parse([*study.settings(Point("scratch", None, 0), "finetune"), "data.shards=here"])
    assert recipe.finetune.layer_decay >= 0.9, "from scratch, its first layers hardly learn"
    ratios = ["--strategies", "tube", "scratch", "--ratios", "0.5", "0.9", "--seeds", "7"]
    study = Study(parse_arguments(["--preset", preset, *GIVEN, *ratios]), tmp_path)
    assert study.points == [Point("tube", 0.5, 7), Point("tube", 0.9, 7), Point("scratch", None, 7)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shards", "x"], "the following arguments are required: --validation"),
        ([*GIVEN, "--strategies", "tube"], "give --ratios with --strategies that mask"),
        (
            [*GIVEN, "--strategies", "scratch", "--ratios", "0.75"],
            "give --ratios with --strategies that mask",
        ),
        (["--strategies", "adaptive:model.foo=1", "--ratios", ".9", *GIVEN], "model.foo"),
        (["--strategies", "tube", "--ratios", "0.999", *GIVEN], "0.999"),
    ],
)
def test_bad_arguments_are_refused_before_training(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=says):
        run_study(parse_arguments([*arguments, "--output", str(tmp_path)]))


def test_a_strategy_names_settings(tmp_path: Path) -> None:
    strategies = ["random:model.decoder_depth=1,steps=7", "scratch:steps=9"]
    study = Study(
        parse_arguments([*GIVEN, "--strategies", *strategies, "--ratios", "0.9", "--seeds", "3"]),
        tmp_path,
    )
    assert study.points[1].tasks == ["finetune"]
    assert "steps=9" in study.settings(study.points[1], "finetune")
    config = parse([*study.settings(study.points[0], "pretrain"), "data.shards=here"])
    assert (config.steps, config.seed, config.model.masking, config.model.decoder_depth) == (
        7,
        3,
        "random",
        1,
    )
