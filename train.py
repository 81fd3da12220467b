"""Pre-train or fine-tune: `python train.py --config configs/x.yaml [section.key=value ...]`, or under torchrun.

The run folder can always be started again with the same command: it goes on from its newest checkpoint, exactly.
"""

import sys

import common.openmp  # noqa: F401

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.devices import autocast_to
from common.errors import run_command
from model.channels import check_channels
from pipeline.loader import ClipLoader
from pipeline.planning.plan import TrainingPlan
from pipeline.reading.ahead import check_cache
from pipeline.shards.dataset import ShardDataset
from training import checkpoint, distributed
from training.compiling import check_graphs, compile_in_place
from training.config import TrainConfig
from training.failures import failures_explained, way_back_explained
from training.feed import Feed
from training.interrupt import StopRequest
from training.logger import SKIPPED, Logger
from training.memory import check_memory
from training.milestones import Milestones
from training.numerics import as_asked, described, execution
from training.optimizer import update
from training.profiling import StepProfiler
from training.run_dir import RunDir
from training.saving import Saver
from training.schedule import Horizon, seed_step
from training.starting import begin_branch, configured
from training.startup_warnings import startup_warnings
from training.tasks.classification import Classification
from training.tasks.pretraining import Objective, Pretraining


@distributed.end_told()
@way_back_explained
@failures_explained()
@as_asked
def train(config: TrainConfig) -> None:
    process = distributed.join(config.device, config.distributed.timeout_s)
    dataset = ShardDataset.open(config.data)
    torch.manual_seed(config.seed)
    objective = make_objective(config, dataset, process)
    optimizer = objective.optimizer()
    plan = make_plan(config, dataset, objective, process)
    horizon = Horizon.of(config, plan.clips_per_epoch, process.world_size)
    memory = check_memory(config, objective.model, plan.batch_size, process.device, dataset.info.codecs.values())
    contents = checkpoint.Contents(objective.modules, optimizer, objective.about)
    start = checkpoint.TrainState(0, horizon.global_batch, dataset.digest, execution=execution(config, process))
    branched = begin_branch(config, contents, start, horizon.total_steps, process)

    with RunDir(config, process.is_main) as folder:
        distributed.wait_for_all()
        folder.fetch()
        resumed = checkpoint.load_newest(folder.checkpoints, contents, start, horizon.total_steps)
        begun = resumed if resumed.step else branched
        first_step = begun.step
        model = wrapped(objective.model, config, process)
        stop, agreement = StopRequest(process.device), distributed.Agreement(config.distributed.timeout_s)
        with (
            Saver(folder, contents, config.keep_checkpoints) as saver,
            ClipLoader(dataset, plan, process.device, config.data, folder.quarantine) as loader,
            Logger(folder, config, process, horizon, loader, first_step) as metrics,
            StepProfiler(folder.profile if config.profile and process.is_main else None, process.device) as profiler,
        ):
            metrics.announce([memory, described(config, process.device), *startup_warnings(config, dataset)])
            milestones = Milestones(config, start, objective, metrics, stop, saver)
            milestones.going_on(resumed.step)
            batches = loader.batches(first_step * plan.passes)
            feed = Feed(batches, plan.passes, plan.global_batch, config.model, process, stop, agreement)
            # DDP lays its buckets anew after its first backward pass; a step that begins with others rounds otherwise.
            train_step(model, objective, feed.of_nothing(), optimizer, 0.0, config)
            metrics.watch(model)
            for step in range(first_step + 1, horizon.total_steps + 1):
                seed_step(config.seed, step, process.rank)
                lr = horizon.schedule.lr(step - 1)
                with milestones.saved_if_left_alone(step - 1):
                    figures = train_step(model, objective, feed, optimizer, lr, config)
                if figures is None:
                    milestones.stopped(step - 1)
                objective.after_update()
                metrics.step(step, figures)
                profiler.step()
                milestones.after(step)
    distributed.leave()


def make_objective(config: TrainConfig, dataset: ShardDataset, process: distributed.Distributed) -> Objective:
    if config.task == "pretrain":
        return Pretraining(config, process)
    return Classification(config, dataset, process)


def make_plan(
    config: TrainConfig, dataset: ShardDataset, objective: Objective, process: distributed.Distributed
) -> TrainingPlan:
    plan = TrainingPlan(
        dataset, config.data, num_frames=config.model.num_frames, image_size=config.model.image_size, seed=config.seed,
        batch_size=config.batch_size, global_batch=config.clips_per_step(process.world_size),
        together=objective.together, rank=process.rank, world_size=process.world_size,
    )  # fmt: skip
    check_channels(dataset.channels, config.model.in_channels)
    check_graphs(config.compile, process.device.type, plan.passes)
    check_cache(dataset, plan)
    return plan


@distributed.others_awaited()
def wrapped(model: nn.Module, config: TrainConfig, process: distributed.Distributed) -> nn.Module:
    """The model as the loop calls it: compiled if asked for, and averaging gradients if there are several processes."""
    if config.compile:
        compile_in_place(model, config.compile)
    if process.world_size == 1:
        return model
    # Buffers are position tables, 7 MB that never change, and a probe's statistics, which its objective shares.
    return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def train_step(
    model: nn.Module,
    objective: Objective,
    feed: Feed,
    optimizer: torch.optim.Optimizer,
    lr: float,
    config: TrainConfig,
) -> dict[str, Tensor] | None:
    """Forward and backward of a step's batches, then AdamW. Returns scalars on the device; never waits for it.

    None: the run has been asked to stop, and nothing has changed.
    """
    total: dict[str, Tensor] = {}
    for batch, parts, is_last in feed.of_step():
        with distributed.gradients_averaged(model, is_last):
            with autocast_to(batch.clip.device, config.precision):
                loss, metrics = objective(model, batch)
            (loss / parts).backward()
        for name, value in metrics.items():
            total[name] = total.get(name, 0) + value.detach() / parts
    if feed.given_up():
        optimizer.zero_grad(set_to_none=True)
        objective.after_none()
        return None
    norm = update(optimizer, lr, config.optimizer.clip_grad_norm)
    return total | {"grad_norm": norm, SKIPPED: (~norm.isfinite()).float()}


if __name__ == "__main__":
    run_command(lambda: train(configured(sys.argv[1:])), resumable=True)
