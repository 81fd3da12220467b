"""Weights in a model that they were not made for: other clips, no sampler, no decoder."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from material import random_clip, small
from runs import is_same
from safetensors.torch import save_file
from tiny import randomize
from torch import Tensor

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.classifier import VideoClassifier
from adamae.model.config import Grid
from adamae.model.load_adamae import load_adamae
from adamae.model.weights import pretrained
from adamae.model.weights.external_layouts import to_external
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.warm_start import adapt_weights, warm_start

POSITIONS = "token_sampler.positions"


@pytest.fixture
def model() -> AdaMAE:
    """Return the model whose weights start others."""
    model = AdaMAE(small())
    randomize(model)
    return model.eval()


@pytest.fixture
def file(model: AdaMAE, tmp_path: Path) -> Path:
    """Return the file of its weights."""
    return save(model, tmp_path / "a.safetensors")


def save(model: AdaMAE | VideoClassifier, file: Path) -> Path:
    pretrained.save(file, model.state_dict(), pretrained.make_metadata(model.config))
    return file


def interpolate_by_hand(table: Tensor, before: Grid, after: Grid) -> Tensor:
    """Interpolate linearly between the centers of tokens, along each axis in turn.

    Beyond the outermost centers, positions are those of the outermost tokens.
    """
    values = table.double().view(*before, -1).numpy()
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        centers = (np.arange(new) + 0.5) * old / new - 0.5
        interpolate = partial(np.interp, centers, np.arange(old))
        values = np.apply_along_axis(interpolate, axis, values)
    return torch.from_numpy(values).flatten(0, 2).float()


@pytest.mark.parametrize("after", [(4, 6, 6), (1, 4, 4), (2, 3, 5), (3, 2, 8)])
def test_positions_are_interpolated_in_space_and_time(after: Grid) -> None:
    time, height, width = after
    trained = small()
    config = small(num_frames=2 * time, image_size=[8 * height, 8 * width])
    table = torch.randn(trained.num_tokens, 6)
    positions = adapt_weights({POSITIONS: table}, trained, config)[POSITIONS]
    expected = interpolate_by_hand(table, trained.grid, after)
    torch.testing.assert_close(positions, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["", "adamae", "videomae", "huggingface"])
def test_at_equal_sizes_all_that_a_file_holds_is_taken_bit_by_bit(
    model: AdaMAE, file: Path, layout: str
) -> None:
    if layout:
        save_file(to_external(model.state_dict(), layout), file)
    new = AdaMAE(small())
    initial_sampler = {
        f"token_sampler.{name}": value.clone()
        for name, value in new.token_sampler.state_dict().items()
    }
    report = warm_start(new, file)
    expected = model.state_dict()
    parts = f"weights of {file}: tokenizer, encoder's blocks, encoder's norm, decoder"
    if layout in ("", "adamae"):
        assert report == f"{parts}, token sampler"
    else:
        assert report == f"{parts}; initialized from scratch: token sampler (not there)"
        expected |= initial_sampler
    assert is_same(new.state_dict(), expected)


def test_of_other_clips_only_learned_positions_change(model: AdaMAE, file: Path) -> None:
    # Fixed positions are computed from the configuration, and not those of the file.
    new = AdaMAE(small(num_frames=8, image_size=48, positions="separable-3d"))
    computed = new.encoder.positions.clone()
    report = warm_start(new, file)
    before = model.state_dict()
    after = new.state_dict()
    positions = interpolate_by_hand(before.pop(POSITIONS), (2, 4, 4), (4, 6, 6))
    torch.testing.assert_close(after.pop(POSITIONS), positions, rtol=0, atol=1e-6)
    assert is_same(after, before)
    assert "interpolated from 2×4×4 to 4×6×6" in report
    assert torch.equal(new.encoder.positions, computed)


def test_what_does_not_fit_beside_the_encoder_starts_from_scratch_and_is_reported(
    model: AdaMAE, file: Path
) -> None:
    new = AdaMAE(small(decoder_depth=1, masking="random"))
    decoder = {name: value.clone() for name, value in new.decoder.state_dict().items()}
    report = warm_start(new, file)
    assert is_same(new.decoder.state_dict(), decoder)
    assert is_same(new.encoder.state_dict(), model.encoder.state_dict())
    assert report.endswith(
        "initialized from scratch: decoder (of another shape there); left out: token_sampler"
    )


def test_a_classifier_starts_a_pretraining(file: Path) -> None:
    classifier = VideoClassifier(small(), num_classes=3)
    new = AdaMAE(small())
    report = warm_start(new, save(classifier, file))
    assert is_same(new.encoder.blocks.state_dict(), classifier.encoder.blocks.state_dict())
    parts = "encoder's norm (not there), decoder (not there), token sampler (not there)"
    assert report.endswith(f"initialized from scratch: {parts}; left out: head, norm")


def test_another_encoder_is_refused_with_all_differences(file: Path) -> None:
    sentence = r"depth 2 instead of 3, patch_size 8 instead of 16: .* model\.patch_size=8"
    with pytest.raises(InputError, match=sentence):
        warm_start(AdaMAE(small(encoder_depth=3, patch_size=16, mask_ratio=0.5)), file)


def test_published_weights_that_do_not_describe_their_clips_are_of_16_frames(file: Path) -> None:
    # The authors' layout holds no configuration.
    published = AdaMAE(small(num_frames=16))
    randomize(published)
    save_file(to_external(published.state_dict(), "adamae"), file)
    new = AdaMAE(small(num_frames=32, image_size=48))
    warm_start(new, file)
    expected = interpolate_by_hand(published.state_dict()[POSITIONS], (8, 4, 4), (16, 6, 6))
    torch.testing.assert_close(new.token_sampler.positions.detach(), expected, rtol=0, atol=1e-6)


def test_from_pretrained_takes_other_clips(model: AdaMAE, file: Path) -> None:
    adapted = load_adamae(file, image_size=48, num_frames=8, mask_ratio=0.5)
    assert adapted.config == replace(model.config, image_size=48, num_frames=8, mask_ratio=0.5)
    clip = random_clip(adapted.config)
    assert adapted(clip, 0, 0).masked_ids.shape == (2, 72)
    encoder = load_encoder(file, image_size=48, num_frames=8)
    assert torch.equal(encoder.encode(clip).tokens, adapted.encode(clip).tokens)
    # As a module, it learns.
    encoder(clip).pooled.sum().backward()
    for name, value in encoder.named_parameters():
        assert (value.grad is None) == name.startswith("token_sampler."), name
    clip = random_clip(model.config)
    assert torch.equal(load_adamae(file)(clip, 0, 0).pred, model(clip, 0, 0).pred)
