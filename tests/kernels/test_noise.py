"""The noise of the reference and of the kernels, word by word."""

import pytest
import torch
import triton
import triton.language as tl

from adamae.kernels import launch
from adamae.kernels.noise import gumbel, gumbel_row, philox, philox_row


def test_philox_gives_random123s_known_answer() -> None:
    zero = torch.tensor(0)
    known_answer = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(zero, zero, rows=1, count=4).tolist() == [known_answer]


def test_noise_does_not_depend_on_how_many_tokens_follow() -> None:
    zero = torch.tensor(0)
    longer = philox(zero, zero, rows=2, count=24)
    assert torch.equal(philox(zero, zero, rows=2, count=21), longer[:, :21])


@triton.jit
def noise_kernel(seed_ptr, offset_ptr, words_ptr, gumbel_ptr, QUARTER: tl.constexpr):
    row = tl.program_id(0)
    n = row * 4 * QUARTER + tl.arange(0, 4 * QUARTER)
    seed = tl.load(seed_ptr)
    global_row = tl.load(offset_ptr) + row
    tl.store(words_ptr + n, philox_row(seed, global_row, 0, 0, QUARTER).to(tl.int64))
    tl.store(gumbel_ptr + n, gumbel_row(seed, global_row, QUARTER))


@pytest.mark.parametrize("quarter", [1, 8, 512])
@pytest.mark.parametrize(
    ("seed", "offset"),
    [(5, 0), (-1, 2**32 - 2), (-(2**63), 2**33 - 2), (0x0123456789ABCDEF, 2**40 + 12345)],
)
def test_kernels_make_the_same_bits_at_every_block_size(
    device: torch.device, quarter: int, seed: int, offset: int
) -> None:
    """The kernels' words are Triton's own Philox: another program than the one in plain PyTorch."""
    seed_tensor = torch.tensor(seed)
    offset_tensor = torch.tensor(offset)
    words = torch.empty(3, 4 * quarter, dtype=torch.int64, device=device)
    noise = torch.empty(3, 4 * quarter, device=device)
    kernel = launch.wrap_triton(noise_kernel)[(3,)]
    kernel(seed_tensor.to(device), offset_tensor.to(device), words, noise, QUARTER=quarter)
    assert torch.equal(words.cpu(), philox(seed_tensor, offset_tensor, 3, 4 * quarter))
    expected = gumbel(seed_tensor, offset_tensor, 3, 4 * quarter)
    torch.testing.assert_close(noise.cpu(), expected, rtol=1e-5, atol=1e-6)
