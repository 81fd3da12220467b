"""Training on a GPU that is not there: nothing of its numbers is true, but what is called is."""

import json
from pathlib import Path
from typing import Any

import gpu
import pytest
from tiny import TINY

from kernels.crop_resize import frame_bytes
from model.masking import MASKS
from pipeline.decoding.planes import find_window
from pipeline.planning.plan import TrainingPlan
from pipeline.shards.dataset import ShardDataset
from training.config import parse

FIRST, LAST = 13, 16  # steps that are counted: DDP measures, and waits, in its first ten
SETTINGS = [*TINY, "device=cuda", "precision=bf16", "steps=17", "log_every=100", "checkpoint_every=100"]
SETTINGS += ["data.decoder=pyav"]  # DALI does not run there


def count_steps(library: Path, runs: list[list[str]], gpus: int = 1) -> list[dict[str, Any]]:
    """Train with each list of arguments; return what the counted steps called."""
    done = gpu.run(library, "tests/fake_cuda/count_steps.py", [FIRST, LAST, json.dumps(runs)], gpus)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for run in found:
        assert run["ended"]
        assert [what for what in run["calls"] if what.startswith("context")] == [f"context on {run['rank']}"]
        wrong = {what: number for what, number in run["calls"].items() if what.startswith(("WAIT", "ILLEGAL"))}
        assert not wrong, done.stderr
    assert len(found) == gpus * len(runs)
    return found


def test_a_step_waits_for_nothing_and_uploads_what_clips_show(
    library: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    """The next batch is uploaded during a step, as soon as it is ready."""
    arguments = [*SETTINGS, f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}"]
    (found,) = count_steps(library, [arguments])
    calls, steps = found["calls"], LAST - FIRST + 1
    assert abs(calls["LAUNCH crop_resize_kernel"] - steps) <= 1
    assert abs(calls["COPY pinned to device"] - 3 * steps) <= 1, "frames with their tables, labels, positions"
    assert calls["BYTES pinned to device"] == pytest.approx(count_frame_bytes(synthetic_shards, arguments), rel=0.3)


def count_frame_bytes(shards: Path, arguments: list[str]) -> int:
    """Count the bytes of what clips show of their decoded frames."""
    config, dataset = parse(arguments), ShardDataset.open(shards)
    plan = TrainingPlan(dataset, config.data, num_frames=4, image_size=32, seed=config.seed, batch_size=4)
    total = 0
    for row in (row for step in range(FIRST, LAST + 1) for row in plan.batch(step)):
        sample = dataset.samples[row.sample]
        window = find_window([row.crop], sample.width, sample.height)
        total += len(set(row.frames)) * frame_bytes(window.height, window.width, 1)
    return total


def test_every_masking_strategy_ends(library: Path, synthetic_shards: Path, tmp_path: Path) -> None:
    """But the one that needs maps of true motion beside the frames."""
    runs = [
        [*SETTINGS, f"data.shards={synthetic_shards}", f"model.masking={masking}"]
        for masking in MASKS
        if masking != "oracle"
    ]
    runs.append([*SETTINGS, f"data.shards={synthetic_shards}", "model.in_channels=1"])  # by the references, not Triton
    runs = [[*run, f"run={tmp_path / str(number)}", "model.mask_ratio=0.5"] for number, run in enumerate(runs)]
    count_steps(library, runs)


def test_ranks_have_a_gpu_each(library: Path, synthetic_shards: Path, tmp_path: Path) -> None:
    arguments = [*SETTINGS, f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}"]
    count_steps(library, [arguments], gpus=2)
