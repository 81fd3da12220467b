"""The training loop, in this process, or as a command where signals and exit codes matter."""

import json
import math
import random
import shutil
import socket
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import forked
import pytest
from made_videos import broken_copy, encode, write_shards
from processes import wait_for
from runs import is_same, load_weights, read_rows, saved_steps

import adamae.train
from adamae.common.errors import STOPPED, InputError
from adamae.model.weights import pretrained
from adamae.model.weights.read_config import run_config
from adamae.pipeline.planning.plan import PlanRow, TrainingPlan
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.train import train
from adamae.training.config import parse
from adamae.training.schedule import Schedule

ROOT = Path(__file__).parents[2]
KNN = "evaluation/knn_top1"


def start(arguments: list[str], folder: Path) -> ForkServerProcess:
    """Start train.py as a command, with its output in `folder`."""
    command = [sys.executable, ROOT / "train.py", *arguments]
    return forked.start(command, folder / "out", folder / "err")


def test_a_run_directory_holds_config_checkpoints_and_metrics(
    tiny_run: Path, tmp_path: Path
) -> None:
    assert saved_steps(tiny_run) == [3, 6]
    assert (tiny_run / "config.yaml").is_file()
    assert (tiny_run / "report.html").is_file()
    assert list((tiny_run / "tensorboard").glob("events*"))
    weights = shutil.copy(tiny_run / "checkpoints/step-00000006/model.safetensors", tmp_path)
    assert vars(pretrained.load(Path(weights)).config) == run_config(tiny_run)["model"]
    rows = read_rows(tiny_run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    names = (
        "reconstruction_loss",
        "sampling_loss",
        "sampler_entropy",
        "lr",
        "grad_norm",
        "clips_per_second",
    )
    for row in rows:
        assert all(math.isfinite(row[name]) for name in names)
    assert rows[-1]["reconstruction_loss"] < rows[0]["reconstruction_loss"]
    schedule = Schedule(parse([f"--config={tiny_run / 'config.yaml'}"]), clips_per_epoch=16)
    rates = [schedule.lr(step) for step in range(6)]
    assert [row["lr"] for row in rows] == pytest.approx(rates)


def test_a_resumed_run_ends_with_the_same_weights_and_metrics(
    tiny_run: Path, arguments: list[str], synthetic_shards: Path, tmp_path: Path
) -> None:
    """Its shards may move, but not change."""
    moved = Path(shutil.copytree(synthetic_shards, tmp_path / "moved"))
    arguments = [*arguments, f"data.shards={moved}"]
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints/step-00000006")
    assert train(parse(arguments))
    assert is_same(load_weights(run), load_weights(tiny_run))
    assert [row["step"] for row in read_rows(run)] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in read_rows(run)] == [row["loss"] for row in read_rows(tiny_run)]
    # A run that is complete is not saved again.
    optimizer = run / "checkpoints/step-00000006/optimizer.pt"
    before = optimizer.stat().st_mtime_ns
    assert train(parse(arguments))
    assert optimizer.stat().st_mtime_ns == before
    info = json.loads((moved / "dataset.json").read_text())
    (moved / "dataset.json").write_text(json.dumps({**info, "classes": info["classes"][::-1]}))
    with pytest.raises(InputError, match="trained on other shards"):
        train(parse(arguments))


def test_checkpoints_plots_and_report_come_by_time(
    arguments: list[str], synthetic_shards: Path, tmp_path: Path
) -> None:
    """Evaluations come by steps."""
    run = tmp_path / "run"
    arguments = [*arguments, "checkpoint_every=null", "steps=2"]
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


