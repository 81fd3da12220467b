"""Count where the memory of a training step goes, byte by byte, on tensors without memory: no GPU is needed."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import torch
import triton
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from adamae.common import devices
from adamae.common.arithmetic import ceil_div, round_up
from adamae.common.errors import InputError
from adamae.common.logging import format_bytes
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.weights.teachers import Teacher
from adamae.pipeline.config import DataConfig
from adamae.training.config import TrainConfig
from adamae.training.optimizer import update
from adamae.training.tasks.pretraining import Pretraining
from adamae.training.timing import PretrainingStep, make_config, noise_clip

# In the order of the forward pass. What happens between two parts counts for the one before; the loss comes last.
PARTS = ("teacher", "tokenizer", "sampler", "encoder", "decoder", "loss")
# What is alive at the peak. `weight_copies` are the weights in bf16. `temporaries` are made by the backward pass or the
# update and freed after it, as what a kernel allocates for itself; `cublas` are the workspaces that cuBLAS and cuBLASLt
# share.
AT_PEAK = (
    "weights",
    "optimizer",
    "weight_copies",
    "clip",
    "cublas",
    *PARTS,
    "gradients",
    "temporaries",
)
FIXED = (
    "weights",
    "optimizer",
    "weight_copies",
    "gradients",
    "cublas",
)  # what does not depend on the batch

ALLOCATION_UNIT = 512  # bytes; PyTorch's CUDA allocator rounds up to it
MULTIPROCESSORS = 132  # of an H100 or H200
# PyTorch's CublasHandlePool.cpp, on GPUs of capability 9, 10 and 12 (8 MiB on others): cuBLAS and cuBLASLt share
# a workspace, from torch 2.15 on for one product (pull request 194311), before it held by every thread that multiplies.
CUBLAS_BYTES = 32 * 2**20
CUBLAS_THREADS = (
    0 if TorchVersion(torch.__version__) >= "2.15" else 2
)  # of the forward and of the backward pass
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
# What no tensor owns: CUDA's context with loaded kernels, NCCL's buffers, the allocator's fragments.
RESERVE_GPU = 1.5e9

CAPACITIES_GB = (16, 24, 40, 80, 141)
# Large enough for activations to dominate the peak, which is proportional to clips from there on.
AMPLE_BATCH = 64
# A frame that DALI decodes, for shards of 342×256.
STORED_PIXELS = 352 * 256
# At most: DALI keeps 100 decoders, each of which has 8 surfaces in NV12.
NVDEC_BYTES = 100 * 8 * STORED_PIXELS * 3 // 2

# Attention on a CPU, which torch 2.11 does not count, as on a GPU.
aten = torch.ops.aten
for counted, left_out in (
    (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu),
    (
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ),
):
    flop_registry.setdefault(left_out, flop_registry[counted])


Account = dict[str, int]  # bytes that are alive at the peak of a step, by AT_PEAK


def predict(
    config: ModelConfig, batch_size: int, on_gpu: bool = True, in_buckets: bool = False
) -> Account:
    """Count a step as a GPU takes it in bf16, or as this CPU does, in a few seconds for any batch size.

    in_buckets: gradients are kept in DistributedDataParallel's buckets, which last from step to step. Not counted: the
    CUDA context, NCCL's own memory, the allocator's fragmentation.
    """
    task, live = _make_task(config), LiveBytes("weights", on_gpu)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _gpu_code_paths() if on_gpu else nullcontext(),
        live,
    ):
        _allocate(task)
        step = PretrainingStep(task)
        live.label = "clip"
        return account(step, noise_clip(config, batch_size, torch.device("cpu")), live, in_buckets)


def count_flops(config: ModelConfig, batch_size: int) -> int:
    """Count the arithmetic of a step, with what activation checkpointing repeats."""
    task = _make_task(config)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _gpu_code_paths(),
        FlopCounterMode(display=False) as flops,
    ):
        _allocate(task)
        PretrainingStep(task)(noise_clip(config, batch_size, torch.device("cpu")))
    return flops.get_total_flops()


def describe_memory(run: TrainConfig, batch_size: int | None = None) -> list[tuple[str, str]]:
    """Predict a pre-training step of a run; return a line for each part of it, and the largest batch of common GPUs."""
    if run.task != "pretrain":
        raise InputError(f"task is {run.task}; only the memory of pre-training is predicted")
    batch_size = batch_size or min(run.batch_size, run.clips_per_step(world_size=1))
    on_gpu = run.device != "cpu"
    at_peak, ample = (predict(run.model, number, on_gpu) for number in (batch_size, AMPLE_BATCH))
    where = "predicted for a GPU" if on_gpu else "predicted for this CPU"
    return [
        (
            f"{batch_size} clips",
            f"{format_bytes(sum(at_peak.values()))}, {where}: at the peak of a step",
        ),
        *((label.replace("_", " "), format_bytes(size)) for label, size in at_peak.items() if size),
        *(
            (f"{size} GB", f"at most {largest_batch(run.model, ample, size * 1e9)} clips")
            for size in CAPACITIES_GB
        ),
    ]


def largest_batch(config: ModelConfig, ample: Account, capacity: float) -> int:
    """Return the clips that fit into `capacity` bytes, from the account of AMPLE_BATCH, with what DALI holds of them:
    the stored frames of the batch that it decodes, and the clips of those that are prefetched (pipeline/loader.py)."""
    height, width = config.frame_size
    loaded = config.num_frames * 3 * (STORED_PIXELS + DataConfig.prefetch * height * width)
    fixed = sum(ample[label] for label in FIXED)
    per_clip = (sum(ample.values()) - fixed) / AMPLE_BATCH + loaded
    return max(0, int((capacity - RESERVE_GPU - NVDEC_BYTES - fixed) / per_clip))


def _make_task(config: ModelConfig) -> Pretraining:
    nowhere: Any = SimpleNamespace(
        device=torch.device("meta")
    )  # FakeTensorMode cannot initialize: it has no values
    with nowhere.device:
        return Pretraining(make_config(config), None, nowhere)


def _allocate(task: Pretraining) -> None:
    """Give a task's weights, and those of its teacher, fake memory on the CPU."""
    task.model.to_empty(device="cpu")
    teacher = getattr(task.model.target, "teacher", None)
    if isinstance(teacher, Teacher):
        teacher.place(torch.device("cpu"))


