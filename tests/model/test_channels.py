"""Clips of other channels than RGB: gray from videos, up to twelve of any kind from arrays."""

from pathlib import Path

import pytest
import torch
from material import random_clip, small
from PIL import Image
from runs import is_same
from tiny import TINY, randomize

from adamae import export
from adamae.common.errors import InputError
from adamae.figures import reconstruction
from adamae.kernels.masked_patch_loss import masked_patch_loss
from adamae.kernels.patchify import IMAGENET_MEAN, IMAGENET_STD, patchify
from adamae.model.adamae import AdaMAE
from adamae.model.channels import adapt_channels, prepare_clip
from adamae.model.maps import reconstruct
from adamae.model.weights import pretrained
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.warm_start import warm_start
from adamae.train import train
from adamae.training.config import parse

# Clips of five channels.
GENERATOR = torch.Generator().manual_seed(0)
FIVE = torch.randint(0, 256, (2, 4, 16, 16, 5), dtype=torch.uint8, generator=GENERATOR)
IDS = torch.tensor([[0, 3, 6], [1, 2, 7]])


def test_gray_is_the_luma_of_bt_601() -> None:
    assert adapt_channels(FIVE, 5) is FIVE
    colors = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0], [10, 200, 30]]
    clip = torch.tensor(colors, dtype=torch.uint8).reshape(1, 1, 1, 6, 3)
    gray = adapt_channels(clip, 1)
    assert gray.shape == (1, 1, 1, 6, 1)
    assert gray.flatten().tolist() == [77, 149, 29, 255, 0, 124]


def test_gray_is_pillows_within_a_level() -> None:
    clip = random_clip(small())
    by_pillow = [Image.fromarray(frame.numpy()).convert("L").tobytes() for frame in clip[0]]
    expected = torch.frombuffer(bytearray(b"".join(by_pillow)), dtype=torch.uint8)
    gray = adapt_channels(clip, 1)[0].flatten()
    assert (gray.int() - expected.int()).abs().max() <= 1


def test_differences_hide_what_stands_still_and_are_as_strong_in_every_clip() -> None:
    config = small(num_frames=4, in_channels=1, differences=True)
    clip = torch.full((3, 4, 32, 32, 1), 90, dtype=torch.uint8)
    clip[1:, 2, :8] += torch.tensor([10, 60], dtype=torch.uint8)[:, None, None, None]
    still, weak, strong = prepare_clip(clip, config)
    assert still.unique().tolist() == [115]
    assert torch.equal(weak, strong)
    # Two of twelve values change: by 40 · √6.
    assert [frame[0, 0].item() for frame in weak] == [115, 213, 17, 17]
    model = AdaMAE(config)
    # The model does not see how bright a clip is.
    assert torch.equal(model.encode(clip[1:2] + 50).tokens, model.encode(clip[1:2]).tokens)
    assert torch.equal(reconstruct(model, clip).frames, prepare_clip(clip, config))


@pytest.mark.parametrize(("has", "wants"), [(3, 5), (1, 3), (5, 1)])
def test_other_channels_are_one_sentence(has: int, wants: int) -> None:
    model = AdaMAE(small(in_channels=wants))
    clip = torch.zeros(1, 4, 32, 32, has, dtype=torch.uint8)
    sentence = f"the clip has {has} channels, and the model takes {wants}"
    with pytest.raises(InputError, match=sentence):
        model(clip, 0, 0)


def test_values_of_five_channels_are_scaled_alike() -> None:
    values = patchify(FIVE, None, 2, 8).view(2, 8, 2, 8, 8, 5)
    mean = sum(IMAGENET_MEAN) / 3
    deviation = sum(IMAGENET_STD) / 3
    # Of token (1, 1, 0), which is number 6.
    expected = (FIVE[0, 2:, 8:, :8] / 255 - mean) / deviation
    torch.testing.assert_close(values[0, 6], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_of_five_channels_is_the_mean_of_those_of_each(normalize: bool) -> None:
    pred = torch.randn(2, 3, 128 * 5, requires_grad=True)
    loss = masked_patch_loss(pred, FIVE, IDS, 2, 8, normalize=normalize)
    by_channel = []
    for c in range(5):
        pred_of_channel = pred.unflatten(2, (-1, 5))[..., c]
        clip = FIVE[..., c : c + 1]
        by_channel.append(masked_patch_loss(pred_of_channel, clip, IDS, 2, 8, normalize=normalize))
    expected = torch.stack(by_channel).mean(dim=0)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss.sum(), pred)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), pred)
    torch.testing.assert_close(gradient, expected_gradient)


