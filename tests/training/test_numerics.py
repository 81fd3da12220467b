"""Deterministic runs: the same bits however often they were stopped."""

import os
import shutil
import signal
import sys
from pathlib import Path

import forked
import pytest
import torch
from processes import wait_for
from runs import is_same, load_weights, read_rows
from tiny import TINY

from adamae.common.errors import InputError
from adamae.train import train
from adamae.training.config import TrainConfig, parse
from adamae.training.distributed import Distributed
from adamae.training.numerics import determinism_fingerprint, numerics


def config(*overrides: str) -> TrainConfig:
    return parse(["data.shards=s", *overrides])


def test_torch_is_deterministic_in_the_block_and_as_before_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with numerics(config("deterministic=true")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_the_fingerprint_tells_apart_what_decides_about_the_last_bits() -> None:
    ranks = Distributed("cpu")
    assert determinism_fingerprint(config(), ranks) == ""
    fingerprints = set()
    for change in ("compile=true", "batch_size=2", "model.activation_checkpointing=true", "seed=0"):
        fingerprints.add(determinism_fingerprint(config("deterministic=true", change), ranks))
    assert len(fingerprints) == 4


def test_a_deterministic_run_resumes_bit_by_bit_and_only_as_it_began(
    tmp_path: Path, arguments: list[str]
) -> None:
    arguments = [*arguments, "deterministic=true"]
    run = tmp_path / "run"
    train(parse(arguments))
    whole = load_weights(run)
    shutil.rmtree(run / "checkpoints/step-00000006")
    message = r"is deterministic and was computed on .*compile False.* on .*compile True"
    with pytest.raises(InputError, match=message):
        train(parse([*arguments, "compile=true"]))
    with pytest.raises(InputError, match="deterministic: True -> False"):
        train(parse([*arguments, "deterministic=false"]))
    train(parse(arguments))
    assert is_same(load_weights(run), whole)


@pytest.fixture(scope="module")
def run_on_gpu(
    tmp_path_factory: pytest.TempPathFactory, synthetic_shards: Path
) -> tuple[list[object], Path]:
    """Train deterministically to the end; return the command without run=, and the run."""
    run = tmp_path_factory.mktemp("gpu") / "run"
    settings = [
        "device=cuda",
        "precision=bf16",
        "deterministic=true",
        "model.image_size=64",
        "steps=60",
    ]
    command = [sys.executable, "train.py", *TINY, *settings, f"data.shards={synthetic_shards}"]
    done = forked.run([*command, f"run={run}"])
    assert done.returncode == 0, done.stderr
    return command, run


@pytest.mark.gpu
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_on_a_gpu_and_started_again_a_run_has_the_same_bits(
    number: signal.Signals, run_on_gpu: tuple[list[object], Path], tmp_path: Path
) -> None:
    command, whole = run_on_gpu
    run = tmp_path / "run"
    log = tmp_path / "log"
    process = forked.start([*command, f"run={run}"], log, log)
    assert wait_for(lambda: len(read_rows(run)) >= 20, 240), log.read_text()
    os.kill(process.pid or 0, number)
    forked.wait(process, 240)
    assert not (run / "checkpoints/step-00000060").exists(), "too late to prove anything"
    assert forked.run([*command, f"run={run}"]).returncode == 0
    assert is_same(load_weights(run, 60), load_weights(whole, 60))
