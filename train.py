"""Pre-train or fine-tune: `python train.py --config configs/x.yaml [section.key=value ...]`, or under torchrun.

The run folder can always be started again with the same command: it goes on from its newest checkpoint, exactly.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from devices import mixed_precision
from errors import InputError, run_command
from pipeline.dataset import ShardDataset
from pipeline.loader import Batch, Loader
from pipeline.plan import Plan
from training import checkpoint, distributed
from training.compiling import compile_in_place
from training.config import TrainConfig, parse
from training.failures import failures_explained
from training.finetuning import Classification
from training.interrupt import StopRequest
from training.metrics import SKIPPED, Metrics
from training.objective import Objective, Pretraining
from training.optimizer import update
from training.profiling import StepProfiler
from training.run_folder import RunFolder
from training.schedule import Horizon, seed_step


@failures_explained()
def train(config: TrainConfig) -> None:
    process = distributed.join(config.device)
    dataset = ShardDataset.of(config.data)
    plan = Plan(
        dataset, config.data, num_frames=config.model.num_frames, image_size=config.model.image_size,
        seed=config.seed, batch_size=config.batch_size, rank=process.rank, world_size=process.world_size,
    )  # fmt: skip
    horizon = Horizon.of(config, plan.clips_per_epoch, process.world_size)
    torch.manual_seed(config.seed)
    objective = make_objective(config, dataset, process)
    optimizer = objective.optimizer()

    with RunFolder(config, process.is_first) as folder:
        distributed.wait_for_all()
        contents = checkpoint.Contents(objective.modules, optimizer, objective.about)
        start = checkpoint.Place(0, horizon.global_batch, dataset.digest)
        first_step = checkpoint.load_newest(folder.checkpoints, contents, start)
        if not distributed.same_in_all(first_step, process.device):
            raise InputError(
                f"the processes of this run find different checkpoints in {config.run}: put it where all machines see"
                " the same files, or, if they do, start again in a minute"
            )
        model = wrapped(objective.model, config, process)
        stop = StopRequest(process.device)
        with (
            Metrics(folder, process, horizon, first_step) as metrics,
            Loader(dataset, plan, process.device, config.data, folder.quarantine) as loader,
            StepProfiler(folder.profile if config.profile and process.is_first else None, process.device) as profiler,
        ):
            metrics.watch(model)
            metrics.announce(config)
            if first_step > 0 and objective.review_due(first_step, is_last=first_step == horizon.total_steps):
                review(objective, first_step, metrics, stop, folder)
            batches = loader.batches(first=first_step * config.accumulate)
            for step in range(first_step + 1, horizon.total_steps + 1):
                seed_step(config.seed, step, process.rank)
                lr = horizon.schedule.lr(step - 1)
                metrics.add(train_step(model, objective, batches, optimizer, lr, config))
                profiler.step()
                is_last = step == horizon.total_steps
                review_due = objective.review_due(step, is_last)
                saving = review_due or is_last or step % config.checkpoint_every == 0
                pausing = saving or step % config.log_every == 0
                stopping = stop.granted(may_talk=pausing)
                if pausing or stopping:
                    metrics.report(step, lr, loader.counters)
                if process.is_first and (saving or stopping):
                    checkpoint.save(folder.checkpoints, replace(start, step=step), contents, config.keep_checkpoints)
                if stopping:
                    distributed.wait_for_all()  # torchrun ends them all as soon as one of them has gone
                    raise KeyboardInterrupt
                if review_due:
                    review(objective, step, metrics, stop, folder)
    distributed.leave()


def make_objective(config: TrainConfig, dataset: ShardDataset, process: distributed.Process) -> Objective:
    if config.objective == "pretrain":
        return Pretraining(config, process.device)
    return Classification(config, dataset, process)


def wrapped(model: nn.Module, config: TrainConfig, process: distributed.Process) -> nn.Module:
    """The model as the loop calls it: compiled if asked for, and averaging gradients if there are several processes."""
    if config.compile:
        compile_in_place(model)
    if process.world_size == 1:
        return model
    # Buffers are position tables, 7 MB that never change, and a probe's statistics, which its objective shares.
    return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def review(objective: Objective, step: int, metrics: Metrics, stop: StopRequest, folder: RunFolder) -> None:
    """What the objective does now and then, once for every step: stopped in it, a run makes up for it at its start."""
    done = checkpoint.is_reviewed(folder.checkpoints, step)
    if distributed.any_process(done, metrics.process.device):  # a network's file system may not show it to all at once
        return
    with metrics.clock_stopped(), stop.at_once():
        objective.review(step, metrics)
    if metrics.process.is_first:
        checkpoint.mark_reviewed(folder.checkpoints, step)


def train_step(
    model: nn.Module,
    objective: Objective,
    batches: Iterator[Batch],
    optimizer: torch.optim.Optimizer,
    lr: float,
    config: TrainConfig,
) -> dict[str, Tensor]:
    """Forward and backward of `accumulate` batches, then AdamW. Returns scalars on the device; never waits for it."""
    total: dict[str, Tensor] = {}
    for micro_step in range(config.accumulate):
        batch = next(batches)
        with distributed.gradients_averaged(model, micro_step == config.accumulate - 1):
            with mixed_precision(batch.clip.device, config.precision):
                loss, metrics = objective(model, batch)
            (loss / config.accumulate).backward()
        for name, value in metrics.items():
            total[name] = total.get(name, 0) + value.detach() / config.accumulate
    norm = update(optimizer, lr, config.optimizer.clip_grad_norm)
    total |= {"grad_norm": norm, SKIPPED: (~norm.isfinite()).float()}
    objective.after_update()
    return total


if __name__ == "__main__":
    run_command(lambda: train(parse(sys.argv[1:])), goes_on=True)
