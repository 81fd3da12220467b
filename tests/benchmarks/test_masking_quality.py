"""The comparison of maskings, with points of a few steps."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import forked
import pytest

from benchmarks import masking_study
from benchmarks.harness import Timing
from benchmarks.masking_quality import main, parse_arguments
from benchmarks.masking_study import PRETRAIN, Point, Stage, draw_synthetic_motion, grid, steps_of_equal_time
from benchmarks.reports.masking_tables import TABLE, earlier_rows, paired, plot, summarise
from common.devices import choose_device, get_device_name
from common.errors import InputError
from training.config import parse

TINY = [
    "model.num_frames=4", "model.image_size=32", "batch_size=4", "steps=2", "data.num_threads=1", "log_every=1",
    "optimizer.warmup_epochs=0", "device=cpu",
]  # fmt: skip


ADAPTIVE = "adaptive:sampling_sharpness=3"


@pytest.fixture(scope="module")
def study(tmp_path_factory, synthetic_shards) -> tuple[Path, list[str]]:
    """A folder with the results of two strategies and of scratch, and the command that made it."""
    folder = tmp_path_factory.mktemp("quality")
    command = [
        "--shards", str(synthetic_shards), "--validation", str(synthetic_shards), "--seeds", "0",
        "--strategies", ADAPTIVE, "scratch", "--ratios", "0.75", "--labels", "8", "--label-sets", "2",
        "--output", str(folder), *TINY,
    ]  # fmt: skip

    def forking(command: list[str], stdout: IO[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        log = Path(stdout.name)
        return SimpleNamespace(returncode=forked.ended(forked.started(command, log, log, env), 120))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking_study, "subprocess", SimpleNamespace(run=forking))
        main(command)
    return folder, command


def test_every_point_has_its_figures(study):
    folder, _ = study
    rows = json.loads((folder / "points.json").read_text())["rows"]
    assert [(row["strategy"], row["mask_ratio"], row["seed"], row["label_set"]) for row in rows] == [
        (ADAPTIVE, 0.75, 0, 0),
        (ADAPTIVE, 0.75, 0, 1),
        ("scratch", None, 0, 0),
        ("scratch", None, 0, 1),
    ]
    adaptive, other_labels, scratch, _ = rows
    assert adaptive["pretrain_steps"] == 2
    assert adaptive["pretrain_seconds"] == other_labels["pretrain_seconds"]  # of the one there was
    for name in ("attentive_probe_top1", "finetune_top1", "correlation", "moving_share_of_visible"):
        assert -1 <= adaptive[name] <= 1, name
    for name in ("error_moving", "error_still", "pretrain_seconds"):
        assert adaptive[name] > 0, name
    assert "attentive_probe_top1" not in scratch
    assert 0 <= scratch["finetune_top1"] <= 1
    assert (folder / "masking_quality.png").stat().st_size > 1000
    assert f"| {ADAPTIVE} | 0.75 | 1 | 2 |" in (folder / "masking_quality.md").read_text()


def test_the_same_command_trains_nothing_again_and_other_settings_are_refused(study, monkeypatch):
    folder, command = study

    def no_training(*_: object) -> None:
        raise AssertionError("a finished point was trained again")

    monkeypatch.setattr(masking_study.Study, "train", no_training)
    before = (folder / "points.csv").read_bytes()
    main(command)
    assert (folder / "points.csv").read_bytes() == before
    for other in ("optimizer.base_lr=1", "--labels=7", "--pretrain-steps=3"):
        with pytest.raises(InputError, match="made with other settings"):
            main([*command, other])
    assert (folder / "points.csv").read_bytes() == before


@pytest.mark.parametrize(("planned", "fits"), [(1500, True), (0, True), (4000, False)])
def test_a_table_of_other_steps_is_not_added_to_unless_epochs_are_counted(tmp_path, planned, fits):
    about = dict.fromkeys(TABLE, "x")
    rows = [row_of("random", 0.9, 0, 0, 0.5) | {"pretrain_steps": 1500}, row_of("scratch", None, 0, 0, 0.5)]
    file = tmp_path / "points.json"
    file.write_text(json.dumps({"about": about, "rows": rows}))
    steps = {("random", 0.9): planned, ("scratch", None): 0}
    if fits:
        assert earlier_rows(file, about, steps) == rows
    else:
        with pytest.raises(InputError, match=r"pretrain_steps of random.* '1500', now '4000'"):
            earlier_rows(file, about, steps)


def test_what_stands_in_the_table_is_not_made_again(study, tmp_path, monkeypatch):
    """As in a fresh clone, which has the tables of a study and nothing else of it."""
    folder, command = study
    for file in folder.glob("points.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(masking_study.Study, "made", lambda *_: pytest.fail("made again"))
    main([*command, "--output", str(tmp_path)])
    assert (tmp_path / "points.csv").read_bytes() == (folder / "points.csv").read_bytes()
    with pytest.raises(pytest.fail.Exception, match="made again"):
        main([*command, "--output", str(tmp_path), "--label-sets", "3"])


def test_other_points_are_added_to_the_table_and_the_same_ones_take_their_place(study, monkeypatch):
    folder, command = study
    tables = ("points", "masking_quality")
    kept = {file: file.read_bytes() for name in tables for file in folder.glob(f"{name}.*")}
    earlier = json.loads((folder / "points.json").read_text())["rows"]
    assert {(row["device"], bool(row["commit"])) for row in earlier} == {(get_device_name(choose_device()), True)}

    def made(study: masking_study.Study) -> list[dict]:
        return [
            row_of(point.strategy, point.mask_ratio, point.seed, labels, 0.25)
            for point in study.points
            for labels in (0, 1)
        ]

    monkeypatch.setattr(masking_study.Study, "run_all", made)
    main([*command, "--strategies", ADAPTIVE, "tube", "--seeds", "0", "1"])
    rows = json.loads((folder / "points.json").read_text())["rows"]
    assert rows[:2] == earlier[2:], "those of scratch, which this call does not make"
    assert [row["finetune_top1"] for row in rows[2:]] == [0.25] * 8
    summary = json.loads((folder / "masking_quality.json").read_text())["rows"]
    assert {row["strategy"]: row["seeds"] for row in summary} == {ADAPTIVE: 2, "tube": 2, "scratch": 1}
    for file, contents in kept.items():
        file.write_bytes(contents)


def test_a_fine_tuned_point_starts_from_its_own_pretraining_with_its_own_labels(study):
    folder, _ = study
    point = folder / "points" / "adaptive_sampling_sharpness_3-0.75-seed0"
    assert "sampling_sharpness: 3.0" in (point / "pretrain" / "config.yaml").read_text()
    for name, seed in (("finetune", 0), ("finetune-labels1", 1)):
        config = (point / name / "config.yaml").read_text()
        assert f"checkpoint: {point}/pretrain" in config
        assert f"subset: 8\n  subset_seed: {seed}" in config
    assert "checkpoint: ''" in (folder / "points" / "scratch-seed0" / "finetune" / "config.yaml").read_text()


def test_a_script_that_fails_is_said_with_its_log(tmp_path, monkeypatch):
    """In a process of its own, as the study's are but in this test's fixture."""
    (tmp_path / "fails.py").write_text("import os, sys; print(os.environ['OMP_NUM_THREADS']); sys.exit(sys.argv[1])")
    monkeypatch.setattr(masking_study, "ROOT", tmp_path)
    log = tmp_path / "a point" / "log"
    log.parent.mkdir()
    with pytest.raises(InputError, match=f"a point failed at fails.py: {log} says why"):
        masking_study.Study.call(None, ["fails.py", "it is broken"], {"OMP_NUM_THREADS": "7"}, log)
    assert log.read_text().splitlines() == ["7", "it is broken"]


def row_of(strategy: str, ratio: float, seed: int, label_set: int, top1: float) -> dict:
    key = {"strategy": strategy, "mask_ratio": ratio, "seed": seed, "label_set": label_set}
    return {**key, "finetune_top1": top1, "attentive_probe_top1": top1, "error_moving": 1.0}


def test_a_summary_has_means_and_deviations_over_seeds():
    rows = [
        row_of(name, ratio, seed, 0, top1)
        for name, ratio, values in (("tube", 0.9, (0.4, 0.6)), ("adaptive", 0.95, (0.7, 0.9)))
        for seed, top1 in enumerate(values)
    ]
    best, other = summarise(rows, "random")
    assert (best["strategy"], best["seeds"], best["finetune_top1"]) == ("adaptive", 2, 0.8)
    assert other["finetune_top1_std"] == pytest.approx(0.1414, abs=1e-4)
    assert "error_moving_std" not in other
    assert "finetune_top1_lead" not in other  # there is nothing random here
    figure = plot(rows, "random", "clips")
    assert [axes.get_title() for axes in figure.axes][1] == "finetune, top-1, equal clips"
    assert len(figure.axes[0].collections) == 2  # shades of two lines


def test_a_lead_is_taken_in_pairs_and_its_error_over_what_is_independent():
    random = [row_of("random", 0.9, seed, labels, 0.5 + 0.1 * seed) for seed in range(3) for labels in range(2)]
    sharp = [{**row, "strategy": "sharp", "finetune_top1": row["finetune_top1"] + 0.05} for row in random]
    sharp[0]["finetune_top1"] += 0.06  # one of seed 0, label set 0
    lead, error = paired(sharp, random, "finetune_top1")
    assert lead == pytest.approx(0.06)
    assert error == pytest.approx(max(0.03 / 3**0.5 / 3**0.5, 0.02 / 2**0.5 / 2**0.5))
    best = summarise([*random, *sharp], "random")[0]
    assert (best["strategy"], best["finetune_top1_lead"]) == ("sharp", 0.06)
    assert paired(sharp[:1], random, "finetune_top1")[1] is None
    alone = summarise([*random[:2], *sharp[2:]], "random")[0]
    assert "finetune_top1_lead" not in alone, "of other seeds than random's"


def test_bars_stand_at_their_names_whatever_they_show():
    """Also where the probe's order is another one, and where there is no probe."""
    rows = [row_of(name, 0.9, 0, 0, top1) for name, top1 in (("first", 0.9), ("last", 0.5))]
    rows[0]["attentive_probe_top1"] = 0.2
    scratch = row_of("scratch", None, 0, 0, 0.7)
    del scratch["attentive_probe_top1"]
    figure = plot([rows[1], scratch, rows[0]], "random", "clips")
    probes, finetuned = figure.axes
    names = [label.get_text() for label in probes.get_yticklabels()]
    assert names == ["first 0.9", "scratch", "last 0.9"]
    assert probes.yaxis_inverted()  # the best on top

    def shown(axes) -> dict[str, float]:
        return {names[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in axes.patches}

    assert shown(probes) == {"first 0.9": 0.2, "last 0.9": 0.5}
    assert shown(finetuned) == {"first 0.9": 0.9, "scratch": 0.7, "last 0.9": 0.5}


def test_equal_seconds_gives_the_slower_point_fewer_steps_and_when_started_again_the_same(tmp_path, monkeypatch):
    common = [*TINY, "data.shards=none", "model.size=tiny", "model.patch_size=8", "model.mask_ratio=0.5", "steps=100"]
    common.append("model.encoder_depth=1")
    shallow = parse([*common, "model.decoder_depth=1"])
    deep = parse([*common, "model.decoder_depth=6"])
    first, second = Point("random", 0.5, 0), Point("tube", 0.5, 0)
    configs = {first: shallow, second: deep, Point("tube", 0.5, 1): deep}
    about = dict.fromkeys(TABLE, "x") | {"device": "here", "commit": "1"}
    steps = steps_of_equal_time(configs, choose_device(), tmp_path, about)
    assert steps[first] == 100
    assert 1 <= steps[second] < 80
    assert steps[second] == steps[Point("tube", 0.5, 1)]
    monkeypatch.setattr(masking_study, "time_calls", lambda *_, **__: Timing(1000, 1000, 1000, 1))
    assert steps_of_equal_time(configs, choose_device(), tmp_path, about) == steps
    added = steps_of_equal_time(configs | {Point("frame", 0.5, 0): deep}, choose_device(), tmp_path, about)
    assert added == steps | {Point("frame", 0.5, 0): added[Point("frame", 0.5, 0)]}
    elsewhere = steps_of_equal_time(configs, choose_device(), tmp_path, about | {"device": "there"})
    assert set(elsewhere.values()) == {100}, "another machine's times are not these"
    with pytest.raises(InputError, match="made with other settings"):
        steps_of_equal_time(configs, choose_device(), tmp_path, about | {"overrides": "batch_size=2"})


def test_scratch_is_trained_once_whatever_the_ratios():
    assert grid(["tube", "scratch"], [0.5, 0.9]) == [("tube", 0.5), ("tube", 0.9), ("scratch", None)]
    assert grid(["scratch"], None) == [("scratch", None)]
    assert grid(None, None) == []


def test_after_a_point_that_failed_none_begins(tmp_path, monkeypatch):
    seeds = map(str, range(8))  # many, so that the first point fails while the last are still being given out
    options = parse_arguments(["--preset", "cpu", "--shards", "here", "--validation", "there", "--seeds", *seeds])
    begun: list[Point] = []

    def fail(study: masking_study.Study, point: Point) -> None:
        begun.append(point)
        raise InputError("it died")

    monkeypatch.setattr(masking_study.Study, "run", fail)
    study = masking_study.Study(options, tmp_path, choose_device())
    with pytest.raises(InputError, match="it died"):
        study.run_all()
    assert begun == study.points[:1]


def test_a_longer_pretraining_has_room_for_a_longer_ramp(tmp_path):
    """And what is fine-tuned goes on for as long as the preset says."""
    ramp = "adaptive:sampling_sharpness=6,sharpness_ramp=64000"
    command = ["--shards", "here", "--validation", "there", "--strategies", ramp, "--ratios", "0.95", "--seeds", "0"]
    with pytest.raises(InputError, match="sharpness_ramp"):
        masking_study.Study(parse_arguments(command), tmp_path, choose_device())
    study = masking_study.Study(parse_arguments([*command, "--pretrain-steps", "4000"]), tmp_path, choose_device())
    (point,) = study.points
    assert study.steps_of(point, PRETRAIN) == 4000
    assert study.steps_of(point, Stage("finetune", 0)) == 300


@pytest.mark.parametrize("preset", masking_study.PRESETS)
def test_presets_can_be_trained(preset, tmp_path):
    options = parse_arguments(["--preset", preset, "--shards", "here", "--validation", "there", "--seeds", "0", "1"])
    study = masking_study.Study(options, tmp_path, choose_device())
    assert study.stages_of(study.points[0]) == [PRETRAIN, Stage("attentive_probe", 0), Stage("finetune", 0)]
    assert [point.name for point in study.points][:2] == [
        f"{'adaptive'}-{study.points[0].mask_ratio:g}-seed0",
        study.points[1].name,
    ]
    assert len(study.points) == 2 * len(masking_study.PRESETS[preset]["points"])
    for stage in study.stages_of(study.points[0]):
        assert study.config(study.points[0], stage).steps
    scratch = next(point for point in study.points if point.mask_ratio is None)
    recipe = study.config(scratch, Stage("finetune", 0))
    assert recipe.finetune.layer_decay >= 0.9, "from scratch, its first layers hardly learn"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shards", "x"], "--validation together"),
        (["--preset", "cpu_clips"], "draws no videos"),
        (["--strategies", "tube"], "give --ratios with --strategies that mask"),
        (["--strategies", "scratch", "--ratios", "0.75"], "give --ratios with --strategies that mask"),
        (["--parallel", "0"], "--parallel is 0: give a whole number of at least 1"),
        (["--label-sets", "0"], "--label-sets is 0"),
        (["--shards", "x", "--validation", "y", "--label-sets", "2"], "--label-sets needs --labels"),
        (["--shards", "x", "--validation", "y", "--drawn", "size=64"], "--drawn is for videos that are drawn"),
        (["--strategies", "adaptive:foo=1", "--ratios", ".9", "--shards", "x", "--validation", "y"], "model.foo"),
        (["--strategies", "tube", "--ratios", "0.999", "--shards", "x", "--validation", "y"], "leaves 0 of"),
    ],
)
def test_what_cannot_be_is_said_at_once(arguments, says, tmp_path):
    with pytest.raises(InputError, match=says):
        main([*arguments, "--output", str(tmp_path)])


def test_videos_drawn_with_other_options_are_not_taken_for_these(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/options.txt").write_text("--size 32")
    with pytest.raises(InputError, match="drawn with other options: choose another --output"):
        draw_synthetic_motion(tmp_path, "--size 64", 10)


def test_videos_are_drawn_into_a_folder_that_is_not_there_yet(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: calls.append(command))
    assert draw_synthetic_motion(tmp_path / "new/study", "--size 64", 10) == tuple(
        str(tmp_path / "new/study/data" / name) for name in ("train", "validation")
    )
    assert [Path(command[1]).name for command in calls] == ["synthetic_motion.py", "make_shards.py"] * 2
