"""The comparison of maskings, with points of a few steps."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import forked
import pytest

from benchmarks import masking_quality
from benchmarks.masking_quality import Point, grid, main, parse_arguments, plot, steps_of_equal_time, summarise
from devices import choose_device
from errors import InputError
from training.config import parse

TINY = [
    "model.num_frames=4", "model.image_size=32", "batch_size=4", "steps=2", "data.num_threads=1", "log_every=1",
    "optimizer.warmup_epochs=0", "device=cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory, synthetic_shards) -> tuple[Path, list[str]]:
    """A folder with the results of two strategies and of scratch, and the command that made it."""
    folder = tmp_path_factory.mktemp("quality")
    command = [
        "--shards", str(synthetic_shards), "--validation", str(synthetic_shards), "--seeds", "0",
        "--strategies", "adaptive", "scratch", "--ratios", "0.75", "--output", str(folder), *TINY,
    ]  # fmt: skip

    def forking(command: list[str], stdout: IO[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        log = Path(stdout.name)
        return SimpleNamespace(returncode=forked.ended(forked.started(command, log, log, env), 120))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking_quality, "subprocess", SimpleNamespace(run=forking))
        main(command)
    return folder, command


def test_every_point_has_its_figures(study):
    folder, _ = study
    rows = json.loads((folder / "points.json").read_text())["rows"]
    assert [(row["strategy"], row["mask_ratio"], row["seed"]) for row in rows] == [
        ("adaptive", 0.75, 0),
        ("scratch", None, 0),
    ]
    adaptive, scratch = rows
    assert adaptive["pretrain_steps"] == 2
    for name in ("attentive_probe_top1", "finetune_top1", "correlation", "moving_share_of_visible"):
        assert -1 <= adaptive[name] <= 1, name
    for name in ("error_moving", "error_still", "pretrain_seconds"):
        assert adaptive[name] > 0, name
    assert "attentive_probe_top1" not in scratch
    assert 0 <= scratch["finetune_top1"] <= 1
    assert (folder / "masking_quality.png").stat().st_size > 1000
    assert "| adaptive | 0.75 | 1 |" in (folder / "masking_quality.md").read_text()


def test_the_same_command_trains_nothing_again_and_other_settings_are_refused(study, monkeypatch):
    folder, command = study

    def no_training(*_: object) -> None:
        raise AssertionError("a finished point was trained again")

    monkeypatch.setattr(masking_quality.Study, "train", no_training)
    before = (folder / "points.csv").read_bytes()
    main(command)
    assert (folder / "points.csv").read_bytes() == before
    with pytest.raises(InputError, match="made with other settings"):
        main([*command, "optimizer.base_lr=1"])


def test_a_fine_tuned_point_starts_from_its_own_pretraining(study):
    folder, _ = study
    config = (folder / "points" / "adaptive-0.75-seed0" / "finetune" / "config.yaml").read_text()
    assert f"checkpoint: {folder}/points/adaptive-0.75-seed0/pretrain" in config
    assert "checkpoint: ''" in (folder / "points" / "scratch-seed0" / "finetune" / "config.yaml").read_text()


def test_a_script_that_fails_is_said_with_its_log(tmp_path, monkeypatch):
    """In a process of its own, as the study's are but in this test's fixture."""
    (tmp_path / "fails.py").write_text("import os, sys; print(os.environ['OMP_NUM_THREADS']); sys.exit(sys.argv[1])")
    monkeypatch.setattr(masking_quality, "ROOT", tmp_path)
    log = tmp_path / "a point" / "log"
    log.parent.mkdir()
    with pytest.raises(InputError, match=f"a point failed at fails.py: {log} says why"):
        masking_quality.Study.call(None, ["fails.py", "it is broken"], {"OMP_NUM_THREADS": "7"}, log)
    assert log.read_text().splitlines() == ["7", "it is broken"]


def test_a_summary_has_means_and_deviations_over_seeds():
    rows = [
        {"strategy": name, "mask_ratio": ratio, "seed": seed, "finetune_top1": top1, "error_moving": 1.0}
        for name, ratio, values in (("tube", 0.9, (0.4, 0.6)), ("adaptive", 0.95, (0.7, 0.9)))
        for seed, top1 in enumerate(values)
    ]
    best, other = summarise(rows)
    assert (best["strategy"], best["seeds"], best["finetune_top1"]) == ("adaptive", 2, 0.8)
    assert other["finetune_top1_std"] == pytest.approx(0.1414, abs=1e-4)
    assert "error_moving_std" not in other
    assert [axes.get_title() for axes in plot(rows, "clips").axes][1] == "finetune, top-1, equal clips"


def test_equal_seconds_gives_the_slower_point_fewer_steps():
    common = [*TINY, "data.shards=none", "model.size=tiny", "model.patch_size=8", "model.mask_ratio=0.5", "steps=100"]
    common.append("model.encoder_depth=1")
    shallow = parse([*common, "model.decoder_depth=1"])
    deep = parse([*common, "model.decoder_depth=6"])
    first, second = Point("random", 0.5, 0), Point("tube", 0.5, 0)
    steps = steps_of_equal_time({first: shallow, second: deep, Point("tube", 0.5, 1): deep}, choose_device())
    assert steps[first] == 100
    assert 1 <= steps[second] < 80
    assert steps[second] == steps[Point("tube", 0.5, 1)]


def test_scratch_is_trained_once_whatever_the_ratios():
    assert grid(["tube", "scratch"], [0.5, 0.9]) == [("tube", 0.5), ("tube", 0.9), ("scratch", None)]
    assert grid(["scratch"], None) == [("scratch", None)]
    assert grid(None, None) == []


def test_after_a_point_that_failed_none_begins(tmp_path, monkeypatch):
    seeds = map(str, range(8))  # many, so that the first point fails while the last are still being given out
    options = parse_arguments(["--preset", "cpu", "--shards", "here", "--validation", "there", "--seeds", *seeds])
    begun: list[Point] = []

    def fail(study: masking_quality.Study, point: Point) -> None:
        begun.append(point)
        raise InputError("it died")

    monkeypatch.setattr(masking_quality.Study, "run", fail)
    study = masking_quality.Study(options, tmp_path, choose_device())
    with pytest.raises(InputError, match="it died"):
        study.run_all()
    assert begun == study.points[:1]


@pytest.mark.parametrize("preset", masking_quality.PRESETS)
def test_presets_can_be_trained(preset, tmp_path):
    options = parse_arguments(["--preset", preset, "--shards", "here", "--validation", "there", "--seeds", "0", "1"])
    study = masking_quality.Study(options, tmp_path, choose_device())
    assert [point.name for point in study.points][:2] == [
        f"{'adaptive'}-{study.points[0].mask_ratio:g}-seed0",
        study.points[1].name,
    ]
    assert len(study.points) == 2 * len(masking_quality.PRESETS[preset]["points"])
    for stage in ("pretrain", "attentive_probe", "finetune"):
        assert study.config(study.points[0], stage).steps
    scratch = next(point for point in study.points if point.mask_ratio is None)
    assert study.config(scratch, "finetune").finetune.layer_decay >= 0.9, "from scratch, its first layers hardly learn"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shards", "x"], "--validation together"),
        (["--preset", "cpu_clips"], "draws no videos"),
        (["--strategies", "tube"], "give --ratios with --strategies that mask"),
        (["--strategies", "scratch", "--ratios", "0.75"], "give --ratios with --strategies that mask"),
        (["--parallel", "0"], "at least 1"),
        (["--strategies", "tube", "--ratios", "0.999", "--shards", "x", "--validation", "y"], "leaves 0 of"),
    ],
)
def test_what_cannot_be_is_said_at_once(arguments, says, tmp_path):
    with pytest.raises(InputError, match=says):
        main([*arguments, "--output", str(tmp_path)])