def account(
    step: PretrainingStep, clip: Tensor, live: "LiveBytes", in_buckets: bool = False
) -> Account:
    """Count a step under `live`, which is active and has counted the weights; the model keeps the hooks for that."""
    model = step.model
    for parameter in model.parameters():
        live.relabel(getattr(parameter, "cast_copy", None), "weight_copies")
        parameter.grad = torch.empty_like(parameter)
    live.label = "optimizer"
    update(step.optimizer, 1e-4, None)  # the first one makes the optimizer's state
    live.label = "gradients"
    buckets = {
        id(p): torch.empty_like(p, requires_grad=False) for p in model.parameters() if in_buckets
    }

    def keep_gradient(parameter: Tensor) -> None:
        if in_buckets:  # its own copy is freed once it has been copied there
            parameter.grad = buckets[id(parameter)]
        live.relabel(parameter.grad, "gradients")

    live.label = "tokenizer"
    live.at_peak = live.now.copy()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(keep_gradient)
    label_parts(model, live)
    step(clip)
    return {label: live.at_peak[label] for label in AT_PEAK}


def label_parts(model: AdaMAE, live: "LiveBytes") -> None:
    """Label what steps allocate by the part that its forward pass has reached, and "temporaries" after it."""

    def enter(part: str) -> Callable[..., None]:
        return lambda *_: setattr(live, "label", part)

    def await_backward(_model: AdaMAE, _inputs: object, output: Any) -> None:
        output.loss.register_hook(enter("temporaries"))

    teacher = getattr(model.target, "teacher", None)
    first_part = teacher.encoder if isinstance(teacher, Teacher) else nn.Identity()
    modules = (first_part, model.tokenizer, model.token_sampler, model.encoder, model.decoder)
    for part, module in zip(PARTS, modules, strict=False):
        module.register_forward_pre_hook(enter(part))
    model.decoder.register_forward_hook(enter("loss"))
    model.register_forward_hook(await_backward)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all live storages allocated in this block by label, now and at the peak.

    A storage allocated before counts from when an operation in this block returns a view of it. `label` says what
    the next storages are for. on_gpu: count the workspaces of CUDA's libraries too.
    """

    def __init__(self, label: str, on_gpu: bool = False) -> None:
        super().__init__()
        self.label, self.on_gpu = label, on_gpu
        self.now: Counter[str] = Counter(cublas=CUBLAS_THREADS * CUBLAS_BYTES if on_gpu else 0)
        self.at_peak: Counter[str] = Counter()
        self._labels: dict[int, str] = {}

    def relabel(self, tensor: Tensor | None, label: str) -> None:
        if tensor is not None:
            storage = tensor.untyped_storage()
            self.now[self._labels[storage._cdata]] -= _allocated(storage)
            self.now[label] += _allocated(storage)
            self._labels[storage._cdata] = label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        label, size = workspace(func.name(), args) if self.on_gpu else ("", 0)
        if (
            size and self.now.total() + size > self.at_peak.total()
        ):  # alive for a moment beside all that is now
            self.at_peak = self.now.copy()
            self.at_peak[label] += size
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, _allocated(storage)
        if key not in self._labels:
            self._labels[key] = self.label
            self.now[self.label] += size
            if self.now.total() > self.at_peak.total():
                self.at_peak = self.now.copy()
            finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.now[self._labels.pop(key)] -= size


def workspace(operator: str, inputs: Sequence[Any]) -> tuple[str, int]:
    """Return what an operator allocates for itself, and the label of AT_PEAK that it counts for."""
    if operator.startswith(PRODUCTS) and not CUBLAS_THREADS:
        return "cublas", CUBLAS_BYTES
    if operator == "aten::sum.dim_IntList" and inputs[0].dim() == 2 and inputs[1] == [0]:
        return "temporaries", column_sum_workspace(*inputs[0].shape)
    if "attention" in operator and "backward" in operator:
        return "temporaries", attention_workspace(inputs[1])
    return "", 0


def column_sum_workspace(rows: int, width: int) -> int:
    """Return the bytes that PyTorch allocates to sum the columns of a matrix [rows, width], as biases' gradients are.

    ATen's Reduce.cuh, setReduceConfig: blocks of 4 x 32 threads, each with 4 columns, share a column's rows, as many as
    keep all multiprocessors busy with 16 to 256 rows a thread; its global_memory_size multiplies what they hand over by
    a block's 128 columns.
    """
    columns = ceil_div(width, 128)
    rows = ceil_div(rows, 4)
    blocks_that_fill = ceil_div(16 * MULTIPROCESSORS, columns)
    blocks = min(blocks_that_fill, ceil_div(rows, 16))
    blocks = max(blocks, ceil_div(rows, 256))
    return 4 * width * blocks * 128 if blocks > 1 else 0


def attention_workspace(q: Tensor) -> int:
    """Return the bytes that flash attention allocates for its backward pass over q [B, H, M, d] besides gradients.

    PyTorch's flash_api.cpp, mha_bwd: in fp32, a sum for each row, and q's gradient with rows padded to 128 and width to
    32; if it must be deterministic, as many of these as it takes to give every multiprocessor a head.
    """
    batch, heads, rows, width = q.shape
    rows = round_up(rows, 128)
    width = round_up(width, 32)
    splits = 1
    if torch.are_deterministic_algorithms_enabled():
        splits = ceil_div(MULTIPROCESSORS, batch * heads)
    return 4 * batch * heads * rows * (1 + splits * width)


def _allocated(storage: torch.UntypedStorage) -> int:
    return round_up(storage.nbytes(), ALLOCATION_UNIT)


@contextmanager
def _gpu_code_paths() -> Iterator[None]:
    """Send tensors without memory down the paths that the project's ops take on a GPU with bf16 units.

    They are not CUDA tensors because PyTorch's backward would then ask for a real device.
    """
    choose_precision = devices.choose_precision
    Tensor.is_cuda = not triton.knobs.runtime.interpret
    devices.choose_precision = lambda device, configured: configured
    try:
        yield
    finally:
        del Tensor.is_cuda  # which hides that of its base class
        devices.choose_precision = choose_precision
