"""The first hour on a GPU, rehearsed: a stage that fails or takes too long ends in a sentence, and the next goes on."""

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import harness, on_gpu
from benchmarks.gpu import probe
from benchmarks.on_gpu import STAGES, list_commands, run_stage
from benchmarks.pipeline_throughput import parse_arguments
from common.errors import InputError


def of(*programs: str) -> list[list[str]]:
    return [["-c", program] for program in programs]


def test_a_stage_goes_on_after_a_failure_and_says_the_first(tmp_path: Path) -> None:
    """Its commands do not need each other, or say at once what they miss."""
    log = tmp_path / "stage.log"
    failing = of("print('first')", *(f"import sys; sys.exit('error: the {n} one')" for n in ("second", "third")))
    assert run_stage(failing, log, 60) == "`-c` failed with exit code 1: error: the second one"
    assert [word in log.read_text().splitlines() for word in ("first", "error: the third one")] == [True, True]
    assert run_stage(of("print('fine')"), log, 60) == "done"


def test_a_stage_that_takes_too_long_is_given_up_with_all_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "GRACE_SECONDS", 0.5)
    alive = tmp_path / "alive"
    child = f"import time\nwhile True: open({str(alive)!r}, 'a').write('x'); time.sleep(0.05)"
    parent = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(60)"
    )
    started = time.monotonic()
    assert run_stage(of(parent, "print('never')"), tmp_path / "log", 1) == "given up after 1 s in `-c`"
    assert time.monotonic() - started < 10
    size = alive.stat().st_size if alive.exists() else 0
    time.sleep(0.3)
    assert size == (alive.stat().st_size if alive.exists() else 0), "its child lives on"


def test_goals_stand_beside_figures_and_what_is_missing_is_said(tmp_path: Path) -> None:
    def rows(name: str, found: list[dict]) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": found}))

    point = {"masking": "adaptive", "mask_ratio": 0.95, "activation_checkpointing": False}
    rows("memory_vs_ratio", [{**point, "measured_peak_gib": 3.4}, {**point, "mask_ratio": 0.9}])
    race = {"implementation": "ours, compiled", "masking": "adaptive"}
    rows("train_throughput", [{**race, "speed_up": 3.5, "mfu": 0.5}, {**race, "masking": "random", "speed_up": 9}])
    kernel = {"op": "patchify", "implementation": "ours", "is_large": True, "phase": "forward"}
    left_out = [{**kernel, **other, "fraction_of_copy": 0.1} for other in ({"is_large": False}, {"op": "crop_resize"})]
    rows("kernel_speed", [{**kernel, "fraction_of_copy": 0.9}, *left_out])
    found = {row["what"]: row for row in on_gpu.rate_goals(tmp_path)}
    assert found["GiB, batch 16, eager"] == {
        "what": "GiB, batch 16, eager", "goal": "≤ 3.6", "figure": 3.4, "met": "yes",
    }  # fmt: skip
    assert found["GiB, batch 16, compiled"]["met"] == "not measured", "the row has no such figure"
    assert (found["times the published step"]["figure"], found["times the published step"]["met"]) == (3.5, "no")
    assert found["MFU, compiled"]["met"] == "yes"
    assert found["slowest Triton kernel of the token path, fraction of copy bandwidth"]["figure"] == 0.9
    assert found["speed relative to a cached batch"]["met"] == "not measured", "there is no such file"


def test_every_stage_names_programs_and_options_that_are_there(tmp_path: Path) -> None:
    for small in (True, False):
        for stage in STAGES.values():
            for command in list_commands(stage, tmp_path, tmp_path / "videos", small):
                if command[0] != "-m":
                    assert (on_gpu.ROOT / command[0]).is_file()
                    assert hasattr(import_module(command[0].removesuffix(".py").replace("/", ".")), "main")
    settings = list_commands(STAGES["settings"], tmp_path / "a b", tmp_path, small=True)
    assert [command[:4] for command in settings] == [
        ["benchmarks/pipeline_throughput.py", str(tmp_path), "--work", str(tmp_path / "a b/scratch")]
    ], "videos that are there are not generated"
    assert parse_arguments(settings[0][1:]).prefetch == [2]


