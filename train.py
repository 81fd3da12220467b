"""Pre-train or fine-tune: `python train.py --config configs/x.yaml [section.key=value ...]`, or under torchrun.

Re-running the same command resumes exactly from the newest checkpoint in the run directory. The exit code is 0 when the
run is complete, 130 when a signal has stopped it after a checkpoint, 2 after an error.
"""

import gc
import math
import sys
import time

from adamae.common.errors import parse_early, run_command
from adamae.training.load_config import load_config

if __name__ == "__main__":
    CONFIG = parse_early(load_config)

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum

import torch

from adamae.common.logging import log as log_line
from adamae.model.channels import check_channels
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.plan import TrainingPlan
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.checkpoint import TrainState
from adamae.training.config import TrainConfig
from adamae.training.distributed import Distributed
from adamae.training.failures import explain_failures
from adamae.training.logger import Logger, read_rows
from adamae.training.numerics import determinism_fingerprint, numerics
from adamae.training.optimizer import make_optimizer
from adamae.training.parallelize import check_graphs, parallelize
from adamae.training.profiling import profile_steps
from adamae.training.report import write_report
from adamae.training.run_dir import RunDir
from adamae.training.schedule import Schedule, seed_step
from adamae.training.startup_warnings import startup_warnings
from adamae.training.step import train_step
from adamae.training.stop import StopRequest
from adamae.training.summary import describe_end
from adamae.training.tasks import TASKS
from adamae.training.tasks.task import Task

STOPPED = 130  # the exit code, as after Ctrl-C
STOPPED_LINE = "Stopped; checkpoint saved. Re-run the same command to resume."


class Action(IntEnum):
    """What a rank asks for at the end of a step; the largest of all ranks' is what all do."""

    CONTINUE = 0
    SAVE = 1
    STOP = 2


def train(config: TrainConfig) -> bool:
    """Train until the end (True) or until a signal stops the run (False)."""
    started = time.perf_counter()
    with (
        StopRequest() as stop,
        numerics(config),
        Distributed(config.device, config.timeout_s) as dist,
        RunDir(
            config, dist
        ) as run,  # locked and fetched; whether the run is new or resumed is decided here, once
        explain_failures(config),
    ):
        dataset = ShardDataset.open(config.data)
        torch.manual_seed(config.seed)
        task: Task = TASKS[config.task](config, dataset, dist)
        optimizer = make_optimizer(task.parameter_groups(), config.optimizer)
        if run.checkpoint is None:
            task.init_weights(config.init_from)
        plan = make_plan(config, dataset, task, dist)
        schedule = Schedule(config, plan.clips_per_epoch, dist.world_size)
        fingerprint = determinism_fingerprint(config, dist)
        start = TrainState(
            0, schedule.global_batch, dataset.digest, fingerprint, task.target_digest
        )
        state = run.load(task.modules, optimizer, start)
        model = parallelize(task, optimizer, config, dist, plan.batch_size)
        with (
            ClipLoader(
                dataset, plan, dist.device, config.data, run.path / "quarantine.jsonl"
            ) as loader,
            frozen_objects(),
            Logger(run, config, dist, schedule, loader, state.step) as log,
            profile_steps(
                run.path / "profile", dist.device, config.profile and dist.is_main
            ) as profile_step,
        ):
            log.announce(startup_warnings(config, dataset, dist.device))
            if not run.is_new and is_due(state.step, config.evaluation.every, schedule):
                evaluate_if_missing(
                    task, state.step, log
                )  # the run may have been stopped between save and evaluation
            stop.defer = True
            stopping = False

            def next_action() -> Action:
                """Return what this rank asks for now."""
                if stop.is_set or run.writer.failed:
                    return Action.STOP
                if run.is_save_due:
                    return Action.SAVE
                return Action.CONTINUE

            for step in range(state.step, schedule.total_steps):
                seed_step(config.seed, step, dist.rank)
                # Reduced beside the step: it is one byte, and no rank waits for it before the step has been queued.
                agreed_action = dist.begin_max(next_action)
                scalars = train_step(
                    model, task, loader.microbatches(step), optimizer, schedule.lr(step), config
                )
                log.step(step + 1, scalars)
                profile_step()
                action = agreed_action()
                stopping = action == Action.STOP
                evaluating = is_due(step + 1, config.evaluation.every, schedule) and not stopping
                saving = action == Action.SAVE or is_due(
                    step + 1, config.checkpoint_every or math.inf, schedule
                )
                if stopping or evaluating or saving:
                    log.flush(step + 1)
                    run.save(replace(state, step=step + 1), task.modules, optimizer, task.metadata)
                    with log.paused():
                        if dist.is_main and not stopping and config.evaluation.every is not None:
                            task.plot(step + 1, log)
                        if evaluating:
                            with stop.allow_interrupt():
                                task.evaluate(step + 1, log)
                    if dist.is_main:
                        run.writer.start(
                            lambda: write_report(run.path, config, schedule.total_steps)
                        )
                if stopping:
                    break
    if dist.is_main:
        seconds = time.perf_counter() - started
        end = describe_end(
            read_rows(run.metrics), config, state.step, schedule.total_steps, seconds
        )
        for line in [STOPPED_LINE] if stopping else end:
            log_line(line, sys.stderr)
    return not stopping


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Keep the garbage collector from scanning what has been imported, half a million objects, in this block.

    The scan would take 0.3 s in the middle of a step.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def make_plan(
    config: TrainConfig, dataset: ShardDataset, task: Task, dist: Distributed
) -> TrainingPlan:
    plan = TrainingPlan(
        dataset,
        config.data,
        num_frames=config.model.num_frames,
        image_size=config.model.image_size,
        seed=config.seed,
        batch_size=config.batch_size,
        global_batch=config.clips_per_step(dist.world_size),
        batch_multiple=task.clip_multiple,
        rank=dist.rank,
        world_size=dist.world_size,
    )
    check_channels(dataset.channels, config.model.in_channels)
    check_graphs(config.compile, dist.device.type, plan.microbatches_per_step)
    return plan


def is_due(step: int, every: float | None, schedule: Schedule) -> bool:
    return every is not None and (step % every == 0 or step == schedule.total_steps)


def evaluate_if_missing(task: Task, step: int, log: Logger) -> None:
    rows = (row for row in read_rows(log.run.metrics) if row["step"] == step)
    is_there = any(name.startswith("evaluation/") for row in rows for name in row)
    if log.config.evaluation.shards and not any(log.dist.gather(is_there)):
        task.evaluate(step, log)


if __name__ == "__main__":
    run_command(lambda: 0 if train(CONFIG) else STOPPED, resumable=True)
