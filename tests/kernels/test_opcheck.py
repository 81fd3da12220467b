"""PyTorch's own checks of what custom operators promise: schemas without hidden mutation, autograd, fake tensors."""

import pytest
import torch

from kernels.gather_tokens import gather_tokens_op
from kernels.gumbel_topk import gumbel_topk_op
from kernels.masked_patch_loss import masked_patch_loss_op
from kernels.patchify import patchify_op
from kernels.sampling_loss import sampling_loss_op
from kernels.scatter_tokens import scatter_tokens_op
from tests.kernels.test_references import IDS, token_path_inputs


def op_arguments(device):
    clip, logits, x, mask_token, _ = token_path_inputs(device)
    ids, scalar = IDS.to(device), torch.tensor(3, device=device)
    table, pred = torch.randn(12, 8, device=device), torch.randn(2, 3, 384, device=device, requires_grad=True)
    features = torch.randn(2, 3, 8, device=device, requires_grad=True)
    return {
        gumbel_topk_op: (logits, 3, scalar, scalar),
        gather_tokens_op: (x, ids, table),
        scatter_tokens_op: (features, mask_token, table, ids, ids),
        masked_patch_loss_op: (pred, clip, ids, 2, 8, "mse", True),
        patchify_op: (clip, ids, 2, 8, torch.bfloat16),
        sampling_loss_op: (torch.log_softmax(logits, 1).detach().requires_grad_(), ids, torch.rand(2, 3).to(device)),
    }


@pytest.mark.parametrize("number", range(6))
def test_opcheck(number, device):
    op, arguments = list(op_arguments(device).items())[number]
    if device.type == "cuda":
        torch.library.opcheck(op, arguments)
    else:  # the interpreter reads values, which fake tensors have not; tests/kernels/test_compile.py traces with them
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_autograd_registration"))
