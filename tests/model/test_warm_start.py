"""Weights in a model that is not quite theirs: other clips, no sampler, no decoder."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from material import random_clip, randomize, small
from safetensors.torch import save_file
from torch import Tensor

from common.errors import InputError
from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.config import Grid
from model.encoder import VideoEncoder
from model.weights import pretrained
from model.weights.layouts import to_adamae, to_huggingface, to_videomae
from model.weights.warm_start import interpolate_positions, warm_start


@pytest.fixture
def model() -> AdaMAE:
    model = AdaMAE(small())
    randomize(model)
    return model.eval()


def saved(model: AdaMAE | VideoClassifier, file: Path) -> Path:
    pretrained.save(file, model.state_dict(), pretrained.make_metadata(model.config))
    return file


def same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def by_hand(table: Tensor, before: Grid, after: Grid) -> Tensor:
    """Linear between the centers of tokens along each axis in turn, and even beyond the outermost of them."""
    values = table.double().view(*before, -1)
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        places = [min(max((i + 0.5) * old / new - 0.5, 0), old - 1) for i in range(new)]
        rows = []
        for place in places:
            low = int(place)
            high, share = min(low + 1, old - 1), place - low
            rows.append((1 - share) * values.select(axis, low) + share * values.select(axis, high))
        values = torch.stack(rows, axis)
    return values.flatten(0, 2)


@pytest.mark.parametrize("after", [(4, 6, 6), (1, 4, 4), (2, 3, 5), (3, 2, 8)])
def test_positions_are_interpolated_in_space_and_time(after: Grid) -> None:
    table = torch.randn(2 * 4 * 4, 6)
    expected = by_hand(table, (2, 4, 4), after)
    torch.testing.assert_close(interpolate_positions(table, (2, 4, 4), after).double(), expected, rtol=0, atol=1e-6)


def test_at_equal_sizes_all_of_it_is_taken_bit_by_bit(model: AdaMAE, tmp_path: Path) -> None:
    new = AdaMAE(small())
    file = saved(model, tmp_path / "a.safetensors")
    said = warm_start(new, file)
    assert same(new.state_dict(), model.state_dict())
    assert said == f"weights of {file}: tokenizer, encoder's blocks, encoder's norm, decoder, token sampler"


def test_of_other_clips_only_learned_positions_change(model: AdaMAE, tmp_path: Path) -> None:
    shape = small(num_frames=8, image_size=48, positions="separable-3d")
    new = AdaMAE(shape)
    said = warm_start(new, saved(model, tmp_path / "a.safetensors"))
    before, after = model.state_dict(), new.state_dict()
    positions = by_hand(before.pop("token_sampler.positions"), (2, 4, 4), (4, 6, 6)).float()
    torch.testing.assert_close(after.pop("token_sampler.positions"), positions, rtol=0, atol=1e-6)
    assert same(after, before)
    assert "interpolated from 2×4×4 to 4×6×6" in said
    assert torch.equal(new.encoder.positions, AdaMAE(shape).encoder.positions)  # computed


@pytest.mark.parametrize(("layout", "sampler"), [(to_adamae, True), (to_videomae, False), (to_huggingface, False)])
def test_other_peoples_files(model: AdaMAE, tmp_path: Path, layout, sampler: bool) -> None:
    save_file(layout(model.state_dict()), tmp_path / "theirs.safetensors")
    new = AdaMAE(small())
    fresh = {name: value.clone() for name, value in new.state_dict().items() if name.startswith("token_sampler.")}
    said = warm_start(new, tmp_path / "theirs.safetensors")
    assert same(new.state_dict(), model.state_dict() if sampler else model.state_dict() | fresh)
    assert ("initialized from scratch: token sampler (not there)" in said) != sampler


def test_what_does_not_fit_beside_the_encoder_starts_fresh_and_is_said(model: AdaMAE, tmp_path: Path) -> None:
    new = AdaMAE(small(decoder_depth=1, masking="random"))
    decoder = {name: value.clone() for name, value in new.decoder.state_dict().items()}
    said = warm_start(new, saved(model, tmp_path / "a.safetensors"))
    assert same(new.decoder.state_dict(), decoder)
    assert same(new.encoder.state_dict(), model.encoder.state_dict())
    assert said.endswith("initialized from scratch: decoder (of another shape there); left out: token_sampler")


def test_a_classifiers_encoder_is_a_start_too(tmp_path: Path) -> None:
    classifier = VideoClassifier(small(), num_classes=3)
    new = AdaMAE(small())
    said = warm_start(new, saved(classifier, tmp_path / "a.safetensors"))
    assert same(new.encoder.blocks.state_dict(), classifier.encoder.blocks.state_dict())
    assert (
        "initialized from scratch: encoder's norm (not there), decoder (not there), token sampler (not there)" in said
    )
    assert said.endswith("left out: head, norm")


def test_another_encoder_is_refused_with_all_differences(model: AdaMAE, tmp_path: Path) -> None:
    file = saved(model, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"depth 2 instead of 3, patch_size 8 instead of 16: .* model\.patch_size=8"):
        warm_start(AdaMAE(small(encoder_depth=3, patch_size=16, mask_ratio=0.5)), file)


def test_published_weights_of_other_clips_are_of_16_frames(tmp_path: Path) -> None:
    """They do not say how long their clips are."""
    theirs = AdaMAE(small(num_frames=16))
    randomize(theirs)
    save_file(to_adamae(theirs.state_dict()), tmp_path / "theirs.safetensors")
    new = AdaMAE(small(num_frames=32, image_size=48))
    warm_start(new, tmp_path / "theirs.safetensors")
    expected = by_hand(theirs.state_dict()["token_sampler.positions"], (8, 4, 4), (16, 6, 6)).float()
    torch.testing.assert_close(new.token_sampler.positions.detach(), expected, rtol=0, atol=1e-6)


def test_from_pretrained_takes_other_clips(model: AdaMAE, tmp_path: Path) -> None:
    file = saved(model, tmp_path / "a.safetensors")
    other = AdaMAE.from_pretrained(file, image_size=48, num_frames=8, mask_ratio=0.5)
    assert other.config == replace(model.config, image_size=48, num_frames=8, mask_ratio=0.5)
    clip = random_clip(other.config)
    assert other(clip, 0, 0).masked_ids.shape == (2, 72)
    encoder = VideoEncoder.from_pretrained(file, image_size=48, num_frames=8)
    assert torch.equal(encoder.encode(clip).tokens, other.encode(clip).tokens)
    clip = random_clip(model.config)
    assert torch.equal(AdaMAE.from_pretrained(file)(clip, 0, 0).pred, model(clip, 0, 0).pred)


def test_an_encoder_can_be_called_and_learns(model: AdaMAE, tmp_path: Path) -> None:
    encoder = VideoEncoder.from_pretrained(saved(model, tmp_path / "a.safetensors"))
    clip = random_clip(model.config)
    assert torch.equal(encoder(clip).pooled, encoder.encode(clip).pooled)
    encoder(clip).pooled.sum().backward()
    assert all(value.grad is not None for value in encoder.parameters())
