"""The loop as users run it: `python train.py …` in a process of its own, on shards made from drawn videos."""

import dataclasses
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import forked
import pytest
import torch
import torchrun
from safetensors.torch import load_file

from common.errors import InputError
from training.config import parse
from training.schedule import Horizon

ROOT = Path(__file__).parents[2]
TINY = [
    "model.size=tiny", "model.num_frames=4", "model.image_size=32", "model.patch_size=8", "model.mask_ratio=0.75",
    "data.frame_stride=2", "batch_size=4", "steps=6", "precision=fp32", "optimizer.base_lr=0.06",
    "optimizer.warmup_epochs=0", "device=cpu", "log_every=1", "data.num_threads=1", "evaluation.every=null",
]  # fmt: skip


def command(shards: Path, run: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *TINY, f"data.shards={shards}", f"run={run}", *overrides]


def run(arguments: list[str], code: int = 0) -> str:
    done = forked.run(arguments)
    assert done.returncode == code, done.stderr
    assert code == 0 or "Traceback" not in done.stderr, done.stderr
    return done.stderr


def logged(run_folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def weights(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run_folder / f"checkpoints/step-{step:08d}/model.safetensors")


def assert_same_weights(one: Path, other: Path, step: int) -> None:
    ours, theirs = weights(one, step), weights(other, step)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, synthetic_shards) -> Path:
    """Six uninterrupted steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(command(synthetic_shards, folder, "checkpoint_every=3"))
    return folder


def test_a_run_folder_holds_config_checkpoints_and_metrics(whole_run):
    assert [p.name for p in sorted((whole_run / "checkpoints").iterdir())] == ["step-00000003", "step-00000006"]
    assert (whole_run / "config.yaml").is_file()
    assert list((whole_run / "tensorboard").glob("events*"))
    lines = logged(whole_run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for name in ("reconstruction_loss", "sampling_loss", "sampler_entropy", "lr", "grad_norm", "clips_per_second",
                 "data_wait_fraction", "peak_memory_gib"):  # fmt: skip
        assert all(line[name] == line[name] and name in line for line in lines), name
    assert lines[-1]["reconstruction_loss"] < lines[0]["reconstruction_loss"]


def test_the_learning_rate_is_the_schedules_and_epochs_count_videos(whole_run):
    settings = parse([f"--config={whole_run / 'config.yaml'}"])
    horizon = Horizon.of(settings, clips_per_epoch=16, world_size=1)
    assert [line["lr"] for line in logged(whole_run)] == [
        pytest.approx(horizon.schedule.lr(line["step"] - 1)) for line in logged(whole_run)
    ]
    assert len({line["lr"] for line in logged(whole_run)}) > 1
    by_epochs = dataclasses.replace(settings, steps=None, epochs=3.0)
    assert Horizon.of(by_epochs, 16, 1).total_steps == 3 * 16 // settings.batch_size
    assert Horizon.of(by_epochs, 16, 2).total_steps == 3 * 16 // settings.batch_size // 2


def test_killed_at_any_moment_a_run_ends_with_the_same_weights(tmp_path, synthetic_shards, whole_run):
    folder = tmp_path / "run"
    arguments = command(synthetic_shards, folder, "checkpoint_every=1")
    process = forked.started(arguments, tmp_path / "said", tmp_path / "said")
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints/step-00000002").exists():
        assert time.monotonic() < deadline
        assert process.exitcode is None
        time.sleep(0.002)
    process.kill()
    process.join()
    assert not (folder / "checkpoints/step-00000006").exists(), "killed too late to prove anything"
    run(arguments)
    assert_same_weights(folder, whole_run, 6)
    assert [line["step"] for line in logged(folder)] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in logged(folder)] == [line["loss"] for line in logged(whole_run)]


def test_sigterm_saves_stops_and_goes_on(tmp_path, synthetic_shards, whole_run):
    folder = tmp_path / "run"
    arguments = command(synthetic_shards, folder, "checkpoint_every=1")  # which makes steps long enough to interrupt
    process = forked.started(arguments, tmp_path / "out", tmp_path / "err")
    deadline = time.monotonic() + 120
    while not (folder / "tensorboard").exists():  # made when signals are listened to and no step was taken
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.terminate()
    code, said = forked.ended(process, 60), (tmp_path / "err").read_text()
    assert code == 130, said
    assert "Traceback" not in said
    assert "to resume" in said
    run(arguments)
    assert_same_weights(folder, whole_run, 6)


def test_every_step_is_in_one_line_of_the_log_also_where_a_run_went_on(tmp_path, synthetic_shards, whole_run):
    folder = tmp_path / "run"
    arguments = command(synthetic_shards, folder, "checkpoint_every=3", "log_every=4")
    run(arguments)
    whole = {line["step"]: line["loss"] for line in logged(folder)}
    assert list(whole) == [3, 4, 6]
    by_step = [line["loss"] for line in logged(whole_run)]
    assert whole[3] == pytest.approx(sum(by_step[:3]) / 3)
    assert whole[6] == pytest.approx(sum(by_step[4:]) / 2)
    shutil.rmtree(folder / "checkpoints/step-00000006")
    run(arguments)
    assert {line["step"]: line["loss"] for line in logged(folder)} == whole


def test_a_finished_run_started_again_changes_nothing(synthetic_shards, whole_run):
    before = weights(whole_run, 6)
    run(command(synthetic_shards, whole_run, "checkpoint_every=3"))
    assert all(torch.equal(before[name], value) for name, value in weights(whole_run, 6).items())


def test_another_configuration_in_the_same_folder_is_refused(synthetic_shards, whole_run):
    said = run(command(synthetic_shards, whole_run, "model.mask_ratio=0.5"), code=2)
    assert "model.mask_ratio: 0.75 -> 0.5" in said


def test_the_split_into_micro_batches_does_not_change_the_loss(tmp_path, synthetic_shards):
    losses = []
    for batch_size, accumulate in ((4, 1), (2, 2), (1, 4)):
        folder = tmp_path / f"{batch_size}x{accumulate}"
        overrides = (f"batch_size={batch_size}", f"accumulate={accumulate}", "steps=1", "model.masking=random")
        run(command(synthetic_shards, folder, *overrides))
        losses.append((logged(folder)[0]["loss"], logged(folder)[0]["grad_norm"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_of_several_processes_the_one_that_failed_has_the_last_word(tmp_path, synthetic_shards):
    arguments = command(synthetic_shards, tmp_path / "run", "finetune.mixup=0.8", "task=finetune", "batch_size=3")
    with torchrun.started(arguments[2:], tmp_path / "log") as job:
        assert job.wait() == [1]
        said = job.said()
    assert "error: batch_size is 3, and mixup and cutmix mix clips in pairs" in said[said.index("Root Cause") :]


def test_machines_that_do_not_share_the_run_folder_are_noticed(tmp_path, synthetic_shards):
    run(command(synthetic_shards, tmp_path / "0/run", "steps=2", "batch_size=8", "checkpoint_every=1"))
    shutil.rmtree(tmp_path / "0/run/checkpoints/step-00000002")
    (tmp_path / "1").mkdir()
    arguments = command(synthetic_shards, Path("run"), "steps=2", "batch_size=4", "checkpoint_every=1")
    apart = partial(torchrun.in_folder_of_its_own, tmp_path)
    with torchrun.started(arguments[2:], tmp_path / "log", before=apart) as job:
        assert job.wait() == [1]
        assert "error: the processes of this run find different checkpoints in run" in job.said()
    assert not (tmp_path / "0/run/checkpoints/step-00000002").exists(), "it went on"


def test_bad_input_is_one_sentence(tmp_path, synthetic_shards):
    said = run(command(synthetic_shards, tmp_path / "run", "data.shards=/nowhere"), code=2)
    assert "/nowhere" in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "says"), [("model.num_frames=5", "model.tubelet_size"), ("model.mask_rate=0.9", "mask_rate")]
)
def test_a_configuration_that_cannot_be_is_refused(tmp_path, synthetic_shards, override, says):
    with pytest.raises(InputError, match=says):
        parse(command(synthetic_shards, tmp_path / "run", override)[2:])


def test_a_run_that_diverges_ends_with_one_sentence(tmp_path, synthetic_shards):
    wild = ["optimizer.base_lr=1e30", "optimizer.warmup_epochs=0", "optimizer.warmup_lr=1e30"]
    said = run(command(synthetic_shards, tmp_path / "run", *wild, "steps=20"), code=2)
    last = said.splitlines()[-1]
    assert last.startswith("error: the run has diverged: the sampler's logits are not finite any more; take a lower")
    assert "Traceback" not in said


def test_a_run_that_cannot_learn_any_more_ends_with_one_sentence(tmp_path, synthetic_shards):
    said = run(command(synthetic_shards, tmp_path / "run", "model.sampling_loss_weight=1e38", "log_every=4"), code=2)
    last = said.splitlines()[-1]
    assert last.startswith("error: the run has diverged: not one gradient of steps 1 to 6 is finite; take a lower")
    assert [line["skipped_updates"] for line in logged(tmp_path / "run")] == [1.0, 1.0]


def test_shards_may_move_but_not_change(tmp_path, synthetic_shards):
    moved = Path(shutil.copytree(synthetic_shards, tmp_path / "moved"))
    run(command(synthetic_shards, tmp_path / "run", "steps=4", "checkpoint_every=2"))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    run(command(moved, tmp_path / "run", "steps=4"))
    assert weights(tmp_path / "run", 4)
    info = json.loads((moved / "dataset.json").read_text())
    info["classes"] = info["classes"][::-1]
    (moved / "dataset.json").write_text(json.dumps(info))
    assert "has learnt from other shards" in run(command(moved, tmp_path / "run", "steps=4"), code=2)


def test_shards_of_another_schema_version_are_refused(tmp_path, synthetic_shards):
    info = json.loads((synthetic_shards / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**info, "schema_version": 99}))
    assert "schema version 99" in run(command(tmp_path, tmp_path / "run"), code=2)
