"""The doctor's report: everything is in it, and nothing that is broken ends it."""

import sys

import pytest
import torch

import doctor
from common.errors import InputError

TINY = [
    "model.size=tiny", "model.num_frames=8", "model.image_size=32", "model.patch_size=8", "batch_size=2",
    "model.encoder_depth=1",
    "model.decoder_depth=1",
]  # fmt: skip


@pytest.fixture
def report(capsys, monkeypatch):
    """Runs the doctor and returns its exit status and lines."""
    monkeypatch.setattr("kernels.launch.triton_on_cpu", False)  # as outside of tests

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        status = doctor.main([*arguments, "--seconds", "0.05"])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < 30  # one page
        return status, {line[:14].lstrip("! ").strip(): line for line in lines}

    return run


def test_a_healthy_machine_and_its_shards(report, synthetic_shards):
    status, lines = report(str(synthetic_shards), "data.frame_stride=2", *TINY)
    assert status == 0
    assert "16 videos, 256 frames, " in lines["content"]
    assert "B/s from disk" in lines["read"]
    assert "clips/s of 8 × 32×32" in lines["PyAV decode"]
    assert "1 per decoded video" in lines["PyAV decode"]
    assert "size tiny, mask ratio 0.95, batches of 2" in lines["speed"]
    assert "fastest decoding: data.decoder=pyav" in lines["verdict"]
    assert not any(line.startswith("!") for line in lines.values())


def test_without_shards_it_says_what_a_step_takes(report):
    status, lines = report(*TINY)
    assert status == 0
    assert "clips/s" in lines["speed"]
    assert "content" not in lines


def test_what_is_broken_is_a_line(report, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "av", None)  # as if it were not installed
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1 / 0)  # whatever an installation can raise
    status, lines = report(str(tmp_path / "nowhere"), *TINY)
    assert status == 1
    assert lines["PyAV"].startswith("! ")
    assert "ZeroDivisionError" in lines["GPUs"]
    assert "nowhere" in lines["content"]
    assert lines["content"].startswith("! ")


def test_a_key_that_does_not_exist_is_a_line_too(report):
    status, lines = report("model.sise=tiny")
    assert status == 1
    assert "did you mean model.size" in lines["speed"]


def compare(device: str, step_speed: float, *overrides: str) -> list[str]:
    run = doctor.PlannedRun(["x", *overrides])
    run.device = torch.device(device)
    run.loader_speeds = {("pyav", 1): 60.0, ("pyav", 2): 90.0, ("dali", 1): 30.0}
    run.step_speed = step_speed
    return list(doctor.compare_speeds(run))


def test_the_verdict():
    assert compare("cpu", 100) == [
        "fastest decoding: data.decoder=pyav data.repeats=1, about 60 clips/s",
        "the loader reaches 0.60× the speed of the training step: data-bound, stalled about 40% of the time",
        "with data.repeats=2 it reaches 0.90×; more CPU cores help too",
    ]
    assert compare("cpu", 100, "data.repeats=4", "batch_size=8")[0].endswith("data.repeats=2, about 90 clips/s")
    assert compare("cuda", 30) == [
        "fastest decoding: data.dali_share=0.33, about 90 clips/s",
        "the loader is 3× faster than the training step: not data-bound",
    ]
    assert compare("cuda", 100)[2].startswith("with data.repeats=2 it reaches 1.20×")


def test_senseless_seconds():
    with pytest.raises(InputError, match="--seconds is 0"):
        doctor.main(["--seconds", "0"])
