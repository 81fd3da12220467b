"""Compile every kernel as the presets use it, on any machine, and list what it takes of a GPU.

`python tests/kernels/compile_kernels.py [80 90 100]` prints one JSON line per kernel, configuration
and compute
capability: registers a thread, shared memory in bytes, stack and local memory in bytes (where
spills go).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

# An interpreted kernel cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from adamae.kernels import launch
from adamae.kernels.clip_tables import lay_out_tables
from adamae.kernels.crop_resize import DecodedClips, crop_resize
from adamae.kernels.gather_tokens import gather_tokens
from adamae.kernels.gumbel_topk import gumbel_topk
from adamae.kernels.keep_mask import keep_mask
from adamae.kernels.masked_patch_loss import masked_patch_loss
from adamae.kernels.patchify import patchify
from adamae.kernels.scatter_tokens import scatter_tokens
from adamae.model.config import SIZES, ModelConfig

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Launcher:
    """Stands in for wrap_triton(kernel): notes what a launch would compile, and launches nothing.

    sources: where it notes them, with the number of warps, by all that distinguishes them.
    """

    def __init__(self, kernel: Any, sources: dict[str, tuple[ASTSource, int]]) -> None:
        self.kernel = kernel
        self.sources = sources

    def __getitem__(self, grid: tuple) -> Any:
        return self.note

    def note(self, *args: Any, num_warps: int = 4, **constants: Any) -> None:
        """Specialize a kernel as Triton does.

        Constants and ones are compiled in, and that numbers and addresses are multiples of 16.
        """
        values = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
        signature: dict[str, str] = {}
        constexprs = {}
        attributes = {}
        for index, parameter in enumerate(self.kernel.params):
            name = parameter.name
            value = values[name]
            is_int = isinstance(value, int)
            if parameter.is_constexpr or (is_int and value == 1):
                signature[name] = "constexpr"
                constexprs[(index,)] = value
                continue
            signature[name] = mangle_type(value)
            if isinstance(value, torch.Tensor) or (is_int and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        parts = [self.kernel.__name__, signature, str(constexprs), str(attributes), num_warps]
        source = ASTSource(self.kernel, signature, constexprs, attributes)
        self.sources[json.dumps(parts)] = source, num_warps


def record_presets() -> dict[str, tuple[ASTSource, int]]:
    """Return what forward and backward of every preset would compile.

    On the meta device: tensors have shapes and no memory.
    """
    sources: dict[str, tuple[ASTSource, int]] = {}
    launch.triton_on_cpu = True
    for name, module in sys.modules.items():
        if name.startswith("adamae.kernels.") and hasattr(module, "wrap_triton"):
            module.wrap_triton = partial(Launcher, sources=sources)
    with torch.device("meta"):
        for size in SIZES:
            tiny = {"num_frames": 8, "image_size": 48, "patch_size": 8} if size == "tiny" else {}
            record_path(ModelConfig(size, **tiny), torch.bfloat16)
        record_path(ModelConfig("base"), torch.float32)
        for tokens in (2, 8192):
            gumbel_topk(torch.empty(2, tokens), 1, 0, 0)
        tables = [
            torch.empty(shape, dtype=getattr(torch, name)) for name, shape in lay_out_tables(32, 16)
        ]
        clips = DecodedClips(torch.empty(2**20, dtype=torch.uint8), *tables)
        for height, width in ((224, 224), (219, 173)):
            for any_wide in (False, True):
                crop_resize(clips, height, width, any_wide)
    return sources


def record_path(config: ModelConfig, dtype: torch.dtype) -> None:
    """Run everything between tokens and loss, forward and backward."""
    batch = 32
    tokens = config.num_tokens
    k = config.num_visible
    size = config.dimensions
    # fp32 whatever the rest is (model/masking.py).
    logits = torch.empty(batch, tokens, requires_grad=True)
    visible, masked, log_probs = gumbel_topk(logits, k, 0, 0)
    patch = config.tubelet_size, config.patch_size
    clip = torch.empty(batch, config.num_frames, *config.frame_size, 3, dtype=torch.uint8)
    kinds = [("mse", True)]
    if dtype == torch.bfloat16:
        kinds += [("mse", False), ("l1", True), ("l1", False)]
    for kind, normalize in kinds:
        patchify(clip, None, *patch, dtype)
        pred = torch.empty(batch, tokens - k, config.patch_values, dtype=dtype, requires_grad=True)
        losses = masked_patch_loss(pred, clip, masked, *patch, kind, normalize)
        losses.sum().backward()
    log_probs.sum().backward()
    x = torch.empty(batch, tokens, size.encoder_width, dtype=dtype, requires_grad=True)
    keep_mask(x, 0.1, 0, 0, 1)
    gather_tokens(x, visible, torch.empty(tokens, size.encoder_width)).sum().backward()
    features = torch.empty(batch, k, size.decoder_width, dtype=dtype, requires_grad=True)
    mask_token = torch.empty(size.decoder_width, requires_grad=True)
    table = torch.empty(tokens, size.decoder_width)
    scatter_tokens(features, mask_token, table, visible, masked).sum().backward()


def resources(source: ASTSource, num_warps: int, capability: int) -> dict[str, Any]:
    """Compile a kernel; return what it takes of a GPU of this compute capability."""
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    counts = {}
    for name in ("REG", "STACK", "LOCAL"):
        counts[name] = int(re.search(rf"{name}:(\d+)", usage)[1])
    return {
        "kernel": source.fn.__name__,
        "capability": capability,
        "num_warps": num_warps,
        "registers": counts["REG"],
        "shared_bytes": compiled.metadata.shared,
        "spill_bytes": counts["STACK"] + counts["LOCAL"],
    }


if __name__ == "__main__":
    capabilities = [int(word) for word in sys.argv[1:]] or [80, 90, 100]
    for source, num_warps in record_presets().values():
        for capability in capabilities:
            print(json.dumps(resources(source, num_warps, capability)), flush=True)
