"""The loop, mostly in this process; as a command where signals and exit codes are the subject."""

import json
import random
import shutil
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
from made_videos import broken_copy, encode, write_shards
from processes import wait_for
from runs import is_same, load_weights, read_rows, saved_steps

from adamae.common.errors import InputError
from adamae.model.weights import pretrained
from adamae.model.weights.read_config import run_config
from adamae.pipeline.planning.plan import PlanRow, TrainingPlan
from adamae.train import train
from adamae.training.config import parse
from adamae.training.schedule import Schedule

ROOT = Path(__file__).parents[2]


def start(arguments: list[str], folder: Path):
    return forked.start(
        [sys.executable, ROOT / "train.py", *arguments], folder / "out", folder / "err"
    )


def test_a_run_directory_holds_config_checkpoints_and_metrics(tiny_run, tmp_path):
    assert [p.name for p in sorted((tiny_run / "checkpoints").iterdir())] == [
        "step-00000003",
        "step-00000006",
    ]
    assert (tiny_run / "config.yaml").is_file()
    assert (tiny_run / "report.html").is_file()
    assert list((tiny_run / "tensorboard").glob("events*"))
    weights = shutil.copy(tiny_run / "checkpoints/step-00000006/model.safetensors", tmp_path)
    assert vars(pretrained.load(Path(weights)).config) == run_config(tiny_run)["model"]
    assert [row["step"] for row in read_rows(tiny_run)] == [1, 2, 3, 4, 5, 6]
    names = (
        "reconstruction_loss",
        "sampling_loss",
        "sampler_entropy",
        "lr",
        "grad_norm",
        "clips_per_second",
    )
    assert all(
        torch.tensor([row[name] for name in names]).isfinite().all() for row in read_rows(tiny_run)
    )
    assert (
        read_rows(tiny_run)[-1]["reconstruction_loss"]
        < read_rows(tiny_run)[0]["reconstruction_loss"]
    )
    schedule = Schedule(parse([f"--config={tiny_run / 'config.yaml'}"]), clips_per_epoch=16)
    assert [row["lr"] for row in read_rows(tiny_run)] == [
        pytest.approx(schedule.lr(step)) for step in range(6)
    ]


def test_a_resumed_run_ends_with_the_same_weights_and_metrics(
    tiny_run, arguments, synthetic_shards, tmp_path
):
    """Its shards may move, but not change."""
    moved = Path(shutil.copytree(synthetic_shards, tmp_path / "moved"))
    arguments = [*arguments, f"data.shards={moved}"]
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints/step-00000006")
    assert train(parse(arguments))
    assert is_same(load_weights(run), load_weights(tiny_run))
    assert [row["step"] for row in read_rows(run)] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in read_rows(run)] == [row["loss"] for row in read_rows(tiny_run)]
    before = (run / "checkpoints/step-00000006/optimizer.pt").stat().st_mtime_ns
    assert train(parse(arguments)), "it is complete"
    assert (run / "checkpoints/step-00000006/optimizer.pt").stat().st_mtime_ns == before
    info = json.loads((moved / "dataset.json").read_text())
    (moved / "dataset.json").write_text(json.dumps({**info, "classes": info["classes"][::-1]}))
    with pytest.raises(InputError, match="trained on other shards"):
        train(parse(arguments))


def test_checkpoints_plots_and_report_come_by_time(arguments, synthetic_shards, tmp_path):
    """Evaluations by steps."""
    run, arguments = tmp_path / "run", [*arguments, "checkpoint_every=null", "steps=2"]
    assert train(parse([*arguments, "checkpoint_minutes=60"]))
    assert saved_steps(run) == [2]
    shutil.rmtree(run)
    evaluated = ["evaluation.every=1", f"evaluation.shards={synthetic_shards}"]
    assert train(parse([*arguments, *evaluated, "checkpoint_minutes=1e-6"]))
    assert saved_steps(run) == [1, 2]
    assert len(list((run / "figures").glob("*.png"))) == 2
    names = {"evaluation/reconstruction_loss", "evaluation/knn_top1", "evaluation/rankme"}
    assert [row["step"] for row in read_rows(run) if names <= set(row)] == [1, 2]
    report = (run / "report.html").read_text()
    assert "step 2 of 2 (100%), finished" in report
    assert report.count("<img") == 3
    assert 'alt="Training curves"' in report


