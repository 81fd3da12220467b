"""The log of a run: means over steps, after a kill, on a full disk, and in Weights & Biases."""

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from processes import wait_for

from adamae.common.errors import run_command
from adamae.training.config import parse
from adamae.training.distributed import Distributed
from adamae.training.failures import DivergedError
from adamae.training.logger import SKIPPED, Logger, read_rows

COUNTERS = {"wait_seconds": 0.5, "batches_ready": 20.0, "clips": 40.0}


def make_logger(folder: Path, *overrides: str, start: int = 0) -> Logger:
    run: Any = SimpleNamespace(path=folder, metrics=folder / "metrics.jsonl")
    schedule: Any = SimpleNamespace(total_steps=100, global_batch=4, lr=lambda step: 0.1)
    loader: Any = SimpleNamespace(counters=COUNTERS)
    config = parse(["data.shards=s", "log_every=2", *overrides])
    return Logger(run, config, Distributed("cpu"), schedule, loader, start)


def scalars(loss: float, skipped: float = 0.0) -> dict[str, torch.Tensor]:
    return {"loss": torch.tensor(loss), SKIPPED: torch.tensor(skipped)}


def test_rows_hold_the_means_since_the_row_before(tmp_path: Path) -> None:
    with make_logger(tmp_path) as logger:
        for step, loss in enumerate((1.0, 3.0, 5.0), start=1):
            logger.step(step, scalars(loss))
        logger.flush(3)
        logger.flush(3)
        logger.write_scalars(3, {"evaluation/rankme": 7.0})
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row.get("loss")) for row in rows] == [(2, 2.0), (3, 5.0), (3, None)]
    assert rows[2]["evaluation/rankme"] == 7
    assert rows[0]["lr"] == 0.1
    assert [row["pipeline/clips"] for row in rows[:2]] == [40, 40]
    # The loader's counter has not grown since the row before.
    assert rows[0]["data_wait_fraction"] > 0
    assert rows[1]["data_wait_fraction"] == 0
    events = b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())
    for name in (b"train/loss", b"evaluation/rankme", b"pipeline/clips", b"log_every: 2"):
        assert name in events


def test_an_evaluation_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with make_logger(tmp_path) as logger:
        logger.write_evaluation(3, {"reconstruction_loss": 0.9, "num_videos": 63})
    assert "step 3: held-out loss 0.900, 63 videos\n" in capsys.readouterr().err


def test_of_several_ranks_the_one_whose_data_is_late_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with make_logger(tmp_path) as logger:
        # The means, the fraction of the time spent waiting and the host of each rank.
        ranks = [
            ({"loss": 3.0, SKIPPED: 0.0}, 0.01, "one"),
            ({"loss": 6.0, SKIPPED: 0.0}, 0.3, "two"),
            ({"loss": 3.0, SKIPPED: 0.0}, 0.02, "three"),
        ]
        monkeypatch.setattr(logger.dist, "gather", lambda own: ranks)
        for step in range(1, 17):
            logger.step(step, scalars(1.0))
            # Not in the first ten steps, in which ranks load and compile; then in the third row.
            is_named = "slows down" in capsys.readouterr().err
            assert is_named == (step == 16)
    # The mean over ranks.
    assert {row["loss"] for row in read_rows(tmp_path / "metrics.jsonl")} == {4.0}


def test_ranks_that_are_late_in_turn_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with make_logger(tmp_path) as logger:
        late, early = ({"loss": 3.0, SKIPPED: 0.0}, 0.3), ({"loss": 3.0, SKIPPED: 0.0}, 0.01)
        for step in range(1, 31):
            # Two rows each, then the other one.
            order = [late, early] if step % 8 < 4 else [early, late]
            ranks = [(*values, "host") for values in order]
            monkeypatch.setattr(logger.dist, "gather", lambda own, ranks=ranks: ranks)
            logger.step(step, scalars(1.0))
    assert "slows down" not in capsys.readouterr().err


def test_steps_that_change_nothing_for_long_end_the_run(tmp_path: Path) -> None:
    with make_logger(tmp_path) as logger:
        for step in range(1, 12):
            logger.step(step, scalars(1.0, skipped=float(step > 2)))
        with pytest.raises(DivergedError, match="no gradient of steps 3 to 12 is finite"):
            logger.step(12, scalars(1.0, skipped=1.0))


@pytest.mark.parametrize(
    "foreign", [b"\xff\xfe\n", b"[1]\n", b'{"step": "2"}\n', b"[" * 10**5 + b"\n"]
)
def test_rows_after_the_last_checkpoint_are_dropped(tmp_path: Path, foreign: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(
        b'{"step": 1, "loss": NaN}\n' + foreign + b'{"step": 2}\n{"step": 3}\n{"step": 4, "lo'
    )
    with make_logger(tmp_path, start=2):
        pass
    assert file.read_bytes() == b'{"step": 1, "loss": NaN}\n{"step": 2}\n'


def test_a_full_disk_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        with make_logger(tmp_path, "log_every=1") as logger:
            for step in range(1, 200):
                logger.step(step, scalars(1.0))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))
    try:
        with pytest.raises(SystemExit) as ended:
            run_command(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.value.code == 74
    printed = capfd.readouterr().err
    assert printed.splitlines()[-1] == f"error: cannot use {tmp_path}: {os.strerror(errno.EFBIG)}"
    assert "Traceback" not in printed, "TensorBoard's writer has a thread of its own"


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with make_logger(tmp_path, "wandb=true") as logger:
        logger.write_scalars(1, {"loss": 0.5})
    wandb.tensorboard.unpatch()
    (file,) = tmp_path.rglob("*.wandb")
    # The service of wandb is a process of its own, which writes when it has the time.
    assert wait_for(lambda: b"train/loss" in file.read_bytes(), 240)
