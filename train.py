"""Pre-train or fine-tune a model on shards, on one GPU or under torchrun.

    python train.py --config configs/x.yaml [section.key=value ...]
    torchrun --nproc-per-node 8 train.py --config configs/x.yaml

Running the same command again resumes from the newest checkpoint in the run directory, with the
same bits as if nothing had happened. The exit code is 0 when the run is complete, 75 when a signal
has stopped it after a checkpoint, and 2 after a mistake (docs/clusters.md#exit-codes).
"""

import gc
import sys
import time
from functools import partial

from adamae.common.errors import STOPPED, parse_early, run_command
from adamae.training.load_config import load_config

# PyTorch takes seconds to import. Parsing before it answers --help and a misspelled key at once.
if __name__ == "__main__":
    CONFIG = parse_early(load_config)

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum

import torch

from adamae.common.commands import log_next
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
from adamae.training.parallelize import check_graphs, check_views, parallelize
from adamae.training.profiling import profile_steps
from adamae.training.run_dir import RunDir
from adamae.training.schedule import Schedule, seed_step
from adamae.training.startup_warnings import startup_warnings
from adamae.training.step import train_step
from adamae.training.stop import StopRequest
from adamae.training.summary import advise_on_run, describe_end
from adamae.training.tasks import TASKS
from adamae.training.tasks.task import Task

STOPPED_LINE = "Stopped; checkpoint saved. Re-run the same command to resume."


class Action(IntEnum):
    """What a rank asks for at the end of a step; all ranks do the largest that any asks for."""

    CONTINUE = 0
    SAVE = 1
    STOP = 2


def train(config: TrainConfig) -> bool:
    """Train until the end and return True, or until a signal stops the run and return False."""
    started = time.perf_counter()
    with (
        StopRequest() as stop,
        numerics(config),
        Distributed(config.device, config.timeout_s) as dist,
        # Entering locks the directory, downloads a run that is in object storage, and decides for
        # all ranks whether the run is new or resumes.
        RunDir(config, dist) as run,
        explain_failures(config),
    ):
        dataset = ShardDataset.open(config.data)
        torch.manual_seed(config.seed)
        task: Task = TASKS[config.task](config, dataset, dist)
        optimizer = make_optimizer(task.parameter_groups(), config.optimizer)
        # Where there is a checkpoint, run.load below replaces all weights.
        if run.checkpoint is None:
            task.init_weights(config.init_from)
        plan = make_plan(config, dataset, task, dist)
        schedule = Schedule(config, plan.clips_per_epoch, dist.world_size)
        start = TrainState(
            step=0,
            global_batch=schedule.global_batch,
            dataset=dataset.digest,
            fingerprint=determinism_fingerprint(config, dist),
            target=task.target_digest,
        )
        state = run.load(task.modules, optimizer, start)
        # From here on only the optimizer may change weights: their copies in bf16 follow its steps.
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
                # The run may have been stopped between saving this step and evaluating it.
                evaluate_if_missing(task, state.step, log)
            # From here on there is something to save: a signal waits for the end of its step.
            stop.defer = True
            stopping = False
            for step in range(state.step, schedule.total_steps):
                # Masks and mixup are functions of a clip's position in the plan. Only drop path
                # uses torch's generators: seeded by the step, it is the same in a resumed run.
                seed_step(config.seed, step, dist.rank)
                # All ranks must agree on what follows the step. Their votes, a byte each, travel on
                # the CPU beside the step, so no rank waits for another with an idle GPU.
                agreed_action = dist.begin_max(partial(next_action, stop, run))
                scalars = train_step(
                    model, task, loader.microbatches(step), optimizer, schedule.lr(step), config
                )
                # Scalars are summed on the GPU. Only every log_every-th call reads them, for which
                # the host waits until all queued kernels are done.
                log.step(step + 1, scalars)
                profile_step()
                action = agreed_action()
                stopping = action == Action.STOP
                evaluating = is_due(step + 1, config.evaluation.every, schedule) and not stopping
                saving = action == Action.SAVE or is_due(
                    step + 1, config.checkpoint_every or schedule.total_steps, schedule
                )
                # An evaluation follows a checkpoint, so that a run that is killed during the
                # evaluation repeats nothing else.
                if stopping or evaluating or saving:
                    # What is logged up to a checkpoint is on disk before the checkpoint is.
                    log.flush(step + 1)
                    # The copy to host memory is queued; a thread hashes and writes it, another one
                    # uploads it. This waits only while the checkpoint before is being written.
                    run.save(replace(state, step=step + 1), task.modules, optimizer, task.metadata)
                    with log.paused():
                        if dist.is_main and not stopping and config.evaluation.every is not None:
                            task.plot(step + 1, log)
                        if evaluating:
                            with stop.allow_interrupt():
                                task.evaluate(step + 1, log)
                    if dist.is_main:
                        start_report(run, schedule)
                if stopping:
                    run.is_stopping = True
                    break
    if dist.is_main:
        seconds = time.perf_counter() - started
        log_end(run, schedule, state.step, seconds, stopping)
    return not stopping


def next_action(stop: StopRequest, run: RunDir) -> Action:
    """Return what this rank asks for after the current step."""
    # Where a checkpoint could not be written, more steps would be lost: run.save raises the reason.
    if stop.is_set or run.failed:
        return Action.STOP
    if run.is_save_due:
        return Action.SAVE
    return Action.CONTINUE


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Exempt the half a million objects that imports have made from garbage collection.

    A full collection would scan them in the middle of a step, which takes 0.3 s.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def make_plan(
    config: TrainConfig, dataset: ShardDataset, task: Task, dist: Distributed
) -> TrainingPlan:
    """Plan which clips this rank sees in which step.

    Raise InputError if the shards, the model and the options of the loop do not go together.
    """
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
    check_views(config, dist.world_size)
    check_graphs(config.compile, dist.device.type, plan.microbatches_per_step)
    return plan


def start_report(run: RunDir, schedule: Schedule) -> None:
    """Write the report in the background."""
    # Matplotlib, in rank 0 alone.
    from adamae.training.report import write_report

    run.writer.start(partial(write_report, run.path, run.config, schedule.total_steps))


def is_due(step: int, every: int | None, schedule: Schedule) -> bool:
    """Return whether `step` is one of every so many, or the last; None: never."""
    return every is not None and (step % every == 0 or step == schedule.total_steps)


def evaluate_if_missing(task: Task, step: int, log: Logger) -> None:
    """Evaluate the step that a run resumes from, unless its metrics have an evaluation of it."""
    if not log.config.evaluation.shards:
        return
    has_evaluation = False
    for row in read_rows(log.run.metrics):
        if row["step"] == step:
            has_evaluation |= any(name.startswith("evaluation/") for name in row)
    # Every rank takes part in an evaluation, and on other nodes the file may be out of date.
    if not any(log.dist.gather(has_evaluation)):
        task.evaluate(step, log)


def log_end(
    run: RunDir, schedule: Schedule, first_step: int, seconds: float, stopping: bool
) -> None:
    """Print the results of a complete run, or how to continue one that is stopping."""
    if stopping:
        log_line(STOPPED_LINE, sys.stderr)
        return
    rows = read_rows(run.metrics)
    for line in describe_end(rows, run.config, first_step, schedule.total_steps, seconds):
        log_line(line, sys.stderr)
    log_next(advise_on_run(run.config))


if __name__ == "__main__":
    run_command(lambda: 0 if train(CONFIG) else STOPPED, resumable=True)
