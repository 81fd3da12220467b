"""Count where the memory of a training step goes, byte by byte, on tensors without memory.

No GPU is needed, and a count takes seconds at any batch size.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import torch
import triton
from torch import Tensor
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
from adamae.model.encoders.teacher import Teacher
from adamae.pipeline.config import DataConfig
from adamae.training.config import TrainConfig
from adamae.training.optimizer import update
from adamae.training.tasks.pretraining import Pretraining
from adamae.training.timing import PretrainingStep, make_config, noise_clip

# In the order of the forward pass. An allocation between two parts counts for the one before.
PARTS = ("teacher", "tokenizer", "sampler", "encoder", "decoder", "loss")
# The labels of what is alive at the peak. `weight_copies` are the weights in bf16. `temporaries`
# are made and freed by the backward pass, by the update or within one kernel. `cublas` are the
# workspaces that cuBLAS and cuBLASLt share.
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
# The labels whose bytes do not depend on the batch.
FIXED = ("weights", "optimizer", "weight_copies", "gradients", "cublas")

# PyTorch's CUDA allocator rounds up to so many bytes.
ALLOCATION_UNIT = 512
# Of an H100 or H200.
MULTIPROCESSORS = 132
# PyTorch's CublasHandlePool.cpp, on GPUs of capability 9, 10 and 12 (8 MiB on others): cuBLAS and
# cuBLASLt share a workspace. From torch 2.15 on it is allocated for each product (pull request
# 194311); before, each thread that multiplies, of the forward and of the backward pass, keeps one.
CUBLAS_BYTES = 32 * 2**20
CUBLAS_THREADS = 0 if TorchVersion(torch.__version__) >= "2.15" else 2
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
# Bytes that no tensor owns: CUDA's context with loaded kernels, NCCL's buffers, and the fragments
# of the allocator.
RESERVE_GPU = 1.5e9

CAPACITIES_GB = (16, 24, 40, 80, 141)
# So many clips that activations dominate the peak, which is proportional to clips from there on.
AMPLE_BATCH = 64
# A frame that DALI decodes, of shards with frames of 342×256: widths are multiples of 16.
STORED_PIXELS = 352 * 256
# At most: DALI keeps 100 decoders, each of which has 8 surfaces in NV12.
NVDEC_BYTES = 100 * 8 * STORED_PIXELS * 3 // 2

# torch 2.11 does not count the arithmetic of attention on a CPU. It is that of a GPU.
aten = torch.ops.aten
for gpu_attention, cpu_attention in (
    (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu),
    (
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ),
):
    flop_registry.setdefault(cpu_attention, flop_registry[gpu_attention])


# The bytes that are alive at the peak of a step, by the labels of AT_PEAK.
Account = dict[str, int]


def predict(
    config: ModelConfig, batch_size: int, on_gpu: bool = True, in_buckets: bool = False
) -> Account:
    """Count a step as a GPU takes it in bf16, or, without `on_gpu`, as this CPU takes it.

    in_buckets: gradients are kept in DistributedDataParallel's buckets, which last from step to
    step. Not counted are the CUDA context, NCCL's own memory and the allocator's fragments.
    """
    task = _make_task(config)
    if not on_gpu:
        # A CPU without units for bf16 keeps no copies of weights in it.
        task.dist.device = torch.device("cpu")
    live = LiveBytes("weights", on_gpu)
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
    """Count the floating-point operations of a step, with those that checkpointing repeats."""
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
    """Predict a pre-training step of a run, and the largest batch of common GPUs.

    Return rows of a table, (`weights`, `344 MB`) or (`24 GB`, `at most 120 clips`). batch_size:
    by default that of the run.
    """
    if run.task != "pretrain":
        raise InputError(f"task is {run.task}; only the memory of pre-training is predicted")
    batch_size = batch_size or min(run.batch_size, run.clips_per_step(world_size=1))
    # Views of a video are in one batch.
    batch_size = round_up(batch_size, run.model.views)
    on_gpu = run.device != "cpu"
    at_peak = predict(run.model, batch_size, on_gpu)
    ample = predict(run.model, ample_batch(run.model), on_gpu)
    device = "a GPU" if on_gpu else "this CPU"
    total = format_bytes(sum(at_peak.values()))
    rows = [(f"{batch_size} clips", f"{total}, predicted for {device}: at the peak of a step")]
    for label, size in at_peak.items():
        if size:
            rows.append((label.replace("_", " "), format_bytes(size)))
    for capacity in CAPACITIES_GB:
        num_clips = largest_batch(run.model, ample, capacity * 1e9)
        rows.append((f"{capacity} GB", f"at most {num_clips} clips"))
    return rows


def ample_batch(config: ModelConfig) -> int:
    """Return AMPLE_BATCH, or a few clips more that are all views of some videos."""
    return round_up(AMPLE_BATCH, config.views)


def largest_batch(config: ModelConfig, ample: Account, capacity: float) -> int:
    """Return the maximum number of clips that fit into `capacity` bytes, beside those of DALI.

    ample: the account of `ample_batch(config)` clips.
    """
    height, width = config.frame_size
    # DALI holds the stored frames of the batch that it decodes, and the clips of those that are
    # prefetched (pipeline/loader.py).
    pixels_per_frame = STORED_PIXELS + DataConfig.prefetch * height * width
    loaded_per_clip = config.num_frames * 3 * pixels_per_frame
    fixed = sum(ample[label] for label in FIXED)
    per_clip = (sum(ample.values()) - fixed) / ample_batch(config) + loaded_per_clip
    available = capacity - RESERVE_GPU - NVDEC_BYTES - fixed
    num_clips = max(0, int(available / per_clip))
    return num_clips // config.views * config.views


def _make_task(config: ModelConfig) -> Pretraining:
    """Make a task whose weights have no memory, not even that of fake tensors."""
    # FakeTensorMode cannot initialize weights, as its tensors have no values; the meta device can.
    dist: Any = SimpleNamespace(device=torch.device("meta"))
    with dist.device:
        return Pretraining(make_config(config), None, dist)


def _allocate(task: Pretraining) -> None:
    """Give a task's weights, and those of its teacher, fake memory on the CPU."""
    task.model.to_empty(device="cpu")
    teacher = getattr(task.model.target, "teacher", None)
    if isinstance(teacher, Teacher):
        teacher.move_to(torch.device("cpu"))