def test_a_run_whose_folder_is_deleted_meanwhile_says_so(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train_step = adamae.train.train_step

    def delete_run_and_step(*inputs: Any) -> Any:
        shutil.rmtree(run, ignore_errors=True)
        return train_step(*inputs)

    monkeypatch.setattr("adamae.train.train_step", delete_run_and_step)
    with pytest.raises(InputError, match="was deleted while its run wrote to it: the same command"):
        train(parse(arguments))
    monkeypatch.undo()
    assert train(parse(arguments))


def test_what_a_killed_run_was_writing_is_removed(arguments: list[str], tmp_path: Path) -> None:
    for folder in (".", "figures", "checkpoints"):
        (tmp_path / "run" / folder).mkdir(exist_ok=True, parents=True)
        # No process has this number: Linux counts to 2^22.
        name = f".x.{socket.gethostname()}-{2**22 + 1}.partial"
        (tmp_path / "run" / folder / name).mkdir()
    train(parse([*arguments, "steps=1"]))
    assert not list((tmp_path / "run").rglob("*.partial"))


def test_sigterm_saves_and_stops_with_its_exit_code(
    tiny_run: Path, arguments: list[str], tmp_path: Path
) -> None:
    process = start([*arguments, "steps=1000"], tmp_path)
    assert wait_for(lambda: bool(read_rows(tmp_path / "run")), 120), (tmp_path / "err").read_text()
    process.terminate()
    code = forked.wait(process, 240)
    log = (tmp_path / "err").read_text()
    assert code == STOPPED, log
    assert log.splitlines()[-1] == "Stopped; checkpoint saved. Re-run the same command to resume."
    assert saved_steps(tmp_path / "run")[-1] == len(read_rows(tmp_path / "run"))


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_after_kills_at_random_moments_a_run_ends_with_the_same_weights(
    tiny_run: Path, arguments: list[str], tmp_path: Path, kills: int
) -> None:
    run = tmp_path / "run"
    dice = random.Random(kills)
    for _ in range(kills):
        process = start([*arguments, "checkpoint_every=1"], tmp_path)
        wait_for_a_step(process, run)
        # A step and its checkpoint take 0.1 s.
        time.sleep(dice.uniform(0, 0.1))
        process.kill()
        process.join()
    assert train(parse([*arguments, "checkpoint_every=1"]))
    assert is_same(load_weights(run), load_weights(tiny_run))
    assert [row["loss"] for row in read_rows(run)] == [row["loss"] for row in read_rows(tiny_run)]


def wait_for_a_step(process: ForkServerProcess, run: Path) -> None:
    """Wait until the process has logged another step, or has ended."""
    num_steps = len(read_rows(run))
    logged = wait_for(lambda: not process.is_alive() or len(read_rows(run)) > num_steps, 120)
    assert logged, (run.parent / "err").read_text()


def test_a_run_that_failed_before_its_first_checkpoint_may_change(
    arguments: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(InputError, match="/nowhere"):
        train(parse([*arguments, "data.shards=/nowhere"]))
    assert not run.exists()
    run.mkdir()
    (run / "config.yaml").write_text("model: {size: base}\n")
    assert train(parse([*arguments, "steps=1"]))


def test_the_split_into_micro_batches_does_not_change_the_loss(
    arguments: list[str], tmp_path: Path
) -> None:
    results = []
    for batch_size in (4, 2, 1):
        run = tmp_path / f"{batch_size}"
        split = ["global_batch=4", f"batch_size={batch_size}", f"run={run}"]
        train(parse([*arguments, *split, "steps=1"]))
        (row,) = read_rows(run)
        results.append([row["loss"], row["grad_norm"]])
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[2] == pytest.approx(results[0], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "optimizer.base_lr=1e30 optimizer.warmup_lr=1e30 steps=20 checkpoint_every=100",
            r"^the run has diverged: .* not finite; lower optimizer\.base_lr .*another",
        ),
        (
            "model.sampling_loss_weight=1e38 log_every=4 checkpoint_every=4",
            r"no gradient of steps 1 to 6 is finite; lower .*init_from=.*step-00000004, which is"
            " finite$",
        ),
    ],
)
def test_a_run_that_diverges_says_so_and_how_to_recover(
    arguments: list[str], overrides: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train(parse([*arguments, *overrides.split()]))


@pytest.mark.parametrize("num_frames", [32, 128])
def test_the_recipe_for_long_clips_takes_clips_longer_than_their_videos(
    num_frames: int, tiny_run: Path, arguments: list[str], tmp_path: Path
) -> None:
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
    state = pretrained.load(tmp_path / "run").state
    assert state["token_sampler.positions"].shape[0] == num_frames // 2 * 16
    num_masked = config.model.num_tokens - config.model.num_visible
    assert config.model.num_reconstructed == int(0.15 * num_masked)


def test_a_run_resumes_with_the_teacher_that_it_began_with(
    tiny_run: Path, arguments: list[str], tmp_path: Path
) -> None:
    teacher = Path(shutil.copytree(tiny_run, tmp_path / "teacher"))
    target = ["model.target=teacher", "model.loss=cosine"]
    arguments = [*arguments, *target, "evaluation.every=4", "steps=4"]
    train(parse([*arguments, f"model.teacher={teacher}"]))
    whole = load_weights(tmp_path / "run", 4)
    assert whole["decoder.head.weight"].shape[0] == 96
    assert not any(name.startswith("target") for name in whole)
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    assert len(json.loads((newest / "train_state.json").read_text())["target"]) == 64
    # Errors and masks are plotted without reconstructions.
    assert len(list((tmp_path / "run/figures").iterdir())) == 2

    shutil.rmtree(newest)
    moved = teacher.rename(tmp_path / "moved")
    train(parse([*arguments, f"model.teacher={moved}"]))
    assert is_same(load_weights(tmp_path / "run", 4), whole)
    shutil.rmtree(newest)
    shutil.rmtree(max((moved / "checkpoints").glob("step-*")))
    message = r"trained on another teacher than model\.teacher, .* set it to the same weights"
    with pytest.raises(InputError, match=message):
        train(parse([*arguments, f"model.teacher={moved}"]))


# Of 20 videos.
BROKEN = {"v07", "v15"}


class PlanThatKnows(TrainingPlan):
    """A plan that has the replacements of broken videos from the start."""

    def row(self, position: int) -> PlanRow:
        row = super().row(position)
        attempt = 0
        while self._dataset.samples[row.sample].key in BROKEN:
            attempt += 1
            row = self.replacement(row, attempt)
        return row


def test_a_run_over_broken_videos_is_the_one_that_the_plan_says(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, names each of them once, and learns from the replacements in all epochs."""

    def train_on(shards: Path) -> list[float]:
        run = tmp_path / f"run on {shards.name}"
        # 13 steps of 4 clips are two and a half epochs.
        config = parse(
            [
                *arguments,
                "steps=13",
                "checkpoint_every=100",
                "data.num_workers=2",
                f"data.shards={shards}",
                f"run={run}",
            ]
        )
        train(config)
        return [row["loss"] for row in read_rows(run)]

    videos = [(f"v{i:02d}", encode(12, first=i, pattern=True)) for i in range(20)]
    intact = write_shards(tmp_path / "intact", videos, per_shard=8)
    broken = Path(broken_copy(intact, tmp_path / "broken", BROKEN).folder)
    curve = train_on(broken)
    quarantine = (tmp_path / "run on broken/quarantine.jsonl").read_text()
    entries = [json.loads(line) for line in quarantine.splitlines()]
    assert sorted(entry["key"] for entry in entries) == sorted(BROKEN)
    for entry in entries:
        assert str(broken / "shard-") in entry["where"]
        assert entry["reason"]
    assert len(curve) == 13
    assert train_on(intact) != curve
    shutil.rmtree(tmp_path / "run on intact")
    monkeypatch.setattr("adamae.train.TrainingPlan", PlanThatKnows)
    assert train_on(intact) == curve


@pytest.mark.slow
def test_a_labeled_run_with_damaged_videos_is_evaluated_and_resumes(
    arguments: list[str], synthetic_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are references of k-NN, too, at every evaluation and where a run resumes."""
    samples = ShardDataset.open(synthetic_shards).samples
    keys = {samples[index].key for index in (1, 6, 11)}
    broken = broken_copy(synthetic_shards, tmp_path / "broken", keys)
    evaluation = [f"evaluation.shards={synthetic_shards}", "evaluation.every=3"]
    config = parse([*arguments, f"data.shards={broken.folder}", *evaluation])
    assert train(config)
    metrics = tmp_path / "run/metrics.jsonl"
    assert [row["step"] for row in read_rows(tmp_path / "run") if KNN in row] == [3, 6]
    assert "3 of 16 neighbors of k-NN cannot be decoded" in capsys.readouterr().err
    # A kill between the checkpoint and its evaluation.
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000006")
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if KNN not in line))
    assert train(config)
    assert [row["step"] for row in read_rows(tmp_path / "run") if KNN in row] == [3, 6]
