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
from errors import run_command
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
        model = wrapped(objective.model, config, process)
        stop = StopRequest()
        with (
            Metrics(folder, process, horizon, first_step) as metrics,
            Loader(dataset, plan, process.device, config.data, folder.quarantine) as loader,
            StepProfiler(folder.profile if config.profile and process.is_first else None, process.device) as profiler,
        ):
            metrics.announce(config)
            batches = loader.batches(first=first_step * config.accumulate)
            for step in range(first_step + 1, horizon.total_steps + 1):
                seed_step(config.seed, step, process.rank)
                lr = horizon.schedule.lr(step - 1)
                metrics.add(train_step(model, objective, batches, optimizer, lr, config))
                profiler.step()
                is_last, is_log_step = step == horizon.total_steps, step % config.log_every == 0
                stopping = stop.granted(process.device, may_talk=is_log_step)
                if is_log_step or is_last:
                    metrics.report(step, lr, loader.counters)
                with metrics.clock_stopped():
                    objective.review(step, is_last, metrics)
                if process.is_first and (step % config.checkpoint_every == 0 or is_last or stopping):
                    checkpoint.save(folder.checkpoints, replace(start, step=step), contents, config.keep_checkpoints)
                if stopping:
                    distributed.wait_for_all()  # torchrun ends them all as soon as one of them has gone
                    raise KeyboardInterrupt
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
    # The other buffers are position tables, 7 MB that never change: no need to broadcast them at every step.
    has_statistics = any(isinstance(layer, nn.BatchNorm1d) for layer in model.modules())
    return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=has_statistics)


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