def test_a_rehearsal_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands themselves, in this process: to start one takes longer than what it does."""

    def here(command: list[str], log: object, seconds: float) -> int:
        monkeypatch.setattr(sys, "argv", command)
        import_module(command[0].removesuffix(".py").replace("/", ".")).main(command[1:])
        return 0

    monkeypatch.setattr(on_gpu, "run", here)
    monkeypatch.setattr(harness, "COPY_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(probe, "matmul_tflops", lambda device, precision: 1.0)
    assert on_gpu.main(["kernels", "probe", "--small", "--output", str(tmp_path)]) == 0
    probed = {row["what"]: row["figure"] for row in json.loads((tmp_path / "gpu_probe.json").read_text())["rows"]}
    assert probed["copy on the device"] > 0
    goals = (tmp_path / "goals.json").read_text()
    assert '"stage probe": "done"' in goals
    assert goals.index("stage probe") < goals.index("stage kernels"), "in the stages' own order"


def test_bad_arguments_are_one_sentence(tmp_path: Path) -> None:
    for arguments in (["nowhere", "--small"], ["--small", "--videos", "/nowhere"], ["probe"]):
        with pytest.raises(InputError):
            on_gpu.parse([*arguments, "--output", str(tmp_path)])


ON_THE_MACHINE = r"""
import re, sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def close(names):
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            waiting += [re.match(r"[\w.-]+", line)[0] for line in needed if "extra ==" not in line]
    return found

class Installed:
    def __init__(self, finder):
        self.finder = finder

    def find_distributions(self, *context):
        found = getattr(self.finder, "find_distributions", lambda *_: ())(*context)
        return [one for one in found if one.name.lower().replace("_", "-") in there]

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else self.finder.find_spec(name, path, target)

there = close(sys.argv[1].split()) | {"adamae"}  # installed or not, and without what it needs
missing = {
    module for module, names in packages_distributions().items()
    if not there & {name.lower().replace("_", "-") for name in names}
}
sys.meta_path[:] = map(Installed, sys.meta_path)
sys.argv = sys.argv[2:]
for module in sys.argv[0].split():
    main = import_module(module).main
if len(sys.argv) > 1:
    main(sys.argv[1:])
"""
LENT = "torch torchvision timm einops tensorboard transformers triton pytest"  # what a lent machine has


def run_on_the_machine(packages: str, *arguments: object) -> None:
    """Import modules, and run the last one with arguments if there are any, where just these packages are."""
    command = [sys.executable, "-c", ON_THE_MACHINE, packages, *map(str, arguments)]
    done = subprocess.run(command, cwd=on_gpu.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def find_module(command: list[str]) -> str:
    return command[0].removesuffix(".py").replace("/", ".")


@pytest.mark.slow  # a process each, which measures the rate of products
@pytest.mark.parametrize("stage", [name for name, stage in STAGES.items() if stage.get("plain")])
def test_a_plain_stage_needs_no_other_packages(stage: str, tmp_path: Path) -> None:
    (command,) = list_commands(STAGES[stage], tmp_path, tmp_path, small=True)
    run_on_the_machine(LENT, find_module(command), *command[1:])


@pytest.mark.slow  # imports everything in a fresh process
def test_the_other_stages_need_the_packages_that_are_named(tmp_path: Path) -> None:
    commands = [command for stage in STAGES.values() for command in list_commands(stage, tmp_path, tmp_path, True)]
    modules = {find_module(command): None for command in commands if command[0] != "-m"}
    run_on_the_machine(" ".join([LENT, *on_gpu.PACKAGES]), " ".join(modules))


def test_a_stage_says_which_packages_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "find_version", lambda name: None if name in ("av", "msgspec") else "1")
    assert on_gpu.main(["memory", "--small", "--output", str(tmp_path)]) == 1
    assert "left out, for lack of packages: pip install av msgspec" in (tmp_path / "goals.json").read_text()


def test_make_takes_a_preinstalled_pytorch_and_installs_nothing() -> None:
    said = subprocess.run(
        ["make", "--dry-run", "bench-gpu", "GPU_PYTHON=python3", "STAGES=probe"],
        cwd=on_gpu.ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "python3 -m benchmarks.on_gpu probe --output" in " ".join(said.replace("\\", "").split())
    assert ".venv" not in said
