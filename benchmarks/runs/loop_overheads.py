"""What it costs a step that processes agree on stopping and compare their figures: two of them, with gloo.

    python benchmarks/runs/loop_overheads.py [--step-ms 60] [--steps 500] [--log-every 10]

A step is simulated: a wait, in which a GPU would compute, and a barrier, as in the averaging of gradients all processes
meet. What is timed is all that training/distributed.py: Agreement and training/stragglers.py add to it.
"""

import argparse
import os
import socket
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness import Row, default_output, machine, require, side_by_side, write_results
from common.errors import InputError, run_command
from training import distributed
from training.config import TrainConfig
from training.distributed import Agreement
from training.stragglers import Ranks

PROCESSES = 2
TIMEOUT_S = 60.0
WARM_UP_STEPS = 20
COUNTERS = ("wait_seconds", "read_seconds", "decode_seconds", "download_seconds", "batches_ready", "cache_hits")


def main() -> None:
    options = parse(sys.argv[1:])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_ranks = list(side_by_side(partial(measure, port, options), range(PROCESSES)))
    worst = [max(pair) for pair in zip(*of_ranks, strict=True)]
    agreement, gathering = worst[0], (worst[1] - worst[2]) / options.log_every
    rows: list[Row] = [
        {"what": "agreement", "us_a_step": agreement},
        {"what": f"figures of all with the losses, every {options.log_every} steps", "us_a_step": gathering},
        {"what": "together", "us_a_step": agreement + gathering},
    ]
    for row in rows:
        row["percent"] = row["us_a_step"] / options.step_ms / 10
    device = torch.device("cpu")
    notes = [
        f"Medians of {options.steps} steps of {options.step_ms:g} ms in the slower of {PROCESSES} processes.",
        "Besides, one forward and backward pass is discarded when a run starts or goes on: one step of the whole run.",
    ]
    folder = options.output or default_output(device)
    write_results(folder, "loop_overheads", rows, machine(device, ()), notes)
    print((folder / "loop_overheads.md").read_text(encoding="utf-8"))


def measure(port: int, options: argparse.Namespace, rank: int) -> tuple[float, float, float]:
    """Median microseconds of a step's agreement, of a report on losses and figures, and of one on losses alone."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = distributed.join("cpu", TIMEOUT_S)
    agreement, ranks = Agreement(TIMEOUT_S), Ranks(process)
    losses = dict.fromkeys(("reconstruction_loss", "sampling_loss", "grad_norm", "skipped_updates"), 1.0)
    agreeing, gathering, without = [], [], []
    for step in range(-WARM_UP_STEPS, options.steps):
        asked = time.perf_counter()
        agreement.ask(False)
        waiting = time.perf_counter()
        time.sleep(options.step_ms / 1000)
        dist.barrier()
        met = time.perf_counter()
        stop = agreement.any_yes()
        agreeing.append(time.perf_counter() - met + waiting - asked)
        require("nobody has asked to stop", not stop, "somebody has")
        started = time.perf_counter()
        if step % options.log_every == 0:
            means, spreads = ranks.gather(losses, options.log_every, 1.0, dict.fromkeys(COUNTERS, float(step)))
            gathering.append(time.perf_counter() - started)
            require("all figures have come", means == losses and "step_ms" in spreads, str(list(spreads)))
        elif step % options.log_every == options.log_every // 2:
            found = distributed.mean_over_processes(torch.tensor(list(losses.values()))).tolist()
            without.append(time.perf_counter() - started)
            require("the losses have come", found == list(losses.values()), str(found))
    distributed.leave()
    medians = [statistics.median(times) for times in (agreeing[WARM_UP_STEPS:], gathering, without)]
    return 1e6 * medians[0], 1e6 * medians[1], 1e6 * medians[2]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--log-every", type=int, default=TrainConfig.log_every, help="steps")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.step_ms <= 0 or options.steps < 1 or options.log_every < 2:
        raise InputError("--step-ms and --steps must be above 0, --log-every above 1")
    if len(os.sched_getaffinity(0)) < PROCESSES:
        raise InputError(f"{PROCESSES} processes are measured side by side: give this command {PROCESSES} cores")
    return options


if __name__ == "__main__":
    run_command(main)
