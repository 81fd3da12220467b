import pytest
import torch
import triton
import triton.language as tl

from adamae.kernels import launch
from adamae.kernels.noise import gumbel, gumbel_row, philox, philox_row


def test_philox_gives_random123s_known_answer():
    zero = torch.tensor(0)
    assert philox(zero, zero, rows=1, count=4).tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ]
    assert torch.equal(
        philox(zero, zero, rows=2, count=21), philox(zero, zero, rows=2, count=24)[:, :21]
    )


@triton.jit
def noise_kernel(seed_ptr, offset_ptr, words_ptr, gumbel_ptr, QUARTER: tl.constexpr):
    row = tl.program_id(0)
    n = row * 4 * QUARTER + tl.arange(0, 4 * QUARTER)
    seed, global_row = tl.load(seed_ptr), tl.load(offset_ptr) + row
    tl.store(words_ptr + n, philox_row(seed, global_row, QUARTER).to(tl.int64))
    tl.store(gumbel_ptr + n, gumbel_row(seed, global_row, QUARTER))


@pytest.mark.parametrize("quarter", [1, 8, 512])
@pytest.mark.parametrize(
    ("seed", "offset"),
    [(5, 0), (-1, 2**32 - 2), (-(2**63), 2**33 - 2), (0x0123456789ABCDEF, 2**40 + 12345)],
)
def test_kernels_draw_the_same_bits_at_every_block_size(device, quarter, seed, offset):
    """Those of Triton's own Philox: another program than the one in plain PyTorch."""
    seed, offset = torch.tensor(seed), torch.tensor(offset)
    words = torch.empty(3, 4 * quarter, dtype=torch.int64, device=device)
    noise = torch.empty(3, 4 * quarter, device=device)
    launch.wrap_triton(noise_kernel)[(3,)](
        seed.to(device), offset.to(device), words, noise, QUARTER=quarter
    )
    assert torch.equal(words.cpu(), philox(seed, offset, 3, 4 * quarter))
    torch.testing.assert_close(
        noise.cpu(), gumbel(seed, offset, 3, 4 * quarter), rtol=1e-5, atol=1e-6
    )
