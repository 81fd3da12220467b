"""PyTorch's own checks of what custom operators promise.

These are schemas without hidden mutation, autograd, and fake tensors.
"""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from kernel_material import IDS, token_path_inputs
from test_crop_resize import CLIP as DECODED

from adamae.kernels import launch

# All ops: each has the file of its name.
OPS = sorted(
    path.stem
    for path in Path(launch.__file__).parent.glob("*.py")
    if "\n@triton_op(" in path.read_text()
)


def op_arguments(device: torch.device) -> dict[str, tuple]:
    """Return arguments for each op."""
    clip, logits, x, mask_token, _ = token_path_inputs(device)
    ids = IDS.to(device)
    scalar = torch.tensor(3, device=device)
    table = torch.randn(12, 8, device=device)
    pred = torch.randn(2, 3, 384, device=device, requires_grad=True)
    features = torch.randn(2, 3, 8, device=device, requires_grad=True)
    return {
        "crop_resize": (*(table.to(device) for table in DECODED), 4, 5, True),
        "gumbel_topk": (logits, 3, scalar, scalar),
        "keep_mask": (scalar, scalar, 2, 21, 6554, 1),
        "gather_tokens": (x, ids, table),
        "scatter_tokens": (features, mask_token, table, ids, ids),
        "masked_patch_loss": (pred, clip, ids, 2, 8, "mse", True),
        "patchify": (clip, ids, 2, 8, torch.bfloat16),
    }


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str, device: torch.device) -> None:
    import_module(f"adamae.kernels.{name}")
    op = getattr(torch.ops.adamae, name).default
    arguments = op_arguments(device)[name]
    if device.type == "cuda":
        torch.library.opcheck(op, arguments)
    else:
        # The interpreter reads values, which fake tensors have not; test_compile.py traces with
        # them.
        checks = ("test_schema", "test_autograd_registration")
        torch.library.opcheck(op, arguments, test_utils=checks)