def test_a_model_for_gray_makes_rgb_gray() -> None:
    model = AdaMAE(small(in_channels=1)).eval()
    clip = random_clip(model.config)
    gray = adapt_channels(clip, 1)
    assert torch.equal(model(clip, 0, 0).loss_per_token, model(gray, 0, 0).loss_per_token)
    assert torch.equal(model.encode(clip).tokens, model.encode(gray).tokens)


@pytest.mark.parametrize(
    ("channels", "note"),
    [(1, ""), (2, "\n(first 1 of 2 channels)"), (5, "\n(first 3 of 5 channels)")],
)
def test_figures_show_the_channels_that_can_be_shown(channels: int, note: str) -> None:
    config = small(in_channels=channels)
    if channels == 1:
        # RGB, of which the model makes gray.
        clip = random_clip(config, 1)
    else:
        clip = torch.randint(0, 256, (1, 4, 32, 32, channels)).byte()
    maps = reconstruct(AdaMAE(config), clip)
    assert maps.reconstruction.shape == maps.visible_stats.shape == (1, 4, 32, 32, channels)
    shown_channels = [0, 1, 2] if channels >= 3 else [0, 0, 0]
    expected = adapt_channels(clip, channels)[0, ..., shown_channels]
    frames = reconstruction.make_rows(maps)["frames"]
    assert torch.equal(torch.from_numpy(frames.cells), expected)
    assert frames.label == "frames" + note


@pytest.mark.parametrize("channels", [1, 6])
def test_weights_of_rgb_start_models_of_other_channels(channels: int, tmp_path: Path) -> None:
    rgb = AdaMAE(small())
    randomize(rgb)
    file = tmp_path / "rgb.safetensors"
    pretrained.save(file, rgb.state_dict(), pretrained.make_metadata(rgb.config))
    model = AdaMAE(small(in_channels=channels))
    assert f"weights averaged over 3 channels for {channels}" in warm_start(model, file)
    # Tokens of patches that are alike in all channels are what they were, for any number of these.
    value = torch.randn(1, 128, 1)
    before = rgb.tokenizer.projection(value.expand(-1, -1, 3).flatten(1))
    after = model.tokenizer.projection(value.expand(-1, -1, channels).flatten(1))
    torch.testing.assert_close(after, before)
    features = torch.randn(1, 32)
    before = rgb.decoder.head(features).unflatten(1, (-1, 3))
    after = model.decoder.head(features).unflatten(1, (-1, channels))
    torch.testing.assert_close(after, before.mean(dim=2, keepdim=True).expand_as(after))
    encoder = load_encoder(file, in_channels=channels)
    assert torch.equal(encoder.tokenizer.projection.weight, model.tokenizer.projection.weight)


def test_a_gray_model_goes_to_hugging_face_and_back(tmp_path: Path) -> None:
    model = AdaMAE(small(in_channels=1, masking="tube", mask_ratio=0.5))
    randomize(model)
    file = tmp_path / "gray.safetensors"
    folder = tmp_path / "hf"
    pretrained.save(file, model.state_dict(), pretrained.make_metadata(model.config))
    export.main(export.parse_arguments(["export", str(file), str(folder), "--to", "huggingface"]))
    assert not (folder / "preprocessor_config.json").exists()
    again = pretrained.load(folder)
    assert again.config.in_channels == 1
    assert is_same(again.state, model.state_dict())


def test_channels_that_the_videos_do_not_have_are_refused(
    tmp_path: Path, synthetic_shards: Path
) -> None:
    shards = f"data.shards={synthetic_shards}"
    config = parse([*TINY, shards, "model.in_channels=5", f"run={tmp_path / 'run'}"])
    sentence = r"is 5, and the clips of data\.shards have 3: set .* or 1 for grayscale"
    with pytest.raises(InputError, match=sentence):
        train(config)
