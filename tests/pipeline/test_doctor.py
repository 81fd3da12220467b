"""The doctor's report: everything is in it, and nothing that is broken ends it."""

import os
import re
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
        assert len(lines) < 45  # one page
        return status, {line[:14].lstrip("! ").strip(): line for line in lines} | {"all": lines}

    return run


def test_a_healthy_machine_and_its_shards(report, synthetic_shards):
    status, lines = report(str(synthetic_shards), "data.frame_stride=2")
    assert status == 0
    assert "16 videos, 256 frames, " in lines["content"]
    assert "B/s from disk" in lines["read"]
    assert "clips/s of 8×32×32, " in lines["PyAV decode"]
    assert lines["PyAV decode"].endswith(" decode workers, 1 per decoded video")
    assert lines["DALI decode"].endswith("  needs a GPU")
    assert "size tiny, mask ratio 0.95, batches of 2" in lines["speed"]
    assert "2 clips" in lines["memory"]
    assert "predicted for a GPU" in lines["memory"]
    assert "here: 6,400 steps of 2 clips, " in lines["duration"]  # 800 epochs of 16 videos
    assert "data-bound" in lines["verdict"]
    assert not any(line.startswith("!") for line in lines["all"])


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


def test_short_videos_and_lengths_are_told(report, synthetic_shards):
    _, lines = report(str(synthetic_shards), "data.frame_stride=6", "steps=3")
    assert "3 steps of 2 clips" in lines["duration"]
    text = "\n".join(lines["all"])
    assert "WARNING: 16 of 16 videos are shorter than a clip" in text
    assert "set data.frame_stride=4 or lower" in text
    assert "is the median length of a video" in text


def compare(device: str, step_speed: float, *overrides: str) -> list[str]:
    speeds = {("pyav", 1): 60.0, ("pyav", 2): 90.0, ("dali", 1): 30.0}
    speeds |= {("auto", 1): 85.0} if device == "cuda" else {}
    config = doctor.parse_arguments(["data.num_workers=1", *overrides]).config
    dist = SimpleNamespace(device=torch.device(device))
    run = doctor.PlannedRun(config, 1.0, dist, loader_speeds=speeds, step_speed=step_speed)
    return list(doctor.compare_speeds(run))


def test_the_verdict(monkeypatch):
    made = "the loader makes 60 with data.repeats=1, 90 with data.repeats=2, 30 with data.decoder=dali"
    assert compare("cpu", 100) == [
        f"data-bound, stalled about 40% of the time: the training step takes 100 clips/s, {made}",
        "data.repeats=2 reaches 0.90× the speed of the step; more CPU cores help too",
    ]
    assert compare("cpu", 30) == [f"not data-bound: the training step takes 30 clips/s, {made}"]
    assert compare("cpu", 80, "data.repeats=4", "batch_size=8")[0].startswith("not data-bound")
    assert compare("cpu", 60, "data.decoder=dali")[0].startswith("data-bound, stalled about 50% of the time")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    assert "85 with data.dali_share=auto" in compare("cuda", 300)[0]
    assert compare("cuda", 80, "data.dali_share=auto")[0].startswith("data-bound, stalled about 0%")
    said = "CPU cores per GPU that load as fast as a step: 5 with data.repeats=1, 4 with data.repeats=2; there are 8"
    assert said in compare("cuda", 300)[-1]


@pytest.mark.slow
def test_several_ranks_time_their_network_and_name_the_slowest():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "doctor.py"]
    arguments = [*torchrun, *TINY, "--seconds", "0.05", "global_batch=6", "steps=5"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("environment\n") == 1, "one rank reports"
    assert re.search(r"all-reduce of the gradients \(.*\) over 2 ranks by gloo: .* ms, .*/s per rank", done.stdout)
    assert "interface to the first node: lo (127.0.0.1); GLOO_SOCKET_IFNAME is not set" in done.stdout
    assert re.search(r"slowest       rank [01] on \S+: \S+ ms per forward pass, the median is ", done.stdout)
    assert "5 steps of 6 clips" in done.stdout


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
