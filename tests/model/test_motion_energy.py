"""The motion energy of patches as the target."""

import pytest
import torch
from material import random_clip, small

from adamae.model.adamae import AdaMAE
from adamae.model.channels import prepare_clip

# A pixel of the second token's right upper quarter brightens by 64 in the third of four frames and
# stays bright.
TOKEN = 1
QUARTER = 1
FRAME = 1


@pytest.mark.parametrize("differences", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_energy_is_where_and_when_something_moves(differences: bool, channels: int) -> None:
    config = small(
        num_frames=4, in_channels=channels, differences=differences, target="motion-energy"
    )
    clip = torch.full((2, 4, 32, 32, channels), 90, dtype=torch.uint8)
    clip[1, 2:, 1, 14] += 64
    target = AdaMAE(config).target
    still, moved = target.prepare(prepare_clip(clip, config))
    assert target.num_values == 8
    assert moved.shape == (32, 8)
    # There is nothing to predict.
    assert not still.any()
    assert moved.argmax() == TOKEN * 8 + FRAME * 4 + QUARTER
    assert moved.sum().abs() < 1e-3
    assert moved.square().mean() == pytest.approx(1)
    # One of n standardized values that differs from all others is √(n - 1).
    assert moved.max().item() == pytest.approx((moved.numel() - 1) ** 0.5)


def test_a_cell_is_the_mean_change_of_its_pixels() -> None:
    config = small(num_frames=4, target="motion-energy")
    clip = random_clip(config)
    energies = AdaMAE(config).target.prepare(clip)
    change = clip.float().diff(dim=1).abs()
    # The last frame's change is that of the one before.
    change = torch.cat((change, change[:, -1:]), dim=1)
    logs = change.unflatten(2, (8, 4)).unflatten(4, (8, 4)).mean(dim=(3, 5, 6)).log1p()
    mean = logs.mean(dim=(1, 2, 3), keepdim=True)
    deviation = logs.std(dim=(1, 2, 3), correction=0, keepdim=True)
    expected = (logs - mean) / deviation
    # Token 5 is the second one of the second row of the first token frame.
    of_token = energies[:, 5].unflatten(1, (2, 2, 2))
    torch.testing.assert_close(of_token, expected[:, :2, 2:4, 2:4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss", ["mse", "l1"])
def test_a_model_learns_it(loss: str) -> None:
    config = small(
        num_frames=4, target="motion-energy", loss=loss, masking="adaptive", mask_ratio=0.5
    )
    model = AdaMAE(config)
    output = model(random_clip(config), 0, 0)
    output.loss.backward()
    assert output.pred.shape == (2, 16, 8)
    assert all(value.grad is not None for value in model.decoder.parameters())
