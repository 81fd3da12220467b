"""torch.compile and DistributedDataParallel, also together.

With compile=true in two ranks, PyTorch cuts the graph at the borders of DDP's buckets.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import SERVER
from torch import nn

from adamae.common.errors import InputError
from adamae.model.config import ModelConfig
from adamae.pipeline.config import DataConfig
from adamae.training import parallelize
from adamae.training.config import TrainConfig
from adamae.training.distributed import Distributed
from adamae.training.optimizer import make_optimizer, update
from adamae.training.parallelize import check_graphs, compile_in_place
from adamae.training.tasks.pretraining import Pretraining

RANKS = 2
# So small that the weights of a tiny model fill several buckets.
FIRST_BUCKET_BYTES = 2**18
CONFIG = ModelConfig(
    size="tiny",
    encoder_depth=1,
    decoder_depth=1,
    num_frames=4,
    image_size=32,
    patch_size=8,
    mask_ratio=0.75,
)


def noise_clip(seed: int) -> torch.Tensor:
    """Return two clips of noise, uint8 [2, 4, 32, 32, 3], the same for a seed."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2, 4, 32, 32, 3), dtype=torch.uint8, generator=noise)


def accumulate(model: nn.Module, rank: int, in_bf16: bool) -> None:
    """Run two forward and backward passes; DDP averages gradients in the second."""
    zero = torch.zeros((), dtype=torch.int64)
    for number in range(2):
        with parallelize.reduce_gradients(model, now=number == 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
                loss = model(noise_clip(2 * rank + number), zero, zero).loss
            (loss / 2).backward()


def compare(rank: int, folder: Path, compiled: bool) -> None:
    """Write the largest relative error of gradients in two ranks, over two steps, to `folder`.

    It is that of a compiled graph, or of gradients in bf16 that are cast into DDP's buckets. Each
    rank calls this in a process of its own.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    dist._DEFAULT_FIRST_BUCKET_BYTES = FIRST_BUCKET_BYTES
    # Inductor would take a minute, and has no part in cutting the graph.
    parallelize.compile_in_place = partial(compile_in_place, backend="aot_eager")
    # Also on a CPU without units for bf16.
    parallelize.choose_precision = lambda device, wanted: wanted
    torch.manual_seed(0)
    precision = "fp32" if compiled else "bf16"
    config = TrainConfig(
        DataConfig(shards="none"), model=CONFIG, compile=compiled, precision=precision
    )
    ranks = Distributed("cpu")
    ranks.rank = rank
    ranks.world_size = RANKS
    task = Pretraining(config, None, ranks)
    optimizer = make_optimizer(task.parameter_groups(), config.optimizer)
    alone = copy.deepcopy(task.model).eval()
    model = parallelize.parallelize(task, optimizer, config, ranks, batch_size=2).eval()
    assert all(p.grad is None for p in model.parameters()), "the warm-up left gradients"
    errors = []
    for _ in range(2):
        alone.load_state_dict(task.model.state_dict())
        for other in range(RANKS):
            accumulate(alone, other, not compiled)
        accumulate(model, rank, not compiled)
        for own, plain in zip(task.model.parameters(), alone.parameters(), strict=True):
            difference = own.grad - plain.grad / RANKS
            errors.append((difference.norm() / (1e-9 + plain.grad.norm())).item())
        alone.zero_grad()
        # The gradient has been cast into the bucket, once.
        assert not hasattr(task.model.encoder.blocks[0].mlp.fc1.weight, "bucket")
        update(optimizer, 1e-3, clip_grad_norm=None)
    (folder / f"{rank}").write_text(str(max(errors)), encoding="utf-8")
    dist.destroy_process_group()


# It takes 19 s beside other work, as three processes import PyTorch.
@pytest.mark.parametrize(
    ("compiled", "max_error"), [(False, 1e-6), pytest.param(True, 1e-5, marks=pytest.mark.slow)]
)
def test_gradients_of_two_ranks_are_the_plain_ones(
    compiled: bool, max_error: float, tmp_path: Path
) -> None:
    """Compiled, and with bf16 copies whose gradients go straight into the buckets."""
    processes = [
        SERVER.Process(target=compare, args=(rank, tmp_path, compiled)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(280)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * RANKS
    for rank in range(RANKS):
        assert float((tmp_path / f"{rank}").read_text(encoding="utf-8")) < max_error


def test_cuda_graphs_are_refused_where_they_do_not_work() -> None:
    with pytest.raises(InputError, match="compile=reduce-overhead needs a GPU"):
        check_graphs("reduce-overhead", "cpu", 1)
    with pytest.raises(InputError, match="takes one forward pass per step, and batch_size makes 2"):
        check_graphs("reduce-overhead", "cuda", 2)
    check_graphs("reduce-overhead", "cuda", 1)
    check_graphs(True, "cpu", 2)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [True, "reduce-overhead"])
def test_a_compiled_step_on_a_gpu_learns_what_the_plain_one_does(how: Any) -> None:
    from adamae.training.timing import PretrainingStep
    from adamae.training.timing import noise_clip as make_clip

    device = torch.device("cuda")
    losses = []
    for compiled in (False, how):
        torch.manual_seed(0)
        step = PretrainingStep.of(CONFIG, device, compiled)
        clip = make_clip(CONFIG, 4, device)
        step.model.eval()
        # A graph is recorded in the second one, and replayed from the third on.
        losses.append([step(clip)["loss"].item() for _ in range(6)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[0][-1] != losses[0][0]
