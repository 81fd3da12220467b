"""Is a run that was killed and started again the run that was left alone? Bit by bit, on the device that is here.

    python benchmarks/gpu/resume_check.py SHARDS [section.key=value ...] [--steps 60] [--output FOLDER]

The same small training is done undisturbed, killed (SIGKILL) and stopped (SIGTERM) in the middle, the last two started
again. Compared are the weights at the end. With deterministic=true they must be equal, and on a CPU without it, too; on
a GPU both are tried, and the difference without it is told.
"""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import ROOT, Report, Row, print_table, require
from common.devices import choose_device
from common.errors import InputError, run_command
from common.progress import progress_bar

# Large enough for every kernel's usual path, small enough for a few seconds a run.
SMALL = [
    *("model.size=tiny", "model.num_frames=8", "model.image_size=64", "model.mask_ratio=0.75", "data.frame_stride=2"),
    *("batch_size=8", "optimizer.warmup_ratio=0", "evaluation.every=null", "log_every=1"),
]
ENDINGS = {"undisturbed": None, "SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}
START_SECONDS = 240  # at most, until a run has made the steps before its end
NOTES = ["`equal`: bit by bit. `largest_difference`: of any weight, `largest_weight` beside it."]


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("shards", type=Path, help="folder of shards, thinned to every frame or every second one")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="given to train.py")
    parser.add_argument("--steps", type=at_least(6), default=60, help="at least 6, so that there is a middle")
    options = parser.parse_args(arguments)
    device, steps = choose_device(), options.steps
    common = [f"data.shards={options.shards}", f"steps={steps}", f"checkpoint_every={max(1, steps // 6)}"]
    common = [sys.executable, str(ROOT / "train.py"), *SMALL, *common, *options.overrides]
    rows: list[Row] = []
    for deterministic in (True, False) if device.type == "cuda" else (False,):
        with tempfile.TemporaryDirectory() as folder:
            for name, ending in progress_bar(ENDINGS.items(), unit="run"):
                command = [*common, f"deterministic={str(deterministic).lower()}", f"run={folder}/{name}"]
                if ending is not None:
                    interrupt(command, Path(folder, name, "metrics.jsonl"), steps // 2, ending)
                done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
                if done.returncode:
                    raise InputError(f"`{' '.join(command)}` failed: {done.stderr.strip().splitlines()[-1:]}")
                checkpoint = f"checkpoints/step-{steps:08d}/model.safetensors"
                ours, theirs = (load_file(Path(folder, run, checkpoint)) for run in (name, "undisturbed"))
                gaps = [(ours[key].float() - theirs[key].float()).abs().max().item() for key in theirs]
                row: Row = {"deterministic": deterministic, "run": name}
                row["equal"] = all(torch.equal(ours[key], theirs[key]) for key in theirs)
                row |= {"largest_difference": max(gaps)}
                rows.append(row | {"largest_weight": max(value.abs().max().item() for value in theirs.values())})
        if deterministic or device.type == "cpu":
            require("a resumed run is the undisturbed one", all(row["equal"] for row in rows), str(rows))
    overrides = " ".join([*SMALL, *options.overrides])
    Report("resume_check", options.output, device, NOTES, steps=steps, overrides=overrides).write(rows)
    print_table(rows)


def interrupt(command: list[str], metrics: Path, step: int, ending: signal.Signals) -> None:
    """Start a run and end it once it has logged `step`; raises InputError if it does not get there."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
            if process.poll() is not None or time.monotonic() > deadline:
                raise InputError(f"`{' '.join(command)}` did not reach step {step}: run it by hand to see why")
            time.sleep(0.01)
        process.send_signal(ending)
        process.wait(timeout=60)
    finally:
        process.kill()


if __name__ == "__main__":
    run_command(main)
