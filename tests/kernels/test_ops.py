"""Every op's Triton path, forward and backward, against its reference.

Interpreted on a CPU, compiled on a GPU.
"""

from functools import partial
from typing import Any

import pytest
import torch
from kernel_material import run_reference
from torch import Tensor

from adamae.kernels.gather_tokens import gather_tokens
from adamae.kernels.gumbel_topk import gumbel_topk
from adamae.kernels.keep_mask import keep_mask
from adamae.kernels.masked_patch_loss import masked_patch_loss
from adamae.kernels.patchify import patchify
from adamae.kernels.scatter_tokens import scatter_tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLIP_LAYOUTS = ("contiguous", "cropped")


def random_ids(batch: int, tokens: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Split the tokens of each row at random into k and the others, each ascending."""
    generator = torch.Generator().manual_seed(tokens)
    order = torch.rand(batch, tokens, generator=generator).argsort(dim=1)
    first = order[:, :k].sort(dim=1).values
    others = order[:, k:].sort(dim=1).values
    return first.to(device), others.to(device)


def random_clip(layout: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Make a random clip; a cropped one is a view, and its rows are not contiguous."""
    batch, frames, height, width, channels = shape
    larger = (batch, frames, height + 3, width + 5, channels)
    generator = torch.Generator().manual_seed(3)
    clip = torch.randint(0, 256, larger, dtype=torch.uint8, generator=generator)
    clip = clip[:, :, 1 : 1 + height, 2 : 2 + width]
    if layout == "contiguous":
        clip = clip.contiguous()
    return clip.to(device)


def assert_as_good(output: Tensor, rounded: Tensor, exact: Tensor) -> None:
    """Check that an output errs at most twice as much as plain PyTorch does in the same precision.

    Both are compared with the same computation in fp32.
    """
    # The interpreter cuts bf16 off where a GPU rounds it.
    factor = 2 if output.is_cuda else 4
    floor = 1e-6 * exact.abs().max().clamp(min=1)
    error = (output.cpu().float() - exact).abs().max()
    allowed = factor * (rounded.float() - exact).abs().max() + floor
    assert error <= allowed, f"{error} > {allowed}"


@pytest.mark.parametrize(
    ("batch", "tokens", "k"), [(3, 37, 5), (1, 2, 1), (2, 129, 129), (2, 200, 0), (2, 1568, 78)]
)
def test_gumbel_topk(device: torch.device, batch: int, tokens: int, k: int) -> None:
    # Half of each row of a larger tensor: rows are not contiguous.
    logits = torch.randn(batch, 2 * tokens, device=device)[:, :tokens].requires_grad_()
    weight = torch.randn(batch, tokens, device=device)
    reference = logits.detach().cpu().clone().requires_grad_()
    visible, masked, log_probs = gumbel_topk(logits, k, -7, 2**32 - 2)
    expected = run_reference(gumbel_topk, reference, k, -7, 2**32 - 2)
    assert torch.equal(visible.cpu(), expected[0])
    assert torch.equal(masked.cpu(), expected[1])
    torch.testing.assert_close(log_probs.cpu(), expected[2])
    (log_probs * weight).sum().backward()
    (expected[2] * weight.cpu()).sum().backward()
    torch.testing.assert_close(logits.grad.cpu(), reference.grad)


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 1), (2, 40, 96)])
@pytest.mark.parametrize("layer", [1, 2])
def test_keep_mask(device: torch.device, shape: tuple[int, ...], layer: int) -> None:
    x = torch.empty(shape, device=device)
    kept = keep_mask(x, 0.3, -7, 2**32 - 2, layer)
    assert torch.equal(kept.cpu(), run_reference(keep_mask, x, 0.3, -7, 2**32 - 2, layer))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gumbel_topk_takes_any_float_and_orders_ties_and_infinities(
    device: torch.device, dtype: torch.dtype
) -> None:
    row = [-torch.inf, 3e4, -torch.inf, -3e4, 3e4, 0.0]
    logits = torch.tensor([row] * 4, device=device).to(dtype)
    visible, masked, log_probs = gumbel_topk(logits, 5, 0, 0)
    # The four finite ones, and then the first of those of -inf.
    assert visible.tolist() == [[0, 1, 3, 4, 5]] * 4
    assert masked.tolist() == [[2]] * 4
    torch.testing.assert_close(log_probs.cpu(), torch.log_softmax(logits.float().cpu(), dim=-1))
    of_one_token, *_ = gumbel_topk(torch.zeros(2, 1, device=device, dtype=dtype), 1, 0, 0)
    assert of_one_token.tolist() == [[0], [0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "tokens", "k", "width"), [(2, 37, 9, 96), (1, 20, 19, 7), (2, 40, 2, 300)]
)
@pytest.mark.parametrize("op", [gather_tokens, scatter_tokens])
def test_gather_and_scatter_tokens(
    device: torch.device,
    op: Any,
    dtype: torch.dtype,
    batch: int,
    tokens: int,
    k: int,
    width: int,
) -> None:
    visible, masked = random_ids(batch, tokens, k, device)
    table = torch.randn(tokens, width, device=device)
    if op is gather_tokens:
        inputs = [torch.randn(batch, tokens, width, device=device)]
        others = (visible, table)
        weight = torch.randn(batch, k, width, device=device)
    else:
        # Half of the rows of a larger tensor: clips are not contiguous.
        features = torch.randn(batch, 2 * k, width, device=device)[:, :k]
        inputs = [features, torch.randn(width, device=device)]
        others = (table, visible, masked)
        weight = torch.randn(batch, tokens, width, device=device)

    def run(function: Any, kind: torch.dtype) -> list[Tensor]:
        """Return the output and all gradients."""
        values = [value.detach().to(kind).requires_grad_() for value in inputs]
        out = function(*values, *others)
        assert out.dtype == kind
        out.backward(weight.to(out))
        return [out, *(value.grad.cpu() for value in values)]

    reference = partial(run_reference, op)
    outputs = run(op, dtype)
    rounded = run(reference, dtype)
    exact = run(reference, torch.float32)
    for triple in zip(outputs, rounded, exact, strict=True):
        assert_as_good(*triple)


