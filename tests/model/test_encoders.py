"""Frozen encoders, whoever trained them, as tiny random models: they equal their libraries'."""

from pathlib import Path

import pytest
import torch
from material import random_clip, small

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.encoders.open_encoder import open_encoder
from adamae.model.weights import pretrained


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write weights of this project, and return their file."""
    file = tmp_path_factory.mktemp("own") / "own.safetensors"
    config = small(encoder_width=24)
    metadata = pretrained.make_metadata(config, rate={"fps": 8.0})
    pretrained.save(file, AdaMAE(config).state_dict(), metadata)
    return file


def test_own_weights(own: Path) -> None:
    encoder = open_encoder(str(own))
    clip = random_clip(small())
    assert encoder.name == str(own)
    assert (encoder.num_frames, encoder.image_size) == (4, (32, 32))
    assert (encoder.grid, encoder.dim) == ((2, 4, 4), 24)
    assert encoder.frame_rate == {"fps": 8.0}
    tokens = encoder.tokens(clip)
    assert tokens.shape == (2, 32, 24)
    assert not tokens.requires_grad
    torch.testing.assert_close(encoder.pooled(clip), tokens.mean(dim=1))
    longer = open_encoder(own, num_frames=8, image_size=[16, 32])
    assert longer.grid == (4, 2, 4)
    assert longer.tokens(random_clip(small(num_frames=8, image_size=[16, 32]))).shape == (2, 32, 24)


def test_clips_that_an_encoder_was_not_opened_for(own: Path) -> None:
    encoder = open_encoder(own)
    message = "takes clips of 4 frames of 32×32 pixels, and these have 8 frames of 48×32 pixels"
    with pytest.raises(InputError, match=message):
        encoder(torch.zeros(1, 8, 32, 48, 3, dtype=torch.uint8))
    with pytest.raises(InputError, match="the clip has 5 channels, and the model takes 3"):
        encoder(torch.zeros(1, 4, 32, 32, 5, dtype=torch.uint8))
    with pytest.raises(InputError, match="frames is 'max': choose one of mean, difference"):
        open_encoder(own, frames="max")
