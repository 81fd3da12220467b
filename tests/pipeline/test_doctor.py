"""The doctor's report: everything is in it, and nothing that is broken ends it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adamae import doctor
from adamae.common.errors import InputError

ROOT = Path(__file__).parents[2]
TINY = [
    "model.size=tiny",
    "model.num_frames=8",
    "model.image_size=32",
    "model.patch_size=8",
    "batch_size=2",
    "model.encoder_depth=1",
    "model.decoder_depth=1",
]
VIEWS = ["model.views=2", "data.repeats=2", "model.masking=random"]


Report = Callable[..., tuple[int, dict[str, str]]]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Report:
    """Return a function that runs the doctor and returns its exit status and its lines by name.

    All lines together are under the name "all".
    """
    # As outside of tests.
    monkeypatch.setattr("adamae.kernels.launch.triton_on_cpu", False)

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        is_intact = doctor.check_environment()
        # Shards come first, and later overrides win.
        words = [*arguments[:1], *TINY, *arguments[1:]]
        options = doctor.parse_arguments([*words, "--seconds", "0.05"])
        status = doctor.main(options) or not is_intact
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < 45, "a report is a page"
        by_name = {line[:14].lstrip("! ").strip(): line for line in lines}
        by_name["all"] = "\n".join(lines)
        return status, by_name

    return run


def test_a_healthy_machine_and_its_shards(report: Report, synthetic_shards: Path) -> None:
    """Its videos are shorter than a clip, which is a warning and no error."""
    status, lines = report(str(synthetic_shards), "data.frame_stride=6", "data.repeats=2")
    assert status == 0
    assert "16 videos, 256 frames, " in lines["dataset"]
    assert "WARNING: 16 of 16 videos are shorter than a clip" in lines["all"]
    assert "set data.frame_stride=4 or lower" in lines["all"]
    assert re.search(
        r" clips/s of 8×32×32 with this configuration, \d+ decode workers?, \d+% reading$",
        lines["loading"],
    )
    assert re.search(r" clips/s of 8×32×32 with data.repeats=1, ", lines["all"])
    assert "size tiny, mask ratio 0.95, batches of 2" in lines["step"]
    assert "2 clips" in lines["memory"]
    assert "predicted for a GPU" in lines["memory"]
    # 800 epochs of 16 videos, each read twice.
    assert "here: 12,800 steps of 2 clips, " in lines["duration"]
    assert "data-bound" in lines["verdict"]
    assert "\n!" not in lines["all"]


def test_views_are_loaded_and_timed_as_many_as_there_are(
    report: Report, synthetic_shards: Path
) -> None:
    apart = ["data.frame_stride=2", "data.views_apart_s=1", "batch_size=4"]
    status, lines = report(str(synthetic_shards), *VIEWS, *apart)
    assert status == 0, lines["all"]
    assert "with this configuration" in lines["loading"]
    assert "data.repeats=1" not in lines["all"], "no other number of clips makes these views"
    assert "a step compares 2 views of each of 2 videos" in lines["all"]


def test_without_shards_it_measures_the_step(report: Report) -> None:
    status, lines = report("steps=3")
    assert status == 0
    assert "clips/s" in lines["step"]
    assert "3 steps of 2 clips" in lines["duration"]
    assert "loading" not in lines


def test_what_is_broken_is_a_line(
    report: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A module without a version.
    monkeypatch.setitem(sys.modules, "nvidia.dali", SimpleNamespace())
    status, lines = report(str(tmp_path / "nowhere"))
    assert status == 1
    assert lines["DALI"].startswith("! DALI          AttributeError: ")
    assert lines["dataset"].startswith("! ")
    assert "nowhere" in lines["dataset"]
    assert "step" not in lines, "no step is timed beside a wrong path"
    # An installation may raise anything.
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1 / 0)
    status, lines = report()
    assert status == 1
    assert "! GPUs          ZeroDivisionError" in lines["GPUs"]


def test_a_broken_package_is_a_line_and_ends_the_report(tmp_path: Path) -> None:
    (tmp_path / "av.py").write_text(
        "raise OSError('libavcodec.so.62: cannot open shared object file')"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "doctor.py"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        "! PyAV          OSError: libavcodec.so.62: cannot open shared object file\n" in done.stdout
    )
    assert "step" not in done.stdout


def compare(device: str, step_speed: float, missing: str = "") -> list[str]:
    """Return the verdict of a run whose loader makes 60 clips/s as configured.

    The way `missing` is not available.
    """
    speeds = {doctor.CONFIGURED: 60.0, "data.repeats=2": 90.0}
    speeds.pop(missing, None)
    if device == "cuda":
        speeds["data.decoder=dali"] = 30.0
    config = doctor.parse_arguments(["data.num_workers=1"]).config
    dist = SimpleNamespace(device=torch.device(device))
    run = doctor.PlannedRun(
        config, "shards", 1.0, dist, loader_speeds=speeds, step_speed=step_speed
    )
    lines: list[str] = []
    doctor.compare_speeds(run, lines.append)
    return lines


def test_a_way_that_is_not_available_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    cores = compare("cuda", 100, missing="data.repeats=2")[-1]
    assert "with this configuration;" in cores
    assert "data.repeats=2" not in cores


def test_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = "the loader makes 60 with this configuration, 90 with data.repeats=2"
    assert compare("cpu", 100) == [
        "data-bound, stalled about 40% of the time: the training step takes 100 clips/s, "
        f"{loader}; more CPU cores help too",
    ]
    assert compare("cpu", 30) == [f"not data-bound: the training step takes 30 clips/s, {loader}"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    cores = (
        "CPU cores per GPU that load as fast as a step: 5 with this configuration,"
        " 4 with data.repeats=2; there are 8"
    )
    assert cores in compare("cuda", 300)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["global_batch=6"], ["global_batch=8", *VIEWS]])
def test_several_ranks_time_their_network_and_name_the_slowest(overrides: list[str]) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "doctor.py",
    ]
    arguments = [*torchrun, *TINY, "--seconds", "0.05", "batch_size=4", "steps=5", *overrides]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  machine ") == 1, "one rank reports"
    assert re.search(
        r"all-reduce of the gradients \(.*\) over 2 ranks by gloo: .* ms, .*/s per rank",
        done.stdout,
    )
    assert re.search(
        r"slowest       rank [01] on \S+ trains \S+ clips/s, the median is ", done.stdout
    )
    assert f"5 steps of {overrides[0].removeprefix('global_batch=')} clips" in done.stdout


def test_a_duration_that_is_none() -> None:
    with pytest.raises(InputError, match="--seconds is 0"):
        doctor.parse_arguments(["--seconds", "0"])
