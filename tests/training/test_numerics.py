"""Runs whose every bit is alike however often they were stopped."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from runs import is_same, load_weights
from tiny import TINY

from benchmarks.gpu import resume_check
from common.errors import InputError
from train import train
from training.config import TrainConfig, parse
from training.distributed import Distributed
from training.numerics import determinism_fingerprint, numerics


def config(*overrides: str) -> TrainConfig:
    return parse(["data.shards=s", *overrides])


def test_torch_is_deterministic_in_the_block_and_as_before_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
    keys = ("compile=true", "batch_size=2", "model.activation_checkpointing=true")
    ways = {determinism_fingerprint(config("deterministic=true", key), ranks) for key in (*keys, "seed=0")}
    assert len(ways) == 1 + len(keys)


def test_a_deterministic_run_resumes_bit_by_bit_and_only_as_it_began(tmp_path: Path, synthetic_shards: Path) -> None:
    arguments = [*TINY, "deterministic=true", f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}"]
    run = tmp_path / "run"
    train(parse(arguments))
    whole = load_weights(run)
    shutil.rmtree(run / "checkpoints/step-00000006")
    with pytest.raises(InputError, match=r"is deterministic and was computed on .*compile False.* on .*compile True"):
        train(parse([*arguments, "compile=true"]))
    with pytest.raises(InputError, match="deterministic: True -> False"):
        train(parse([*arguments, "deterministic=false"]))
    train(parse(arguments))
    assert is_same(load_weights(run), whole)


@pytest.mark.gpu
def test_killed_and_stopped_on_a_gpu_a_deterministic_run_ends_with_the_same_bits(
    tmp_path: Path, synthetic_shards: Path
) -> None:
    resume_check.main([str(synthetic_shards), "--steps", "12", "--output", str(tmp_path)])  # which requires it
