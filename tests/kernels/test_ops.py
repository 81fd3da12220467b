"""Every op's Triton path, forward and backward, against its reference: interpreted on a CPU, compiled on a GPU."""

from functools import partial

import pytest
import torch

from adamae.kernels import launch
from adamae.kernels.gather_tokens import gather_tokens
from adamae.kernels.gumbel_topk import gumbel_topk
from adamae.kernels.masked_patch_loss import masked_patch_loss
from adamae.kernels.patchify import patchify
from adamae.kernels.scatter_tokens import scatter_tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLIP_LAYOUTS = ("contiguous", "cropped")


def plain(op, *args, **options):
    """The op's reference, on the CPU."""
    before, launch.triton_on_cpu = launch.triton_on_cpu, False
    try:
        return op(*(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args), **options)
    finally:
        launch.triton_on_cpu = before


def random_ids(batch, tokens, k, device):
    order = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(tokens)).argsort(
        dim=1
    )
    return order[:, :k].sort(dim=1).values.to(device), order[:, k:].sort(dim=1).values.to(device)


def random_clip(layout, shape, device):
    batch, frames, height, width, channels = shape
    larger = (batch, frames, height + 3, width + 5, channels)
    clip = torch.randint(
        0, 256, larger, dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    clip = clip[:, :, 1 : 1 + height, 2 : 2 + width]
    return (clip if layout == "cropped" else clip.contiguous()).to(device)


def assert_as_good(got, low, exact):
    """`got` errs at most twice as much as the same computation in plain low precision does, both against fp32."""
    floor = 1e-6 * exact.abs().max().clamp(min=1)
    times = 2 if got.is_cuda else 4  # the interpreter cuts bf16 off where a GPU rounds it
    error, allowed = (
        (got.cpu().float() - exact).abs().max(),
        times * (low.float() - exact).abs().max() + floor,
    )
    assert error <= allowed, f"{error} > {allowed}"


@pytest.mark.parametrize(
    ("batch", "tokens", "k"), [(3, 37, 5), (1, 2, 1), (2, 129, 129), (2, 200, 0), (2, 1568, 78)]
)
def test_gumbel_topk(device, batch, tokens, k):
    logits = torch.randn(batch, 2 * tokens, device=device)[
        :, :tokens
    ].requires_grad_()  # rows are not contiguous
    weight = torch.randn(batch, tokens, device=device)
    reference = logits.detach().cpu().clone().requires_grad_()
    visible, masked, log_probs = gumbel_topk(logits, k, -7, 2**32 - 2)
    expected = plain(gumbel_topk, reference, k, -7, 2**32 - 2)
    assert torch.equal(visible.cpu(), expected[0])
    assert torch.equal(masked.cpu(), expected[1])
    torch.testing.assert_close(log_probs.cpu(), expected[2])
    (log_probs * weight).sum().backward()
    (expected[2] * weight.cpu()).sum().backward()
    torch.testing.assert_close(logits.grad.cpu(), reference.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gumbel_topk_takes_any_float_and_orders_ties_and_infinities(device, dtype):
    logits = torch.tensor([[-torch.inf, 3e4, -torch.inf, -3e4, 3e4, 0.0]] * 4, device=device).to(
        dtype
    )
    visible, masked, log_probs = gumbel_topk(logits, 5, 0, 0)
    assert visible.tolist() == [[0, 1, 3, 4, 5]] * 4  # four finite ones, then the first of the -inf
    assert masked.tolist() == [[2]] * 4
    torch.testing.assert_close(log_probs.cpu(), torch.log_softmax(logits.float().cpu(), dim=-1))
    assert gumbel_topk(torch.zeros(2, 1, device=device, dtype=dtype), 1, 0, 0)[0].tolist() == [
        [0],
        [0],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "tokens", "k", "width"), [(2, 37, 9, 96), (1, 20, 19, 7), (2, 40, 2, 300)]
)
@pytest.mark.parametrize("op", [gather_tokens, scatter_tokens])
def test_gather_and_scatter_tokens(device, op, dtype, batch, tokens, k, width):
    (visible, masked), table = (
        random_ids(batch, tokens, k, device),
        torch.randn(tokens, width, device=device),
    )
    if op is gather_tokens:
        inputs, rest = [torch.randn(batch, tokens, width, device=device)], (visible, table)
    else:
        features = torch.randn(batch, 2 * k, width, device=device)[:, :k]
        inputs, rest = [features, torch.randn(width, device=device)], (table, visible, masked)
    weight = torch.randn(batch, k if op is gather_tokens else tokens, width, device=device)

    def run(function, kind):
        values = [value.detach().to(kind).requires_grad_() for value in inputs]
        out = function(*values, *rest)
        assert out.dtype == kind
        out.backward(weight.to(out))
        return out, *(value.grad.cpu() for value in values)

    reference = partial(plain, op)
    for got, low, exact in zip(
        run(op, dtype), run(reference, dtype), run(reference, torch.float32), strict=True
    ):
        assert_as_good(got, low, exact)


@pytest.mark.parametrize("layout", CLIP_LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "tubelet", "patch", "some"),
    [
        (torch.float32, 2, 8, True),
        (torch.bfloat16, 2, 16, False),
        (torch.float16, 1, 7, True),
    ],
)
def test_patchify(device, layout, dtype, tubelet, patch, some):
    clip = random_clip(layout, (2, 2 * tubelet, 2 * patch, 3 * patch, 3), device)
    ids = random_ids(2, 12, 5, device)[0] if some else None
    got = patchify(clip, ids, tubelet, patch, dtype)
    assert got.dtype == dtype
    low, exact = (
        plain(patchify, clip, ids, tubelet, patch, kind) for kind in (dtype, torch.float32)
    )
    assert_as_good(got, low, exact)


@pytest.mark.parametrize(
    ("layout", "dtype", "tubelet", "patch", "kinds"),
    [
        ("contiguous", torch.float32, 2, 8, [("mse", True)]),
        ("contiguous", torch.bfloat16, 2, 16, [("l1", True)]),
        ("cropped", torch.float16, 1, 7, [("mse", True), ("mse", False), ("l1", False)]),
    ],
)
def test_masked_patch_loss(device, layout, dtype, tubelet, patch, kinds):
    clip = random_clip(layout, (2, 2 * tubelet, 2 * patch, 3 * patch, 3), device)
    clip[0, :tubelet, :patch, :patch] = 77  # a flat patch
    ids = random_ids(2, 12, 9, device)[1]
    pred = torch.randn(2, 3, tubelet * patch**2 * 3, device=device)
    weight = torch.randn(2, 3, device=device)
    for kind, normalize in kinds:

        def run(op, prediction, kind=kind, normalize=normalize):
            prediction = prediction.detach().requires_grad_()
            loss = op(prediction, clip, ids, tubelet, patch, kind, normalize)
            assert loss.dtype == torch.float32
            loss.backward(weight.to(loss))
            return loss.detach(), prediction.grad

        loss, grad = run(masked_patch_loss, pred.to(dtype))
        expected = run(lambda *args: plain(masked_patch_loss, *args), pred.to(dtype).cpu())
        torch.testing.assert_close(loss.cpu(), expected[0], rtol=1e-5, atol=1e-6)
        assert grad.dtype == dtype
        torch.testing.assert_close(
            grad.cpu(), expected[1], rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7
        )
