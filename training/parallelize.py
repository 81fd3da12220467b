"""Wrap a model for training: torch.compile, DistributedDataParallel and copies in bf16."""

from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist_c10d
from torch import nn
from torch._functorch import config as partitioner
from torch.nn.parallel import DistributedDataParallel

from adamae.common.devices import autocast_to, choose_precision
from adamae.common.errors import InputError
from adamae.common.logging import format_count
from adamae.model.casting import keep_copies
from adamae.model.views import Views
from adamae.pipeline.loader import Batch
from adamae.training.config import Compile, TrainConfig
from adamae.training.distributed import Distributed, count_ranks
from adamae.training.tasks.task import Task

# DDP's option for broadcasting buffers at every step. Torch 2.15 warns of its old name, in every
# rank.
SYNC_BUFFERS = "broadcast_buffers"
if "forward_sync_buffers" in signature(DistributedDataParallel).parameters:
    SYNC_BUFFERS = "forward_sync_buffers"


def parallelize(
    task: Task,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    dist: Distributed,
    batch_size: int,
) -> nn.Module:
    """Return the model as the loop calls it.

    It is compiled if that is configured, has copies of its weights in bf16, and averages gradients
    if there are several ranks. From now on, only the optimizer may change the weights.

    DDP lays out its buckets again after the first backward pass, and a first step with other
    buckets is rounded differently: a resumed run would differ in the last bits. So two passes of
    `batch_size` black clips are thrown away: the first, and one whose gradients show where the
    buckets are.
    """
    if config.compile:
        compile_in_place(task.model, config.compile)
    if dist.world_size == 1:
        keep_bf16_copies(task.model, optimizer, config, dist.device)
        return task.model
    for module in task.model.modules():
        if isinstance(module, Views):
            module.compares_ranks = True
    # Buffers are not broadcast at every step: they are position tables, 7 MB that never change, and
    # statistics of a probe, over which its task averages.
    sync_buffers: dict[str, Any] = {SYNC_BUFFERS: False}
    model = DistributedDataParallel(task.model, gradient_as_bucket_view=True, **sync_buffers)
    # PyTorch's own hook divides each bucket by the number of ranks; without it, DDP divides every
    # gradient by a launch of its own.
    model._register_builtin_comm_hook(dist_c10d.BuiltinCommHookType.ALLREDUCE)
    # DDP times every 100th step otherwise, for which it waits for the GPU.
    model._set_ddp_runtime_logging_sample_rate(2**31 - 1)
    buffers = [buffer.clone() for buffer in task.model.buffers()]
    shape = (
        batch_size,
        config.model.num_frames,
        *config.model.frame_size,
        config.model.in_channels,
    )
    black = torch.zeros(shape, dtype=torch.uint8, device=dist.device)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=dist.device)
    batch = Batch(black, labels, [""] * batch_size, list(range(batch_size)))
    for _ in range(2):
        with autocast_to(dist.device, config.precision):
            loss, _ = task.loss(model, batch)
        loss.backward()
    # Made while gradients are views of the buckets, into which they are then cast directly.
    keep_bf16_copies(task.model, optimizer, config, dist.device)
    model.zero_grad(set_to_none=True)
    # The black clips have changed running statistics.
    for buffer, value in zip(task.model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    return model


def keep_bf16_copies(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, device: torch.device
) -> None:
    """Keep copies in bf16 of weights that are multiplied in it, and refresh them after each update.

    Autocast would cast every weight by a launch of its own in every step (model/casting.py).
    """
    if choose_precision(device, config.precision) != "bf16":
        return
    # Up to torch 2.14, DDPOptimizer, which cuts compiled graphs, refuses autograd functions.
    if config.compile and count_ranks() > 1:
        return
    refresh = keep_copies(model, torch.bfloat16)
    optimizer.register_step_post_hook(lambda *_: refresh())


def reduce_gradients(model: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Have DDP average gradients over ranks in the block's backward pass, or only add them up."""
    if isinstance(model, DistributedDataParallel) and not now:
        return model.no_sync()
    return nullcontext()


def compile_in_place(model: nn.Module, how: Compile = True, **options: Any) -> None:
    """Compile the model at its first call; its parameters keep their names.

    options: those of torch.compile.

    Matrix products of the backward pass read outputs of GELU and LayerNorm and weights in bf16.
    PyTorch keeps these from the forward pass, although they can be recomputed from other kept
    tensors without a product. compile=true recomputes them, for memory: a step of 64 clips takes
    7.9 GiB instead of 10.9, and moves 40.3 GB instead of 36.5 beside products and attention
    (ViT-Base, mask ratio 0.95, counted on the stand-in for CUDA). reduce-overhead, which is for
    speed, keeps them.
    """
    partitioner.ban_recompute_materialized_backward = how == "reduce-overhead"
    if how == "reduce-overhead":
        options |= {"mode": how}
    model.compile(**options)


def check_views(config: TrainConfig, world_size: int) -> None:
    """Raise InputError unless a step with views is one forward pass of several videos.

    Videos are compared within a pass. So global_batch alone says how many are, and a run resumes
    with any number of ranks that share it equally.
    """
    views = config.model.views
    if views == 1:
        return
    num_clips = config.clips_per_step(world_size)
    if num_clips == views:
        raise InputError(
            f"global_batch is {num_clips}, all views of one video, and model.views needs other"
            " videos to keep it apart from: raise batch_size, or global_batch if it is set"
        )
    if num_clips % (views * world_size):
        raise InputError(
            f"global_batch is {num_clips}, and model.views={views} needs a multiple of"
            f" {views * world_size}: all views of a video on one rank, and as many videos on each"
            f" of {format_count(world_size, 'rank')}. Change it, or start another number of ranks"
        )
    if num_clips > config.batch_size * world_size:
        raise InputError(
            f"global_batch is {num_clips}, several forward passes of batch_size="
            f"{config.batch_size}, and model.views compares all videos of a step in one: raise"
            f" batch_size to {num_clips // world_size}, start more ranks, or lower global_batch"
        )


def check_graphs(how: Compile, device_type: str, microbatches_per_step: int) -> None:
    """Raise InputError if compile=reduce-overhead cannot work.

    A CUDA graph has its gradients in its own memory, which the next forward pass of the same step
    would overwrite.
    """
    if how != "reduce-overhead":
        return
    if device_type != "cuda":
        raise InputError("compile=reduce-overhead needs a GPU: use compile=true on a CPU")
    if microbatches_per_step > 1:
        raise InputError(
            "compile=reduce-overhead takes one forward pass per step, and batch_size makes"
            f" {microbatches_per_step} of it: raise batch_size, or set compile=true"
        )