def test_sigterm_saves_and_stops_with_exit_code_130(tiny_run, arguments, tmp_path):
    process = start([*arguments, "steps=1000"], tmp_path)
    assert wait_for(lambda: bool(read_rows(tmp_path / "run")), 120), (tmp_path / "err").read_text()
    process.terminate()
    code, said = forked.wait(process, 60), (tmp_path / "err").read_text()
    assert code == 130, said
    assert said.splitlines()[-1] == "Stopped; checkpoint saved. Re-run the same command to resume."
    last = max(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert last == f"step-{len(read_rows(tmp_path / 'run')):08d}"


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_after_kills_at_random_moments_a_run_ends_with_the_same_weights(
    tiny_run, arguments, tmp_path, kills
):
    run, dice = tmp_path / "run", random.Random(kills)
    for _ in range(kills):
        process = start([*arguments, "checkpoint_every=1"], tmp_path)
        steps = len(read_rows(run))
        logged = wait_for(
            lambda p=process, n=steps: not p.is_alive() or len(read_rows(run)) > n, 120
        )
        assert logged, (tmp_path / "err").read_text()
        time.sleep(dice.uniform(0, 0.1))  # a step and its checkpoint take about so long
        process.kill()
        process.join()
    assert train(parse([*arguments, "checkpoint_every=1"]))
    assert is_same(load_weights(run), load_weights(tiny_run))
    assert [row["loss"] for row in read_rows(run)] == [row["loss"] for row in read_rows(tiny_run)]


def test_a_run_that_failed_before_its_first_checkpoint_may_change(arguments, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(InputError, match="/nowhere"):
        train(parse([*arguments, "data.shards=/nowhere"]))
    assert not run.exists()
    run.mkdir()
    (run / "config.yaml").write_text("model: {size: base}\n")
    assert train(parse([*arguments, "steps=1"]))


def test_the_split_into_micro_batches_does_not_change_the_loss(arguments, tmp_path):
    found = []
    for batch_size in (4, 2, 1):
        run = tmp_path / f"{batch_size}"
        split = ["global_batch=4", f"batch_size={batch_size}", f"run={run}"]
        train(parse([*arguments, *split, "steps=1", "model.masking=random"]))
        (row,) = read_rows(run)
        found.append([row["loss"], row["grad_norm"]])
    assert found[1:] == [pytest.approx(found[0], rel=1e-5)] * 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "optimizer.base_lr=1e30 optimizer.warmup_lr=1e30 steps=20 checkpoint_every=100",
            r"^the run has diverged: .* not finite; lower optimizer\.base_lr .*another",
        ),
        (
            "model.sampling_loss_weight=1e38 log_every=4 checkpoint_every=4",
            r"no gradient of steps 1 to 6 is finite; lower .*init_from=.*step-00000004, which is finite$",
        ),
    ],
)
def test_a_run_that_diverges_says_so_and_how_to_recover(arguments, overrides, said):
    with pytest.raises(InputError, match=said):
        train(parse([*arguments, *overrides.split()]))


@pytest.mark.parametrize("num_frames", [32, 128])
def test_the_recipe_for_long_clips_takes_clips_longer_than_their_videos(
    num_frames, tiny_run, arguments, tmp_path
):
    more = [
        f"model.num_frames={num_frames}",
        "steps=2",
        "global_batch=2",
        "batch_size=2",
        f"init_from={tiny_run}",
    ]
    config = parse(["--config", str(ROOT / "configs/long_clips.yaml"), *arguments, *more])
    train(config)
    assert [row["loss"] > 0 for row in read_rows(tmp_path / "run")] == [True, True]
    assert (
        pretrained.load(tmp_path / "run").state["token_sampler.positions"].shape[0]
        == num_frames // 2 * 16
    )
    assert config.model.num_reconstructed == int(
        0.15 * (config.model.num_tokens - config.model.num_visible)
    )


def test_a_run_resumes_with_the_teacher_that_it_began_with(
    tiny_run: Path, arguments: list[str], tmp_path: Path
):
    teacher = Path(shutil.copytree(tiny_run, tmp_path / "teacher"))
    target = ["model.target=teacher", "model.loss=cosine"]
    given = [*arguments, *target, "evaluation.every=4", "steps=4"]
    train(parse([*given, f"model.teacher={teacher}"]))
    whole = load_weights(tmp_path / "run", 4)
    assert whole["decoder.head.weight"].shape[0] == 96
    assert not any(name.startswith("target") for name in whole)
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    assert len(json.loads((newest / "train_state.json").read_text())["target"]) == 64
    assert len(list((tmp_path / "run/figures").iterdir())) == 2, (
        "errors and masks are plotted without reconstructions"
    )

    shutil.rmtree(newest)
    moved = teacher.rename(tmp_path / "moved")
    train(parse([*given, f"model.teacher={moved}"]))
    assert is_same(load_weights(tmp_path / "run", 4), whole)
    shutil.rmtree(newest)
    shutil.rmtree(max((moved / "checkpoints").glob("step-*")))
    with pytest.raises(
        InputError,
        match=r"trained on another teacher than model\.teacher: set it to the same weights",
    ):
        train(parse([*given, f"model.teacher={moved}"]))


BROKEN = {"v07", "v31"}  # of 40 videos


class PlanThatKnows(TrainingPlan):
    """Puts the replacements in the place of the broken videos from the start."""

    def row(self, position: int) -> PlanRow:
        row, attempt = super().row(position), 0
        while self._dataset.samples[row.sample].key in BROKEN:
            attempt += 1
            row = self.replacement(row, attempt)
        return row


def test_a_run_over_broken_videos_is_the_one_that_the_plan_says(arguments, tmp_path, monkeypatch):
    """It ends, names them, and learns from the replacements; each comes up again after it was written down."""

    def train_on(shards: Path) -> list[float]:
        run = tmp_path / f"run on {shards.name}"
        two_epochs_and_a_half = ["steps=25", "checkpoint_every=100"]
        train(
            parse(
                [
                    *arguments,
                    *two_epochs_and_a_half,
                    "data.num_workers=2",
                    f"data.shards={shards}",
                    f"run={run}",
                ]
            )
        )
        return [row["loss"] for row in read_rows(run)]

    videos = [(f"v{i:02d}", encode(12, first=i, pattern=True)) for i in range(40)]
    intact = write_shards(tmp_path / "intact", videos, per_shard=8)
    broken = Path(broken_copy(intact, tmp_path / "broken", BROKEN).folder)
    curve = train_on(broken)
    entries = [
        json.loads(line)
        for line in (tmp_path / "run on broken/quarantine.jsonl").read_text().splitlines()
    ]
    assert sorted(entry["key"] for entry in entries) == sorted(BROKEN), "each once"
    assert all(str(broken / "shard-") in entry["where"] and entry["reason"] for entry in entries)
    assert len(curve) == 25
    assert train_on(intact) != curve
    shutil.rmtree(tmp_path / "run on intact")
    monkeypatch.setattr("adamae.train.TrainingPlan", PlanThatKnows)
    assert train_on(intact) == curve, "the clips are not those of the plan"
