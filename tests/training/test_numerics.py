"""Attention kernels by choice, and runs whose every bit is alike however often they were stopped."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.gpu import resume_check
from common.errors import InputError
from train import train
from training import checkpoint, numerics
from training.checkpoint import Contents, TrainState
from training.compiling import check_graphs
from training.config import TrainConfig, parse
from training.distributed import Distributed
from training.numerics import as_asked, attention_kernel, attention_order, described, deterministic, execution

CPU = torch.device("cpu")
TINY = [
    "model.size=tiny", "model.num_frames=4", "model.image_size=32", "model.patch_size=8", "model.mask_ratio=0.75",
    "data.frame_stride=2", "batch_size=4", "steps=4", "precision=fp32", "optimizer.warmup_epochs=0", "device=cpu",
    "log_every=1", "checkpoint_every=2", "data.num_threads=1", "evaluation.every=null", "deterministic=true",
]  # fmt: skip


def config(*overrides: str) -> TrainConfig:
    return parse(["data.shards=s", *overrides])


def test_the_kernel_asked_for_comes_first_and_others_take_what_it_does_not() -> None:
    assert attention_order("auto", False) == []
    assert attention_order("cudnn", False)[0] == "cudnn"
    assert set(attention_order("efficient", False)) == {"efficient", "flash", "math"}
    assert attention_order("auto", True)[0] == "flash"
    assert "cudnn" not in attention_order("math", True)


def test_what_does_nothing_or_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="attention=cudnn is not deterministic"):
        config("deterministic=true", "attention=cudnn")
    with pytest.raises(InputError, match=r"set data\.decoder=pyav"):
        config("deterministic=true", "data.decoder=dali")
    with pytest.raises(InputError, match="attention=flash chooses among a GPU's kernels"):
        as_asked(lambda _: None)(config("attention=flash", "device=cpu"))
    with pytest.raises(InputError, match="compile=reduce-overhead is for a GPU"):
        check_graphs("reduce-overhead", "cpu", 1)
    with pytest.raises(InputError, match="takes one forward pass a step, and batch_size makes 2"):
        check_graphs("reduce-overhead", "cuda", 2)
    check_graphs("reduce-overhead", "cuda", 1)
    check_graphs(True, "cpu", 2)
    assert config("deterministic=true").data.decoder == "pyav"
    assert config("compile=reduce-overhead").compile == "reduce-overhead"
    assert config("compile=true").compile is True


def test_torch_is_deterministic_in_the_block_and_as_before_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_the_kernel_that_is_taken_is_said() -> None:
    assert attention_kernel(4, 24, torch.float32, CPU) in numerics.KERNELS
    assert described(config(), CPU) == ""
    assert described(config("deterministic=true"), CPU) == "the same bits every time"


def test_a_deterministic_run_goes_on_only_as_it_was_executed(tmp_path: Path) -> None:
    process = Distributed(0, 1, CPU)
    assert execution(config(), process) == ""
    as_before = execution(config("deterministic=true"), process)
    others = [
        *("compile=true", "batch_size=2", "accumulate=2", "model.activation_checkpointing=true", "attention=math"),
    ]
    ways = {as_before, *(execution(config("deterministic=true", other), process) for other in others)}
    assert len(ways) == 1 + len(others)
    model = nn.Linear(2, 3)
    contents = Contents({"model": model}, torch.optim.AdamW(model.parameters()), {})
    place = TrainState(3, 16, "these", execution=as_before)
    checkpoint.save(tmp_path / "checkpoints", place, contents.state())
    assert checkpoint.load_newest(tmp_path / "checkpoints", contents, replace(place, step=0), 6) == place
    changed = replace(place, step=0, execution=execution(config("deterministic=true", "compile=true"), process))
    with pytest.raises(InputError, match=r"is deterministic and was computed on .*compile False.* on .*compile True"):
        checkpoint.load_newest(tmp_path / "checkpoints", contents, changed, 6)


def test_stopped_in_the_middle_a_deterministic_run_ends_with_the_same_weights(
    tmp_path: Path, synthetic_shards: Path
) -> None:
    arguments = [*TINY, f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}"]
    last = tmp_path / "run/checkpoints/step-00000004"
    train(parse(arguments))
    whole = load_file(last / "model.safetensors")
    shutil.rmtree(last)
    with pytest.raises(InputError, match=r"compile False.*compile True"):
        train(parse([*arguments, "compile=true"]))
    with pytest.raises(InputError, match="deterministic: True -> False"):
        train(parse([*arguments, "deterministic=false"]))
    train(parse(arguments))
    assert all(torch.equal(whole[name], value) for name, value in load_file(last / "model.safetensors").items())


@pytest.mark.gpu
def test_killed_and_stopped_on_a_gpu_a_deterministic_run_ends_with_the_same_bits(
    tmp_path: Path, synthetic_shards: Path
) -> None:
    resume_check.main([str(synthetic_shards), "--steps", "12", "--output", str(tmp_path)])  # which requires it
