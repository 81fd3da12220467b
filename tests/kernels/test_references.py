"""Gradients of the references, a value that no other project computes, and how misuse is reported.

Other values: tests/model/test_huggingface.py, test_golden.py, and test_masking.py for the sampling
loss.
"""

from collections.abc import Callable

import pytest
import torch
from kernel_material import CLIP, IDS
from torch import Tensor
from torch.autograd import gradcheck

from adamae.common.errors import InputError
from adamae.kernels.gather_tokens import gather_tokens
from adamae.kernels.gumbel_topk import gumbel_topk
from adamae.kernels.keep_mask import keep_mask
from adamae.kernels.masked_patch_loss import masked_patch_loss
from adamae.kernels.patchify import patchify
from adamae.kernels.scatter_tokens import scatter_tokens
from adamae.model.sampling_loss import sampling_loss

TABLE = torch.zeros(12, 4)


def test_gradients_of_the_references() -> None:
    def double(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    visible = torch.tensor([[0, 2], [1, 4]])
    masked = torch.tensor([[1, 3, 4], [0, 2, 3]])
    table = torch.randn(5, 4, dtype=torch.float64)
    losses = torch.rand(2, 3)
    clip = CLIP[:, :2, :4, :6]

    def log_probs(logits: Tensor) -> Tensor:
        return gumbel_topk(logits, 2, 1, 0)[2]

    def gather(x: Tensor) -> Tensor:
        return gather_tokens(x, visible, table)

    def scatter(features: Tensor, mask_token: Tensor) -> Tensor:
        return scatter_tokens(features, mask_token, table, visible, masked)

    def sampling(log_probs: Tensor) -> Tensor:
        return sampling_loss(log_probs, masked, losses)

    def squared(pred: Tensor) -> Tensor:
        return masked_patch_loss(pred, clip, visible, 2, 2, "mse")

    def absolute(pred: Tensor) -> Tensor:
        return masked_patch_loss(pred, clip, visible, 2, 2, "l1")

    assert gradcheck(log_probs, double(2, 5))
    assert gradcheck(gather, double(2, 5, 4))
    assert gradcheck(scatter, (double(2, 2, 4), double(4)))
    assert gradcheck(sampling, double(2, 5))
    assert gradcheck(squared, double(2, 2, 24))
    assert gradcheck(absolute, double(2, 2, 24))


def test_the_absolute_error_on_a_worked_example() -> None:
    """A patch of two lines with values 10 and 20 in red, 7 and 7 in green, 0 and 255 in blue."""
    clip = torch.tensor([[10, 7, 0], [20, 7, 255]] * 2, dtype=torch.uint8).view(1, 1, 2, 2, 3)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    zeros = torch.zeros(1, 1, 12)
    raw = masked_patch_loss(zeros, clip, ids, 1, 2, "l1", normalize=False)
    assert raw.item() == pytest.approx((10 + 20 + 7 + 7 + 0 + 255) / 6 / 255, rel=1e-6)
    # The unbiased deviation of (a, b, a, b) is |a - b| / sqrt 3: normalized values are -+ sqrt(3) /
    # 2, and 0 in the flat channel.
    normalized = masked_patch_loss(zeros, clip, ids, 1, 2, "l1")
    assert normalized.item() == pytest.approx(2 / 3 * 3**0.5 / 2, rel=1e-4)


@pytest.mark.parametrize("bad", [[torch.nan], [torch.inf], [-torch.inf] * 5])
def test_logits_that_cannot_be_sampled_from_raise(bad: list[float]) -> None:
    logits = torch.zeros(2, 5)
    logits[1, : len(bad)] = torch.tensor(bad)
    with pytest.raises(RuntimeError, match="NaN or"):
        gumbel_topk(logits, 2, 0, 0)


# A part of the message, and the call that raises it.
MISUSES: dict[str, Callable[[], object]] = {
    "k is 6": lambda: gumbel_topk(torch.zeros(1, 5), 6, 0, 0),
    "logits are torch.int64": lambda: gumbel_topk(torch.zeros(1, 5, dtype=torch.int64), 1, 0, 0),
    "give 1 to 16384": lambda: gumbel_topk(torch.zeros(1, 16385), 1, 0, 0),
    "seed is torch.float32": lambda: gumbel_topk(torch.zeros(1, 5), 1, torch.zeros(()), 0),
    "p is 1.0": lambda: keep_mask(torch.zeros(1, 5), 1.0, 0, 0, 1),
    "the layer is 0": lambda: keep_mask(torch.zeros(1, 5), 0.1, 0, 0, 0),
    "ids are torch.int32": lambda: gather_tokens(torch.zeros(2, 12, 4), IDS.int(), TABLE),
    "one row of ids": lambda: gather_tokens(torch.zeros(3, 12, 4), IDS, TABLE),
    "the table of positions has shape": lambda: gather_tokens(
        torch.zeros(2, 12, 4), IDS, torch.zeros(12, 5)
    ),
    "fixed": lambda: gather_tokens(
        torch.zeros(2, 12, 4), IDS, torch.zeros(12, 4, requires_grad=True)
    ),
    r"visible_ids has shape \(2, 3\): give": lambda: scatter_tokens(
        torch.zeros(2, 2, 4), torch.zeros(4), TABLE, IDS, IDS
    ),
    "the mask token has shape": lambda: scatter_tokens(
        torch.zeros(2, 3, 4), torch.zeros(5), TABLE, IDS, IDS
    ),
    "the clip is torch.float32": lambda: patchify(CLIP.float(), None, 2, 8),
    r"give \[B, T, H, W, C\]": lambda: patchify(CLIP[0], None, 2, 8),
    "pred has shape": lambda: masked_patch_loss(torch.zeros(2, 3, 383), CLIP, IDS, 2, 8),
    "kind is 'l2'": lambda: masked_patch_loss(torch.zeros(2, 3, 384), CLIP, IDS, 2, 8, "l2"),
    "loss_per_token has shape": lambda: sampling_loss(torch.zeros(2, 12), IDS, torch.zeros(2, 2)),
    "masked_ids are empty": lambda: sampling_loss(
        torch.zeros(2, 12), IDS[:, :0], torch.zeros(2, 0)
    ),
}


@pytest.mark.parametrize("sentence", MISUSES)
def test_misuse_is_reported_before_anything_is_launched(sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        MISUSES[sentence]()
