"""Training on a GPU that is not there: nothing of its numbers is true, but what is called is."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpu
import pytest
from runs import read_rows
from tiny import TINY, write_random_teacher

from adamae.model.registry import MASKS, TARGETS
from adamae.training.config import parse

FIRST, LAST = 13, 16  # steps that are counted: DDP measures, and waits, in its first ten
SETTINGS = [
    *TINY,
    "device=cuda",
    "precision=bf16",
    "steps=17",
    "log_every=100",
    "checkpoint_every=100",
]
SETTINGS += ["data.decoder=pyav"]  # DALI does not run there


def count_steps(
    library: Path, runs: list[list[str]], gpus: int = 1, last: int = LAST, **gpu_is: Any
) -> list[Any]:
    """Train with each list of arguments; return what the counted steps called."""
    with TemporaryDirectory() as output:
        arguments = [output, FIRST, last, json.dumps(runs)]
        done = gpu.run(library, "tests/fake_cuda/count_steps.py", arguments, gpus, **gpu_is)
        assert done.returncode == 0, done.stderr
        found = [
            json.loads(line)
            for path in Path(output).iterdir()
            for line in path.read_text().splitlines()
        ]
    assert "attention by FLASH_ATTENTION" in done.stderr
    for run in found:
        assert run["ended"]
        assert [what for what in run["calls"] if what.startswith("context")] == [
            f"context on {run['rank']}"
        ]
        wrong = {
            what: number
            for what, number in run["calls"].items()
            if what.startswith(("WAIT", "ILLEGAL"))
        }
        assert not wrong, done.stderr
    assert len(found) == gpus * len(runs)
    return found


def test_a_step_waits_for_nothing_and_uploads_what_clips_show(
    library: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    """The next batch is uploaded during a step, as soon as it is ready."""
    arguments = [
        *SETTINGS,
        f"data.shards={synthetic_shards}",
        f"run={tmp_path / 'run'}",
        "steps=21",
    ]
    (found,) = count_steps(library, [arguments], last=20)
    calls, steps = found["calls"], 20 - FIRST + 1
    assert calls["launches"] <= 378 * steps  # with torch 2.11; 361 with 2.15
    assert abs(calls["LAUNCH crop_resize_kernel"] - steps) <= 1
    # Frames of one chunk, tables, labels and positions; those of a batch may fall into a step beside the counted ones.
    assert abs(calls["COPY pinned to device"] - 4 * steps) <= 4
    whole_frames = 4 * 4 * 64 * 64 * 3 // 2  # bytes of a step: 4 clips of 4 frames in yuv420p
    assert 0.3 * whole_frames < calls["BYTES pinned to device"] / steps < 0.9 * whole_frames, (
        "the crops alone"
    )


@pytest.mark.slow  # ten runs
def test_every_masking_strategy_and_target_ends(
    library: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    """And gray clips, which the references make instead of Triton."""
    changes = [[f"model.masking={masking}"] for masking in MASKS]
    for target in TARGETS:
        config = parse([*SETTINGS, "data.shards=s"]).model
        teacher = (
            [f"model.teacher={write_random_teacher(config, tmp_path)}"]
            if target == "teacher"
            else []
        )
        changes.append([f"model.target={target}", *teacher])
    changes.append(["model.in_channels=1"])
    common = [*SETTINGS, f"data.shards={synthetic_shards}", "model.mask_ratio=0.5"]
    runs = [
        [*common, *change, f"run={tmp_path / str(number)}"] for number, change in enumerate(changes)
    ]
    count_steps(library, runs)


@pytest.mark.slow  # torchrun and two ranks start
@pytest.mark.parametrize("change", ["model.masking=adaptive", "model.masking=tube"])
def test_ranks_have_a_gpu_each(
    change: str, library: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    arguments = [*SETTINGS, f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}", change]
    count_steps(library, [[*arguments, "model.mask_ratio=0.5"]], gpus=2)


@pytest.mark.timeout(1000)
@pytest.mark.slow  # torch.compile
@pytest.mark.parametrize(
    ("how", "launches", "graphs"), [("true", 288, 0), ("reduce-overhead", 60, 2)]
)
def test_a_compiled_step_launches_less(
    how: str, launches: int, graphs: int, library: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    """One graph forward and one backward: a break, or a copy of what a kernel writes, would be a launch more."""
    arguments = [
        *SETTINGS,
        f"data.shards={synthetic_shards}",
        f"run={tmp_path / 'run'}",
        f"compile={how}",
    ]
    (found,) = count_steps(library, [arguments], seconds=900)
    steps = LAST - FIRST + 1
    assert 0 < found["calls"]["launches"] <= launches * steps
    assert found["calls"].get("graph launches", 0) == graphs * steps
    if not graphs:
        assert found["calls"]["LAUNCH loss_kernel"] == 2 * steps


KERNEL_US = 3000  # a step of 400 kernels is 1.2 s, and the loader's work is milliseconds


@pytest.mark.slow  # seconds on the clock of a slow GPU
def test_the_loader_keeps_up_with_a_step_of_a_stated_speed(
    library: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    """The host queues the step, the loader works beside it, and nothing but the GPU takes time."""
    arguments = [
        *SETTINGS,
        f"data.shards={synthetic_shards}",
        f"run={tmp_path / 'run'}",
        "log_every=4",
    ]
    (found,) = count_steps(library, [arguments], FAKE_US=KERNEL_US)
    (row,) = (row for row in read_rows(tmp_path / "run") if row["step"] == LAST)  # of the last four
    expected = found["calls"]["launches"] / (LAST - FIRST + 1) * KERNEL_US * 1e-6
    assert 4 / row["clips_per_second"] == pytest.approx(expected, rel=0.1)
    assert row["data_wait_fraction"] < 0.02
