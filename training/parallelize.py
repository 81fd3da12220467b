"""torch.compile and DDP around a model."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist_c10d
from torch import nn
from torch._functorch import config as partitioner
from torch.nn.parallel import DistributedDataParallel

from adamae.common.devices import autocast_to, choose_precision
from adamae.common.errors import InputError
from adamae.model.casting import keep_copies
from adamae.pipeline.loader import Batch
from adamae.training.config import Compile, TrainConfig
from adamae.training.distributed import Distributed, count_ranks
from adamae.training.tasks.task import Task


def parallelize(
    task: Task,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    dist: Distributed,
    batch_size: int,
) -> nn.Module:
    """Return the model as the loop calls it: compiled if asked for, with bf16 copies of its weights, and averaging
    gradients if there are several ranks. The weights must be there: from now on, only the optimizer may change them.

    DDP lays out its buckets again after the first backward pass, and a first step with other buckets rounds otherwise:
    resumed, a run would differ in the last bits. So passes of `batch_size` black clips are thrown away: the first, and
    one whose gradients show where the buckets are.
    """
    if config.compile:
        compile_in_place(task.model, config.compile)
    if dist.world_size == 1:
        keep_bf16_copies(task.model, optimizer, config, dist.device)
        return task.model
    # Buffers are position tables, 7 MB that never change, and a probe's statistics, which its task shares.
    model = DistributedDataParallel(
        task.model, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    model._register_builtin_comm_hook(
        dist_c10d.BuiltinCommHookType.ALLREDUCE
    )  # divides buckets, not gradients
    model._set_ddp_runtime_logging_sample_rate(
        2**31 - 1
    )  # each measurement waits for the GPU, at every 100th step
    before = [buffer.clone() for buffer in task.model.buffers()]
    shape = (
        batch_size,
        config.model.num_frames,
        *config.model.frame_size,
        config.model.in_channels,
    )
    black = torch.zeros(shape, dtype=torch.uint8, device=dist.device)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=dist.device)
    for _ in range(2):
        with autocast_to(dist.device, config.precision):
            loss, _ = task.loss(
                model, Batch(black, labels, [""] * batch_size, list(range(batch_size)))
            )
        loss.backward()
    keep_bf16_copies(task.model, optimizer, config, dist.device)
    model.zero_grad(set_to_none=True)
    for buffer, value in zip(task.model.buffers(), before, strict=True):
        buffer.copy_(value)
    return model


def keep_bf16_copies(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, device: torch.device
) -> None:
    """Where weights are multiplied in bf16, keep copies of them in it, refreshed after every update.

    Not of a compiled model in several ranks: up to torch 2.14, DDP's cutting of graphs refuses autograd functions.
    """
    if choose_precision(device, config.precision) == "bf16" and not (
        config.compile and count_ranks() > 1
    ):
        refresh = keep_copies(model, torch.bfloat16)
        optimizer.register_step_post_hook(lambda *_: refresh())


def reduce_gradients(model: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Have DDP average gradients over ranks in the backward pass of the block, or only accumulate them."""
    if isinstance(model, DistributedDataParallel) and not now:
        return model.no_sync()
    return nullcontext()


def compile_in_place(model: nn.Module, how: Compile = True, **options: Any) -> None:
    """Compile the model at its first call; its parameters keep their names. `options` are torch.compile's.

    What a matrix product of the backward pass reads, PyTorch keeps even where other kept tensors give it again at no
    product's cost: outputs of GELU and LayerNorm, weights in bf16. compile=true recomputes them, for memory: a step of
    64 clips takes 7.9 GiB instead of 10.9, and moves 40.3 GB instead of 36.5 beside products and attention (ViT-Base, ρ
    .95, counted on the stand-in for CUDA). reduce-overhead, which is for speed, keeps them.
    """
    partitioner.ban_recompute_materialized_backward = how == "reduce-overhead"
    if how == "reduce-overhead":
        options |= {"mode": how}
    model.compile(**options)


def check_graphs(how: Compile, device_type: str, microbatches_per_step: int) -> None:
    """Raise InputError where compile=reduce-overhead does not work: a graph's gradients lie in its own memory, which
    the next forward pass of the same step would overwrite."""
    if how != "reduce-overhead":
        return
    if device_type != "cuda":
        raise InputError("compile=reduce-overhead needs a GPU: use compile=true on a CPU")
    if microbatches_per_step > 1:
        raise InputError(
            "compile=reduce-overhead takes one forward pass per step, and batch_size makes"
            f" {microbatches_per_step} of it: raise batch_size, or set compile=true"
        )
