"""The doctor's page: everything is on it, and nothing that is broken ends it."""

import sys

import pytest

import doctor
from common.errors import InputError

TINY = [
    "model.size=tiny", "model.num_frames=8", "model.image_size=32", "model.patch_size=8", "batch_size=2",
    "model.encoder_depth=1",
    "model.decoder_depth=1",
]  # fmt: skip


@pytest.fixture
def page(capsys, monkeypatch):
    """Runs the doctor and gives its exit status and lines."""
    monkeypatch.setattr("kernels.launch.triton_on_cpu", False)  # as outside of tests

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        status = doctor.main([*arguments, "--seconds", "0.05"])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < 30  # one page
        return status, {line[:14].lstrip("! ").strip(): line for line in lines}

    return run


def test_a_healthy_machine_and_its_shards(page, synthetic_shards):
    status, lines = page(str(synthetic_shards), "data.frame_stride=2", *TINY)
    assert status == 0
    assert "16 videos, 256 frames, " in lines["content"]
    assert "B/s from the disk" in lines["read"]
    assert "clips/s of 8 × 32×32" in lines["by PyAV"]
    assert "clips/s: tiny, 95% hidden, batches of 2" in lines["takes"]
    assert "× what a step takes (pyav)" in lines["so"]
    assert not any(line.startswith("!") for line in lines.values())


def test_without_shards_it_says_what_a_step_takes(page):
    status, lines = page(*TINY)
    assert status == 0
    assert "clips/s" in lines["takes"]
    assert "content" not in lines


def test_what_is_broken_is_a_line(page, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "av", None)  # as if it were not installed
    monkeypatch.setattr("doctor.version", lambda name: 1 / 0)  # whatever an installation can raise
    status, lines = page(str(tmp_path / "nowhere"), *TINY)
    assert status == 1
    assert lines["PyAV"].startswith("! ")
    assert "ZeroDivisionError" in lines["Triton"]
    assert "nowhere" in lines["content"]
    assert lines["content"].startswith("! ")
    assert "clips/s" in lines["takes"]


def test_a_key_that_does_not_exist_is_a_line_too(page):
    status, lines = page("model.sice=tiny")
    assert status == 1
    assert "did you mean model.size" in lines["takes"]


def test_a_loader_that_is_too_slow_is_said_to_be(page):
    trial = doctor.Trial(doctor.parse(["x"]))
    trial.made, trial.taken = {"pyav": 2.0, "dali": 5.0}, 10.0
    assert "wait for data about 50% of the time" in trial.verdict()
    trial.taken = 1.0
    assert "will not wait" in trial.verdict()


def test_senseless_seconds():
    with pytest.raises(InputError, match="--seconds is 0"):
        doctor.parse(["--seconds", "0"])
