import pytest
import torch

from kernels.noise import gumbel, philox


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's known answers for philox4x32-10
        ((0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    block, low, high = counter
    got = philox(torch.tensor(key), torch.tensor(low | high << 32), rows=1, count=4 * block + 4)
    assert tuple(got[0, -4:].tolist()) == words


def test_noise_of_a_row_depends_on_its_global_position_only():
    seed = torch.tensor(-5)
    whole = gumbel(seed, torch.tensor(2**32 - 3), rows=6, count=37)
    part = gumbel(seed, torch.tensor(2**32 - 1), rows=2, count=30)
    assert torch.equal(whole[2:4, :30], part)
    assert torch.isfinite(whole).all()
