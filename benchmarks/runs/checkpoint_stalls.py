"""What checkpoints cost a run: how long the loop stands while one is saved, beside training and as it was before.

    python benchmarks/runs/checkpoint_stalls.py [--size base] [--step-ms 60] [--every 1000] [--checkpoints 3]

A step is simulated: a wait, in which a GPU would compute, and an update that changes nothing. The state is a model's,
with both moments of every weight, on the GPU where there is one. The reference is a save that the loop waits for.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import Row, default_output, machine, require, write_results
from common.devices import choose_device
from common.errors import InputError, run_command
from common.progress import progress_bar
from model.adamae import AdaMAE
from model.config import ModelConfig
from pipeline.config import DataConfig
from training import checkpoint
from training.checkpoint import Contents, TrainState
from training.config import TrainConfig
from training.run_dir import RunDir
from training.saving import Saver

NOTE = (
    "stall_ms: what a step takes beyond its wait, the worst of each checkpoint's; share: of the time of 1,000 such"
    " steps, what one checkpoint takes; waiting: a save that the loop waits for."
)


class Still(torch.optim.AdamW):
    """Holds AdamW's state, and changes nothing in a step."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pass


def main() -> None:
    options = parse(sys.argv[1:])
    device = choose_device()
    contents = state_of(ModelConfig(size=options.size), device)
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
    try:
        rows = [*beside(folder / "run", contents, options), *waiting(folder / "waiting", contents, options)]
    finally:
        shutil.rmtree(folder)
    about = machine(device, ("safetensors",)) | {"model": options.size, "step_ms": options.step_ms}
    about |= {"state_gib": round(sum(t.nbytes for t in tensors(contents)) / 2**30, 2)}
    output = options.output or default_output(device)
    write_results(output, "checkpoint_stalls", rows, about, [NOTE])
    print((output / "checkpoint_stalls.md").read_text(encoding="utf-8"))


def state_of(config: ModelConfig, device: torch.device) -> Contents:
    model = AdaMAE(config).to(device)
    optimizer = Still(model.parameters(), fused=True)
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.randn_like(p),
            "exp_avg_sq": torch.rand_like(p),
        }
    return Contents({"model": model}, optimizer, {})


def tensors(contents: Contents) -> list[torch.Tensor]:
    state = contents.state()
    moments = [value for values in state.optimizer["state"].values() for value in values.values()]
    return [*state.modules["model"].values(), *moments]


def beside(path: Path, contents: Contents, options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    config = TrainConfig(data=DataConfig(shards="none"), run=str(path))
    with RunDir(config, is_main=True) as run, Saver(run, contents, 1) as saver:
        wait(contents, options.every, options.step_ms)  # in which buffers are made
        for number in progress_bar(range(1, options.checkpoints + 1), unit="checkpoint"):
            started = time.perf_counter()
            saver.save(TrainState(number, 1, "none"))
            stalls = [time.perf_counter() - started, *wait(contents, options.every, options.step_ms)]
            rows.append(row("beside training", stalls, options.step_ms))
    saved = checkpoint.load_file(checkpoint.whole(path / "checkpoints")[-1] / "model.safetensors")
    ours = contents.modules["model"].state_dict()
    require("what was saved is what there was", all(torch.equal(saved[n], v.cpu()) for n, v in ours.items()), "other")
    return rows


def waiting(path: Path, contents: Contents, options: argparse.Namespace) -> list[Row]:
    rows = []
    for number in range(1, options.checkpoints + 1):
        started = time.perf_counter()
        checkpoint.save(path, TrainState(number, 1, "none"), contents.state())
        rows.append(row("waiting", [time.perf_counter() - started], options.step_ms))
        checkpoint.remove_old(path, keep=1)
    return rows


def wait(contents: Contents, steps: int, step_ms: float) -> list[float]:
    """Seconds that each step took beyond its wait."""
    stalls = []
    for _ in range(steps):
        time.sleep(step_ms / 1000)
        started = time.perf_counter()
        contents.optimizer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        stalls.append(time.perf_counter() - started)
    return stalls


def row(way: str, stalls: list[float], step_ms: float) -> Row:
    usual = statistics.median(stalls) if len(stalls) > 1 else 0.0
    lost = sum(stall - usual for stall in stalls if stall > 2 * usual)
    return {"saved": way, "stall_ms": 1000 * max(stalls), "lost_ms": 1000 * lost, "share": lost / step_ms}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base", help="model.size")
    parser.add_argument("--step-ms", type=float, default=60.0)
    parser.add_argument("--every", type=int, default=1000, help="steps")
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.step_ms <= 0 or options.every < 1 or options.checkpoints < 1:
        raise InputError("--step-ms, --every and --checkpoints must be above 0")
    return options


if __name__ == "__main__":
    run_command(main)