def account(
    step: PretrainingStep, clip: Tensor, live: "LiveBytes", in_buckets: bool = False
) -> Account:
    """Count a step under `live`, which is active and has counted the weights.

    The model keeps the hooks by which allocations are labeled, so it is of no further use.
    """
    model = step.model
    for parameter in model.parameters():
        live.relabel(getattr(parameter, "cast_copy", None), "weight_copies")
        parameter.grad = torch.empty_like(parameter)
    live.label = "optimizer"
    # The first update allocates the optimizer's state.
    update(step.optimizer, 1e-4, None)
    live.label = "gradients"
    buckets = {}
    if in_buckets:
        for parameter in model.parameters():
            buckets[id(parameter)] = torch.empty_like(parameter, requires_grad=False)

    def keep_gradient(parameter: Tensor) -> None:
        # DDP copies a gradient into its bucket and frees it.
        if in_buckets:
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
    """Label allocations of later steps by the part that their forward pass has reached.

    Those of the backward pass and the update are "temporaries".
    """

    def set_label(label: str, *_inputs: Any) -> None:
        live.label = label

    def label_backward(_model: AdaMAE, _inputs: object, output: Any) -> None:
        output.loss.register_hook(partial(set_label, "temporaries"))

    parts = {
        "tokenizer": model.tokenizer,
        "sampler": model.token_sampler,
        "encoder": model.encoder,
    }
    if model.decoder is not None:
        parts["decoder"] = model.decoder
    teacher = getattr(model.target, "teacher", None)
    if isinstance(teacher, Teacher):
        parts["teacher"] = teacher.encoder
    for label, module in parts.items():
        module.register_forward_pre_hook(partial(set_label, label))
    # The losses follow the last part.
    last_part = model.encoder if model.decoder is None else model.decoder
    last_part.register_forward_hook(partial(set_label, "loss"))
    model.register_forward_hook(label_backward)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that are allocated in this block, now and at the peak.

    They are counted by label: `label` is that of the next storages. A storage that was allocated
    before the block counts from when an operation in the block returns a view of it.
    """

    def __init__(self, label: str, on_gpu: bool = False) -> None:
        """on_gpu: count the workspaces of CUDA's libraries too."""
        super().__init__()
        self.label = label
        self.on_gpu = on_gpu
        self.now: Counter[str] = Counter()
        if on_gpu:
            self.now["cublas"] = CUBLAS_THREADS * CUBLAS_BYTES
        self.at_peak: Counter[str] = Counter()
        # By the address of PyTorch's own object, which lives as long as the storage does.
        self._labels: dict[int, str] = {}

    def relabel(self, tensor: Tensor | None, label: str) -> None:
        """Count a tensor that has been counted before under another label."""
        if tensor is None:
            return
        storage = tensor.untyped_storage()
        size = _allocated(storage)
        self.now[self._labels[storage._cdata]] -= size
        self.now[label] += size
        self._labels[storage._cdata] = label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        if self.on_gpu:
            label, size = workspace(func.name(), args)
            # A workspace is alive, for a moment, beside everything that is.
            if size and self.now.total() + size > self.at_peak.total():
                self.at_peak = self.now.copy()
                self.at_peak[label] += size
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._labels:
            return
        size = _allocated(storage)
        self._labels[key] = self.label
        self.now[self.label] += size
        if self.now.total() > self.at_peak.total():
            self.at_peak = self.now.copy()
        finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.now[self._labels.pop(key)] -= size


