import itertools

import pytest
import torch
import triton
import triton.language as tl

from kernels import launch
from kernels.noise import gumbel, gumbel_row, philox, philox_row

MASK = 0xFFFFFFFF


def reference(counter, key):
    """Philox4x32-10 in whole numbers, as its authors write it down."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & MASK, p0 >> 32 ^ c3 ^ k1, p0 & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return [c0, c1, c2, c3]


def test_the_reference_gives_random123s_known_answers():
    assert reference([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert reference([MASK] * 4, [MASK] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    assert reference(pi[:4], pi[4:]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (-1, 2**32 - 1), (0x0123456789ABCDEF, 2**40 + 12345)])
def test_philox_is_the_reference(seed, offset):
    got = philox(torch.tensor(seed), torch.tensor(offset), rows=3, count=21)
    key = seed & MASK, seed >> 32 & MASK
    for row in range(3):
        blocks = (reference((n, offset + row & MASK, offset + row >> 32, 0), key) for n in range(6))
        assert got[row].tolist() == list(itertools.chain.from_iterable(blocks))[:21]


@triton.jit
def noise_kernel(seed_ptr, offset_ptr, words_ptr, gumbel_ptr, QUARTER: tl.constexpr):
    row = tl.program_id(0)
    n = row * 4 * QUARTER + tl.arange(0, 4 * QUARTER)
    seed, global_row = tl.load(seed_ptr), tl.load(offset_ptr) + row
    tl.store(words_ptr + n, philox_row(seed, global_row, QUARTER).to(tl.int64))
    tl.store(gumbel_ptr + n, gumbel_row(seed, global_row, QUARTER))


@pytest.mark.parametrize("quarter", [1, 8, 512])
@pytest.mark.parametrize(("seed", "offset"), [(5, 0), (-(2**63), 2**33 - 2)])
def test_kernels_draw_the_same_bits_at_every_block_size(device, quarter, seed, offset):
    seed, offset = torch.tensor(seed), torch.tensor(offset)
    words = torch.empty(3, 4 * quarter, dtype=torch.int64, device=device)
    noise = torch.empty(3, 4 * quarter, device=device)
    launch.wrap_triton(noise_kernel)[(3,)](seed.to(device), offset.to(device), words, noise, QUARTER=quarter)
    assert torch.equal(words.cpu(), philox(seed, offset, 3, 4 * quarter))
    torch.testing.assert_close(noise.cpu(), gumbel(seed, offset, 3, 4 * quarter), rtol=1e-5, atol=1e-6)
