"""What only a GPU can show: graphs that replay, assertions on the device, misaligned rows."""

import subprocess
import sys

import pytest
import torch
from kernel_material import token_path, token_path_inputs

from adamae.kernels.gumbel_topk import gumbel_topk, gumbel_topk_ref
from adamae.kernels.masked_patch_loss import masked_patch_loss

pytestmark = pytest.mark.gpu


def test_ids_differ_from_the_reference_only_where_keys_differ_by_rounding() -> None:
    logits = torch.randn(1024, 1568, generator=torch.Generator().manual_seed(1))
    seed, offset = torch.tensor(2), torch.tensor(3)
    visible, *_ = gumbel_topk(logits.cuda(), 78, seed.cuda(), offset.cuda())
    expected, *_ = gumbel_topk_ref(logits, 78, seed, offset)
    differs = (visible.cpu() != expected).any(dim=1)
    assert differs.float().mean() < 2e-3


def test_a_cuda_graph_replays_with_new_clips_seeds_and_offsets() -> None:
    inputs = token_path_inputs("cuda")
    seed, offset = torch.zeros(2, dtype=torch.int64, device="cuda").unbind()
    # Warm-up on a stream of its own, as PyTorch asks for before a capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(token_path(*inputs, seed, offset), inputs[1:])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = token_path(*inputs, seed, offset)
        gradients = torch.autograd.grad(loss, inputs[1:])
    for number in (1, 2):
        seed.fill_(number)
        offset.fill_(10 * number)
        inputs[0].random_(0, 256)
        graph.replay()
        expected = token_path(*inputs, seed, offset)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs[1:]))


def test_torch_compile_with_inductor_gives_the_same() -> None:
    inputs = token_path_inputs("cuda")
    compiled = torch.compile(token_path, fullgraph=True)
    for number in range(2):
        seed = torch.tensor(number, device="cuda")
        offset = torch.tensor(5 * number, device="cuda")
        expected = token_path(*inputs, seed, offset)
        loss = compiled(*inputs, seed, offset)
        torch.testing.assert_close(loss, expected)
        expected_gradients = torch.autograd.grad(expected, inputs[1:])
        torch.testing.assert_close(torch.autograd.grad(loss, inputs[1:]), expected_gradients)


def test_no_tensor_of_the_targets_size_is_allocated() -> None:
    clip = torch.randint(0, 256, (4, 16, 224, 224, 3), dtype=torch.uint8, device="cuda")
    _, ids, _ = gumbel_topk(torch.zeros(4, 1568, device="cuda"), 78, 0, 0)
    pred = torch.randn(4, 1490, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = masked_patch_loss(pred, clip, ids, 2, 16)
    assert torch.cuda.max_memory_allocated() - before < pred.nbytes // 100
    loss.sum().backward()
    # The gradient of the predictions, and nothing else.
    assert torch.cuda.max_memory_allocated() - before < 1.1 * pred.nbytes


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_bad_logits_end_the_process(bad: str) -> None:
    program = f"""
import torch
from adamae.kernels.gumbel_topk import gumbel_topk
gumbel_topk(torch.full((2, 40), float("{bad}"), device="cuda"), 3, 0, 0)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr
    assert "logits hold NaN or +inf" in done.stderr