@pytest.mark.parametrize("layout", CLIP_LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "tubelet", "patch", "has_ids"),
    [
        (torch.float32, 2, 8, True),
        (torch.bfloat16, 2, 16, False),
        (torch.float16, 1, 7, True),
    ],
)
def test_patchify(
    device: torch.device, layout: str, dtype: torch.dtype, tubelet: int, patch: int, has_ids: bool
) -> None:
    clip = random_clip(layout, (2, 2 * tubelet, 2 * patch, 3 * patch, 3), device)
    ids = random_ids(2, 12, 5, device)[0] if has_ids else None
    patches = patchify(clip, ids, tubelet, patch, dtype)
    assert patches.dtype == dtype
    rounded = run_reference(patchify, clip, ids, tubelet, patch, dtype)
    exact = run_reference(patchify, clip, ids, tubelet, patch, torch.float32)
    assert_as_good(patches, rounded, exact)


@pytest.mark.parametrize(
    ("layout", "dtype", "tubelet", "patch", "kinds"),
    [
        ("contiguous", torch.float32, 2, 8, [("mse", True)]),
        ("contiguous", torch.bfloat16, 2, 16, [("l1", True)]),
        ("cropped", torch.float16, 1, 7, [("mse", True), ("mse", False), ("l1", False)]),
    ],
)
def test_masked_patch_loss(
    device: torch.device,
    layout: str,
    dtype: torch.dtype,
    tubelet: int,
    patch: int,
    kinds: list[tuple[str, bool]],
) -> None:
    clip = random_clip(layout, (2, 2 * tubelet, 2 * patch, 3 * patch, 3), device)
    # A flat patch, which has no deviation.
    clip[0, :tubelet, :patch, :patch] = 77
    _, ids = random_ids(2, 12, 9, device)
    pred = torch.randn(2, 3, tubelet * patch**2 * 3, device=device).to(dtype)
    weight = torch.randn(2, 3, device=device)
    # Gradients have the precision of predictions.
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    for kind, normalize in kinds:

        def run(
            op: Any, prediction: Tensor, kind: str = kind, normalize: bool = normalize
        ) -> tuple[Tensor, Tensor]:
            prediction = prediction.detach().requires_grad_()
            loss = op(prediction, clip, ids, tubelet, patch, kind, normalize)
            assert loss.dtype == torch.float32
            loss.backward(weight.to(loss))
            return loss.detach(), prediction.grad

        loss, grad = run(masked_patch_loss, pred)
        expected_loss, expected_grad = run(partial(run_reference, masked_patch_loss), pred.cpu())
        torch.testing.assert_close(loss.cpu(), expected_loss, rtol=1e-5, atol=1e-6)
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.cpu(), expected_grad, rtol=rtol, atol=1e-7)
