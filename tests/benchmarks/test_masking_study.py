"""The comparison of masking strategies, with points of two steps."""

import shutil
from pathlib import Path
from typing import Any

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
from adamae.training.frozen_classifiers import fit_linear
from adamae.training.measures import Videos

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
# Folders that do not exist: no test of arguments alone reads them.
SHARDS = ["--shards", "here", "--validation", "there"]


# Slow, since it takes seven runs of training and evaluation.
@pytest.mark.slow
def test_a_study_resumes_and_is_added_to(
    tmp_path: Path, synthetic_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = str(synthetic_shards)
    output = tmp_path / "study"
    command = [
        f"--shards={shards}",
        f"--validation={shards}",
        "--seeds=3",
        f"--output={output}",
        *TINY,
    ]
    first = ["--strategies", "adaptive", "--ratios", "0.75"]
    with_8 = ["--labels", "8"]
    # What frozen features are classified with.
    numbers_of_labels = []

    def fit(queries: Videos, training: Videos) -> Any:
        numbers_of_labels.append(len(training.labels))
        return fit_linear(queries, training)

    monkeypatch.setattr(masking_study, "fit_linear", fit)
    (row,) = run_study(parse_arguments([*command, *with_8, *first]))
    assert row["strategy"] == "adaptive"
    assert row["mask_ratio"] == 0.75
    assert row["seeds"] == 1
    for name in ("attentive_probe_top1", "finetune_top1", "linear_top1", "knn_top1"):
        assert 0 <= row[name] <= 1, name
    runs = output / "runs"
    finetuned = (runs / "adaptive-0.75-seed3-8labels/finetune/config.yaml").read_text()
    assert "adaptive-0.75-seed3/pretrain" in finetuned
    assert "subset: 8\n  subset_seed: 3" in finetuned
    pretrained = (runs / "adaptive-0.75-seed3/pretrain/config.yaml").read_text()
    assert "subset: null" in pretrained

    # Another number of labels learns from the same pre-training, and by the tasks that are named.
    written = (runs / "adaptive-0.75-seed3/pretrain/metrics.jsonl").read_bytes()
    with_7 = ["--labels", "7", "--tasks", "finetune"]
    rows = run_study(parse_arguments([*command, *with_7, *first]))
    assert {row["labels"]: "attentive_probe_top1" in row for row in rows} == {8: True, 7: False}
    assert numbers_of_labels == [8, 7]
    assert (runs / "adaptive-0.75-seed3/pretrain/metrics.jsonl").read_bytes() == written

    # A later command adds a strategy to the table.
    rows = run_study(parse_arguments([*command, *with_8, "--strategies", "scratch"]))
    rows = [row for row in rows if row["labels"] == 8]
    by_strategy = {row["strategy"]: row for row in rows}
    scratch = by_strategy["scratch"]
    gain = by_strategy["adaptive"]["finetune_top1_over_scratch"]
    assert gain == pytest.approx(row["finetune_top1"] - scratch["finetune_top1"], abs=1e-3)
    assert "attentive_probe_top1" not in scratch

    # Before hours of pre-training.
    too_many = ["--labels", "1000"]
    with pytest.raises(InputError, match=r"data.subset is 1000, but .* holds only"):
        run_study(parse_arguments([*command, *too_many, *first]))

    # On another machine, only the committed points are there, and the shards are elsewhere.
    shutil.rmtree(output / "runs")

    def fail(_: object) -> bool:
        pytest.fail("a finished point was trained again")

    monkeypatch.setattr(masking_study, "train", fail)
    (tmp_path / "moved").symlink_to(synthetic_shards)
    moved = [word.replace(shards, str(tmp_path / "moved")) for word in command]
    assert len(run_study(parse_arguments([*moved, *with_8, *first]))) == 3
    for changed in (["optimizer.base_lr=1"], ["--tasks", "finetune"]):
        with pytest.raises(InputError, match="made with other overrides"):
            run_study(parse_arguments([*command, *changed, *with_8, *first]))


def make_row(strategy: str, ratio: float | None, seed: int, top1: float) -> Row:
    return {
        "strategy": strategy,
        "mask_ratio": ratio,
        "labels": None,
        "seed": seed,
        "finetune_top1": top1,
    }


# By seed: random masks reach 0.5, 0.6 and 0.7, adaptive ones 0.04, 0.05 and 0.06 more.
RANDOM = [make_row("random", 0.9, seed, 0.5 + 0.1 * seed) for seed in range(3)]
ADAPTIVE = [
    make_row("adaptive", 0.9, 0, 0.54),
    make_row("adaptive", 0.9, 1, 0.65),
    make_row("adaptive", 0.9, 2, 0.76),
]


def test_gains_are_paired_by_seed() -> None:
    scratch = [make_row("scratch", None, seed, 0.4) for seed in (0, 1)]
    best, base, last = summarize([*RANDOM, *ADAPTIVE, *scratch])
    assert best["strategy"] == "adaptive"
    assert best["seeds"] == 3
    assert best["finetune_top1_gain"] == 0.05
    assert best["finetune_top1_gain_error"] == pytest.approx(0.01 / 3**0.5, abs=1e-4)
    # Of the two seeds that scratch has.
    assert best["finetune_top1_over_scratch"] == pytest.approx((0.14 + 0.25) / 2)
    assert base["finetune_top1"] == 0.6
    assert base["finetune_top1_std"] == 0.1
    assert "finetune_top1_gain" not in base
    assert last["strategy"] == "scratch"


def test_an_objective_is_compared_with_masks_of_one_ratio() -> None:
    views = [make_row("views/random", 0.5, seed, 0.8) for seed in range(3)]
    best, base = summarize([*RANDOM, *views])
    assert best["finetune_top1_over_masks"] == pytest.approx(0.2)
    assert "finetune_top1_over_masks" not in base
    best, *_ = summarize([*RANDOM, make_row("random", 0.5, 0, 0.1), *views])
    assert "finetune_top1_over_masks" not in best, "two ratios, and none of them named"


def test_gains_are_those_with_as_many_labels() -> None:
    few = [row | {"labels": 50, "finetune_top1": 0.3} for row in RANDOM]
    rows = summarize([*RANDOM, *few, *ADAPTIVE, *[row | {"labels": 50} for row in ADAPTIVE]])
    gains = [(row["strategy"], row["labels"], row.get("finetune_top1_gain")) for row in rows]
    assert gains == [
        ("adaptive", 50, 0.35),
        ("random", 50, None),
        ("adaptive", None, 0.05),
        ("random", None, None),
    ]


def test_a_row_says_nothing_that_its_seeds_do_not_show() -> None:
    (row,) = summarize(ADAPTIVE[:1])
    assert row["finetune_top1_std"] is None, "a single seed"
    best, _ = summarize([*RANDOM[:1], *ADAPTIVE[1:]])
    assert "finetune_top1_gain" not in best, "no seed in common"
    (row,) = summarize([RANDOM[0], RANDOM[1] | {"linear_top1": 0.4}])
    assert row["linear_top1"] == 0.4, "of the seeds that were measured"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_train_scratch_once(preset: str, tmp_path: Path) -> None:
    study = Study(parse_arguments(["--preset", preset, *SHARDS, "--seeds", "0", "1"]), tmp_path)
    assert len(study.points) == 2 * len(PRESETS[preset]["points"])
    tasks = study.list_tasks(study.points[0])
    assert tasks == ["pretrain", "attentive_probe", "finetune"]
    recipe = parse(
        [*study.make_overrides(Point("scratch", None, 0), "finetune"), "data.shards=here"]
    )
    assert recipe.finetune.layer_decay >= 0.9, "from scratch, its first layers hardly learn"
    ratios = ["--strategies", "tube", "scratch", "--ratios", "0.5", "0.9", "--seeds", "7"]
    study = Study(parse_arguments(["--preset", preset, *SHARDS, *ratios]), tmp_path)
    assert study.points == [
        Point("tube", 0.5, 7),
        Point("tube", 0.9, 7),
        Point("scratch", None, 7),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shards", "x"], "the following arguments are required: --validation"),
        ([*SHARDS, "--strategies", "tube"], "give --ratios with --strategies that mask"),
        (
            [*SHARDS, "--strategies", "scratch", "--tasks", "attentive_probe"],
            "scratch is fine-tuned and nothing else: add finetune to --tasks",
        ),
        (
            [*SHARDS, "--strategies", "scratch", "--ratios", "0.75"],
            "give --ratios with --strategies that mask",
        ),
        (["--strategies", "adaptive:model.foo=1", "--ratios", ".9", *SHARDS], "model.foo"),
        (["--strategies", "tube", "--ratios", "0.999", *SHARDS], "0.999"),
        (["--strategies", "views/tube", "--ratios", "0.75", *SHARDS], "no objective of the preset"),
    ],
)
def test_bad_arguments_are_refused_before_training(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        run_study(parse_arguments([*arguments, "--output", str(tmp_path)]))


def test_an_objective_is_for_pretraining_alone(tmp_path: Path) -> None:
    arguments = ["--preset", "cpu_clips", *SHARDS, "--ratios", "0.9", "--strategies"]
    study = Study(parse_arguments([*arguments, "views/random", "--seeds", "0"]), tmp_path)
    (point,) = study.points
    assert point.name == "views_random-0.9-seed0"
    config = parse([*study.make_overrides(point, "pretrain"), "data.shards=here"])
    assert config.model.masking == "random"
    assert config.model.target == "none"
    assert config.model.views == config.data.repeats == 4
    labeled = parse([*study.make_overrides(point, "finetune"), "data.shards=here"])
    assert labeled.model.views == 1
    assert labeled.steps == 3000


def test_a_strategy_names_overrides(tmp_path: Path) -> None:
    strategies = ["random:model.decoder_depth=1,steps=7", "scratch:steps=9"]
    arguments = [*SHARDS, "--strategies", *strategies, "--ratios", "0.9", "--seeds", "3"]
    study = Study(parse_arguments(arguments), tmp_path)
    random, scratch = study.points
    assert study.list_tasks(scratch) == ["finetune"]
    assert "steps=9" in study.make_overrides(scratch, "finetune")
    config = parse([*study.make_overrides(random, "pretrain"), "data.shards=here"])
    assert config.steps == 7
    assert config.seed == 3
    assert config.model.masking == "random"
    assert config.model.decoder_depth == 1
