"""Training on the stand-in for CUDA: its numbers mean nothing, but its calls are those of a GPU."""

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

# The steps that are counted. In its first ten, DDP measures, for which it waits.
FIRST = 13
LAST = 16
SETTINGS = [
    *TINY,
    "device=cuda",
    "precision=bf16",
    "steps=17",
    "log_every=100",
    "checkpoint_every=100",
    # DALI does not run on the stand-in.
    "data.decoder=pyav",
]


def count_steps(
    library: Path, runs: list[list[str]], gpus: int = 1, last: int = LAST, **gpu_is: Any
) -> list[Any]:
    """Train with each list of arguments; return the calls of the counted steps, for each rank.

    Fail if one of them waits for the GPU, or is not allowed. gpu_is: settings of gpu.run.
    """
    with TemporaryDirectory() as output:
        arguments = [output, FIRST, last, json.dumps(runs)]
        done = gpu.run(library, "tests/fake_cuda/count_steps.py", arguments, gpus, **gpu_is)
        assert done.returncode == 0, done.stderr
        results = []
        for path in Path(output).iterdir():
            results += [json.loads(line) for line in path.read_text().splitlines()]
    assert "attention by FLASH_ATTENTION" in done.stderr
    for result in results:
        assert result["ended"]
        names = list(result["calls"])
        contexts = [name for name in names if name.startswith("context")]
        assert contexts == [f"context on {result['rank']}"]
        assert not any(name.startswith(("WAIT", "ILLEGAL")) for name in names), done.stderr
    assert len(results) == gpus * len(runs)
    return [result["calls"] for result in results]


def test_a_step_waits_for_nothing_and_uploads_the_crops_alone(
    library: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    """The next batch is uploaded during a step, as soon as it is ready."""
    arguments = [
        *SETTINGS,
        f"data.shards={synthetic_shards}",
        f"run={tmp_path / 'run'}",
        "steps=21",
    ]
    (calls,) = count_steps(library, [arguments], last=20)
    num_steps = 20 - FIRST + 1
    # 363 with torch 2.15; 2.11 takes 17 more.
    assert calls["launches"] <= 380 * num_steps
    assert abs(calls["LAUNCH crop_resize_kernel"] - num_steps) <= 1
    # Frames of one chunk, tables, labels and positions; one copy less with torch 2.11. Those of a
    # batch may be uploaded in a step beside the counted ones.
    assert 3 * num_steps - 4 <= calls["COPY pinned to device"] <= 4 * num_steps + 4
    # Of a step: 4 clips of 4 frames in yuv420p.
    bytes_of_frames = 4 * 4 * 64 * 64 * 3 // 2
    bytes_per_step = calls["BYTES pinned to device"] / num_steps
    assert 0.3 * bytes_of_frames < bytes_per_step < 0.9 * bytes_of_frames


# Eleven runs.
@pytest.mark.slow
def test_every_masking_strategy_and_target_ends(
    library: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    """So do gray clips, which the references make instead of Triton."""
    changes = [[f"model.masking={masking}"] for masking in MASKS]
    config = parse([*SETTINGS, "data.shards=s"]).model
    for target in TARGETS:
        change = [f"model.target={target}"]
        if target == "teacher":
            change.append(f"model.teacher={write_random_teacher(config, tmp_path)}")
        if target == "none":
            change += ["model.views=2", "data.repeats=2", "batch_size=4", "model.masking=random"]
        changes.append(change)
    changes.append(["model.in_channels=1"])
    common = [*SETTINGS, f"data.shards={synthetic_shards}", "model.mask_ratio=0.5"]
    runs = [
        [*common, *change, f"run={tmp_path / str(number)}"] for number, change in enumerate(changes)
    ]
    count_steps(library, runs)


# torchrun and two ranks start.
@pytest.mark.slow
@pytest.mark.parametrize("change", ["model.masking=adaptive", "model.masking=tube"])
def test_ranks_have_a_gpu_each(
    change: str, library: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    arguments = [*SETTINGS, f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}", change]
    count_steps(library, [[*arguments, "model.mask_ratio=0.5"]], gpus=2)


# torch.compile takes minutes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "launches", "graphs"), [("true", 288, 0), ("reduce-overhead", 60, 2)]
)
def test_a_compiled_step_launches_less(
    how: str, launches: int, graphs: int, library: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    """A graph break, or a copy of what a kernel writes, would be a launch more."""
    arguments = [
        *SETTINGS,
        f"data.shards={synthetic_shards}",
        f"run={tmp_path / 'run'}",
        f"compile={how}",
    ]
    (calls,) = count_steps(library, [arguments])
    num_steps = LAST - FIRST + 1
    assert 0 < calls["launches"] <= launches * num_steps
    # One graph forward and one backward.
    assert calls.get("graph launches", 0) == graphs * num_steps
    if not graphs:
        assert calls["LAUNCH loss_kernel"] == 2 * num_steps


# Of each kernel: a step of 400 kernels is 1.2 s, beside which the loader's milliseconds fit.
KERNEL_US = 3000


# Seconds pass on the clock of a slow GPU.
@pytest.mark.slow
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
    (calls,) = count_steps(library, [arguments], FAKE_US=KERNEL_US)
    # The means of the four counted steps.
    (row,) = (row for row in read_rows(tmp_path / "run") if row["step"] == LAST)
    expected = calls["launches"] / (LAST - FIRST + 1) * KERNEL_US * 1e-6
    seconds = 4 / row["clips_per_second"]
    # Other work on this machine may delay the host.
    assert 0.9 * expected < seconds < 1.3 * expected
    assert row["data_wait_fraction"] < 0.1