def workspace(operator: str, inputs: Sequence[Any]) -> tuple[str, int]:
    """Return the bytes that an operator allocates for itself on a GPU, and the label of AT_PEAK."""
    if operator.startswith(PRODUCTS) and not CUBLAS_THREADS:
        return "cublas", CUBLAS_BYTES
    if operator == "aten::sum.dim_IntList":
        matrix, axes = inputs[:2]
        if matrix.dim() == 2 and axes == [0]:
            return "temporaries", column_sum_workspace(*matrix.shape)
    if "attention" in operator and "backward" in operator:
        return "temporaries", attention_workspace(inputs[1])
    return "", 0


def column_sum_workspace(rows: int, width: int) -> int:
    """Return the bytes that PyTorch allocates to sum the columns of a matrix [rows, width].

    Gradients of biases are such sums. In ATen's Reduce.cuh, setReduceConfig: a block of 4 × 32
    threads, each with 4 columns, sums 128 columns. As many blocks share the rows as keep all
    multiprocessors busy, with 16 to 256 rows per thread. global_memory_size then counts 128
    values of 4 bytes per column and block.
    """
    columns = ceil_div(width, 128)
    rows = ceil_div(rows, 4)
    blocks_that_fill = ceil_div(16 * MULTIPROCESSORS, columns)
    blocks = min(blocks_that_fill, ceil_div(rows, 16))
    blocks = max(blocks, ceil_div(rows, 256))
    return 4 * width * blocks * 128 if blocks > 1 else 0


def attention_workspace(q: Tensor) -> int:
    """Return the bytes that flash attention allocates for its backward pass, besides gradients.

    q: [B, H, M, d]. In PyTorch's flash_api.cpp, mha_bwd: a sum for each row, and the gradient of q
    with M padded to a multiple of 128 and d to one of 32, in fp32. If it must be deterministic,
    there are as many of these gradients as give every multiprocessor a head.
    """
    batch, heads, rows, width = q.shape
    rows = round_up(rows, 128)
    width = round_up(width, 32)
    splits = 1
    if torch.are_deterministic_algorithms_enabled():
        splits = ceil_div(MULTIPROCESSORS, batch * heads)
    return 4 * batch * heads * rows * (1 + splits * width)


def _allocated(storage: torch.UntypedStorage) -> int:
    """Return the bytes that the CUDA allocator takes for a storage."""
    return round_up(storage.nbytes(), ALLOCATION_UNIT)


@contextmanager
def _gpu_code_paths() -> Iterator[None]:
    """Send tensors without memory down the code paths of a GPU with bf16 units, in this block.

    Fake CUDA tensors would take them anyway, but PyTorch's backward pass asks for a real device.
    """
    choose_precision = devices.choose_precision
    Tensor.is_cuda = not triton.knobs.runtime.interpret
    devices.choose_precision = lambda device, configured: configured
    try:
        yield
    finally:
        # The attribute hides that of its base class, which is in C.
        del Tensor.is_cuda
        devices.choose_precision = choose_precision
