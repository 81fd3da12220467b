"""The doctor's report: everything is in it, and nothing that is broken ends it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import doctor
from common.errors import InputError

ROOT = Path(__file__).parents[2]
TINY = [
    "model.size=tiny", "model.num_frames=8", "model.image_size=32", "model.patch_size=8", "batch_size=2",
    "model.encoder_depth=1", "model.decoder_depth=1",
]  # fmt: skip


@pytest.fixture
def report(capsys, monkeypatch):
    """Runs the doctor and returns its exit status and lines."""
    monkeypatch.setattr("kernels.launch.triton_on_cpu", False)  # as outside of tests

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        is_intact = doctor.check_environment()
        status = doctor.main(doctor.parse_arguments([*arguments, *TINY, "--seconds", "0.05"])) or not is_intact
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < 30  # one page
        return status, {line[:14].lstrip("! ").strip(): line for line in lines}

    return run


def test_a_healthy_machine_and_its_shards(report, synthetic_shards):
    status, lines = report(str(synthetic_shards), "data.frame_stride=2")
    assert status == 0
    assert "16 videos, 256 frames, " in lines["content"]
    assert "B/s from disk" in lines["read"]
    assert "clips/s of 8×32×32, " in lines["PyAV decode"]
    assert lines["PyAV decode"].endswith(" decode workers, 1 per decoded video")
    assert "size tiny, mask ratio 0.95, batches of 2" in lines["speed"]
    assert "fastest decoding: data.decoder=pyav" in lines["verdict"]
    assert not any(line.startswith("!") for line in lines.values())


def test_without_shards_it_measures_the_step(report):
    status, lines = report()
    assert status == 0
    assert "clips/s" in lines["speed"]
    assert "content" not in lines


def test_broken_shards_and_optional_packages_are_a_line(report, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "nvidia.dali", SimpleNamespace())  # without a version
    status, lines = report(str(tmp_path / "nowhere"))
    assert status == 1
    assert lines["DALI"].startswith("! DALI          AttributeError: ")
    assert lines["content"].startswith("! ")
    assert "nowhere" in lines["content"]
    assert "speed" not in lines, "no step is timed beside a wrong path"


def test_a_broken_package_is_a_line_and_ends_the_report(tmp_path):
    (tmp_path / "av.py").write_text("raise OSError('libavcodec.so.62: cannot open shared object file')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "doctor.py"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert "! PyAV          OSError: libavcodec.so.62: cannot open shared object file\n" in done.stdout
    assert "training step" not in done.stdout


def test_gpus_that_cannot_be_used_are_a_line(report, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1 / 0)  # whatever an installation can raise
    status, lines = report()
    assert status == 1
    assert "! GPUs          ZeroDivisionError" in lines["GPUs"]


def compare(device: str, step_speed: float, *overrides: str) -> list[str]:
    speeds = {("pyav", 1): 60.0, ("pyav", 2): 90.0, ("dali", 1): 30.0}
    speeds |= {("auto", 1): 85.0} if device == "cuda" else {}
    config = doctor.parse_arguments([*overrides]).config
    run = doctor.PlannedRun(config, 1.0, torch.device(device), loader_speeds=speeds, step_speed=step_speed)
    return list(doctor.compare_speeds(run))


def test_the_verdict():
    assert compare("cpu", 100) == [
        "fastest decoding: data.decoder=pyav data.repeats=1, about 60 clips/s",
        "the loader reaches 0.60× the speed of the training step: data-bound, stalled about 40% of the time",
        "with data.repeats=2 it reaches 0.90×; more CPU cores help too",
    ]
    assert compare("cpu", 100, "data.repeats=4", "batch_size=8")[0].endswith("data.repeats=2, about 90 clips/s")
    assert compare("cuda", 30) == [
        "fastest decoding: data.dali_share=auto, about 85 clips/s",
        "the loader is 2.83× faster than the training step: not data-bound",
    ]
    assert compare("cuda", 100)[2].startswith("with data.repeats=2 it reaches 0.90×")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "--seconds is 0"),
        (["model.sise=tiny"], "did you mean model.size"),
        (["--secs", "1"], "there is no option --secs: did you mean --seconds"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        doctor.parse_arguments(arguments)
