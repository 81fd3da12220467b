"""Frozen encoders, whoever trained them, as tiny random models: they equal their libraries'."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from encoder_models import IMAGE_CASES, VIDEO_CASES, Case
from material import close, random_clip, small
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from tiny import randomize
from torch import Tensor

from adamae.common.errors import InputError
from adamae.kernels.patchify import IMAGENET_MEAN, IMAGENET_STD
from adamae.model.adamae import AdaMAE
from adamae.model.encoder import Features
from adamae.model.encoders.encoder import Encoder
from adamae.model.encoders.images import FrameEncoder
from adamae.model.encoders.open_encoder import KINDS, open_encoder
from adamae.model.weights import pretrained
from adamae.model.weights.load_model import load_encoder
from adamae.training.load_config import load_config

CASES = VIDEO_CASES | IMAGE_CASES


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write weights of this project, and return their file."""
    file = tmp_path_factory.mktemp("own") / "own.safetensors"
    config = small(encoder_width=24)
    metadata = pretrained.make_metadata(config, rate={"fps": 8.0})
    pretrained.save(file, AdaMAE(config).state_dict(), metadata)
    return file


@pytest.fixture(scope="session")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dinov2")
    IMAGE_CASES["dinov2"].write(folder)
    return folder


def clip_for(encoder: Encoder, batch_size: int = 2) -> Tensor:
    shape = (batch_size, encoder.num_frames, *encoder.image_size, 3)
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def test_own_weights(own: Path) -> None:
    encoder = open_encoder(str(own))
    clip = random_clip(small())
    assert encoder.name == str(own)
    assert (encoder.num_frames, encoder.image_size) == (4, (32, 32))
    assert (encoder.grid, encoder.dim) == ((2, 4, 4), 24)
    assert encoder.frame_rate == {"fps": 8.0}
    tokens = encoder.tokens(clip)
    assert torch.equal(tokens, load_encoder(own).encode(clip).tokens)
    assert not tokens.requires_grad
    close(encoder.pooled(clip), tokens.mean(dim=1))
    other = open_encoder(own, num_frames=8, image_size=[16, 32])
    assert other.grid == (4, 2, 4)
    assert other.tokens(clip_for(other)).shape == (2, 32, 24)


def test_a_videomae_of_transformers_needs_no_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "image_size": 32,
        "patch_size": 8,
        "num_frames": 4,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 192,
        "use_mean_pooling": False,
    }
    model = transformers.VideoMAEForPreTraining(transformers.VideoMAEConfig(**options)).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    encoder = open_encoder(tmp_path)
    clip = clip_for(encoder)
    options = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD, "do_resize": False}
    processor = transformers.VideoMAEImageProcessor(**options, do_center_crop=False)
    processor.save_pretrained(tmp_path)
    frames = [list(video.movedim(-1, 1)) for video in clip]
    with torch.no_grad():
        expected = model.videomae(**processor(frames, return_tensors="pt")).last_hidden_state
    close(encoder.tokens(clip), expected)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        close(open_encoder(tmp_path).tokens(clip), expected)
    transformers.VideoMAEImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="with another mean and deviation than ImageNet's"):
        open_encoder(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("name", VIDEO_CASES)
def test_a_video_model_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    case = VIDEO_CASES[name]
    model = case.write(tmp_path)
    encoder = open_encoder(tmp_path)
    clip = clip_for(encoder)
    inputs = process(case, [list(video.movedim(-1, 1)) for video in clip])
    options = {"skip_predictor": True} if "vjepa2" in name else {}
    hidden = model(**inputs, **options).last_hidden_state
    expected = hidden[:, case.num_prefix :]
    if name == "timesformer":
        # Frames of a patch follow each other.
        expected = expected.unflatten(1, (-1, encoder.num_frames)).transpose(1, 2).flatten(1, 2)
    close(encoder.tokens(clip), expected)
    close(encoder.pooled(clip), hidden[:, 0] if case.num_prefix else expected.mean(dim=1))
    assert expected.shape[1:] == (torch.tensor(encoder.grid).prod(), encoder.dim)
    assert encoder.frame_rate is None


@torch.no_grad()
@pytest.mark.parametrize("name", IMAGE_CASES)
def test_an_image_model_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    case = IMAGE_CASES[name]
    model = case.write(tmp_path)
    encoder = open_encoder(tmp_path, num_frames=3)
    clip = clip_for(encoder)
    output = model(**process(case, list(clip.flatten(0, 1).movedim(-1, 1))))
    patches = output.last_hidden_state[:, case.num_prefix :]
    close(encoder.tokens(clip), patches.unflatten(0, (2, 3)).flatten(1, 2))
    vectors = output.pooler_output.unflatten(0, (2, 3))
    close(encoder.pooled(clip), vectors.mean(dim=1))
    encoder.frames = "difference"
    first, second, third = vectors.unbind(1)
    change = ((second - first).abs() + (third - second).abs()) / 2
    close(encoder.pooled(clip), torch.cat((vectors.mean(dim=1), change), dim=1))


def process(case: Case, frames: Any) -> dict[str, Tensor]:
    """Normalize frames as transformers does; it shall not scale them, they have the right size."""
    processor = getattr(transformers, case.processor)(**case.options)
    if case.processor == "Siglip2ImageProcessor":
        return processor(frames, return_tensors="pt")
    return processor(frames, do_resize=False, do_center_crop=False, return_tensors="pt")


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_tokens_lie_where_the_pixels_are(name: str, tmp_path: Path) -> None:
    CASES[name].write(tmp_path)
    is_fixed = name.startswith(("vivit", "timesformer"))
    shape = {} if is_fixed else {"num_frames": 6, "image_size": [64, 96]}
    if name.startswith("vjepa2"):
        shape["image_size"] = [64, 64]
    encoder = open_encoder(tmp_path, **shape)
    grid = encoder.grid
    clip = clip_for(encoder, 1)
    changed = clip.clone()
    # The second patch along time, the last row, and the first column.
    t, h = encoder.num_frames // grid[0], encoder.image_size[0] // grid[1]
    w = encoder.image_size[1] // grid[2]
    changed[:, t : 2 * t, -h:, :w] = 255 - changed[:, t : 2 * t, -h:, :w]
    difference = (encoder.tokens(changed) - encoder.tokens(clip)).norm(dim=-1).view(grid)
    assert difference.argmax() == torch.arange(difference.numel()).view(grid)[1, -1, 0]


def write_timm(folder: Path, architecture: str, arguments: dict[str, Any]) -> Any:
    model = timm.create_model(architecture, num_classes=3, pretrained_cfg_overlay={}, **arguments)
    randomize(model)
    model.pretrained_cfg |= {
        "input_size": (3, 32, 32),
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.25, 0.3),
    }
    save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0).eval()


TRANSFORMER = {"embed_dim": 48, "num_heads": 3, "depth": 1, "img_size": 32, "patch_size": 8}
SWIN = {"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2), "img_size": 32}


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "arguments", "size", "grid", "dim"),
    [
        ("vit_tiny_patch16_224", TRANSFORMER, [32, 64], (4, 8), 48),
        ("vit_tiny_patch16_224", {**TRANSFORMER, "global_pool": "map"}, [32, 32], (4, 4), 48),
        ("swin_tiny_patch4_window7_224", SWIN, [32, 32], (4, 4), 32),
        ("resnet10t", {}, [64, 96], (2, 3), 512),
    ],
)
def test_an_image_model_equals_that_of_timm(
    architecture: str,
    arguments: dict[str, Any],
    size: list[int],
    grid: tuple[int, int],
    dim: int,
    tmp_path: Path,
) -> None:
    model = write_timm(tmp_path, architecture, arguments)
    encoder = open_encoder(tmp_path, num_frames=3, image_size=size)
    assert (encoder.grid, encoder.dim) == ((3, *grid), dim)
    clip = clip_for(encoder)
    images = clip.flatten(0, 1).movedim(-1, 1) / 255
    mean = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)
    std = torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1)
    if "img_size" in arguments:
        model.set_input_size(tuple(size))
    vectors = model((images - mean) / std).unflatten(0, (2, 3))
    close(encoder.pooled(clip), vectors.mean(dim=1))
    features = model.forward_features((images - mean) / std)
    if features.ndim == 4:
        features = (features if "swin" in architecture else features.movedim(1, -1)).flatten(1, 2)
    else:
        features = features[:, model.num_prefix_tokens :]
    close(encoder.tokens(clip), features.unflatten(0, (2, 3)).flatten(1, 2))


def test_clips_that_an_encoder_was_not_opened_for(own: Path, dinov2: Path) -> None:
    encoder = open_encoder(own)
    message = "takes clips of 4 frames of 32×32 pixels, and these have 8 frames of 48×32 pixels"
    with pytest.raises(InputError, match=message):
        encoder(torch.zeros(1, 8, 32, 48, 3, dtype=torch.uint8))
    with pytest.raises(InputError, match="the clip has 5 channels, and the model takes 3"):
        open_encoder(dinov2, num_frames=1)(torch.zeros(1, 1, 32, 32, 5, dtype=torch.uint8))


def test_frames_that_windows_share_are_encoded_once(
    dinov2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = open_encoder(dinov2, num_frames=4, frames="difference")
    assert isinstance(encoder, FrameEncoder)
    video = clip_for(encoder, 2).flatten(0, 1)
    windows = torch.stack([video[:4], video[2:6], video[4:]])
    single = [encoder(window[None]) for window in windows]
    counts = []
    encode_images = encoder.encode_images

    def count_images(images: Tensor) -> Features:
        counts.append(len(images))
        return encode_images(images)

    monkeypatch.setattr(encoder, "encode_images", count_images)
    together = encoder(windows)
    assert counts == [8]
    for name in Features._fields:
        close(getattr(together, name), torch.cat([getattr(one, name) for one in single]))


def test_shapes_that_an_encoder_cannot_take(own: Path, dinov2: Path, tmp_path: Path) -> None:
    def refused(message: str, path: Path, **options: Any) -> None:
        with pytest.raises(InputError, match=message):
            open_encoder(path, **options)

    refused("frames is 'max': choose one of mean, difference", dinov2, frames="max")
    refused(
        "frames=difference is for image models, and .* is a model of videos",
        own,
        frames="difference",
    )
    refused("need two, and num_frames is 1", dinov2, frames="difference", num_frames=1)
    refused(
        "36×32 pixels cannot be divided into patches of 1 frame of 8×8", dinov2, image_size=[32, 36]
    )
    refused(r"image_size is \(1, 2, 3\)", dinov2, image_size=(1, 2, 3))
    VIDEO_CASES["vivit"].write(tmp_path)
    refused("a ViViT takes clips of the shape .*: 4 frames of 32×32 pixels", tmp_path, num_frames=8)


def test_other_models_are_not_read_as_weights_of_this_project(dinov2: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a dinov2 of transformers: its features are for"):
        load_encoder(dinov2)
    (tmp_path / "config.json").write_text('{"architecture": "resnet50"}')
    arguments = [f"init_from={tmp_path}", "data.shards=shards", "task=finetune"]
    with pytest.raises(InputError, match=r"is a resnet50 of timm: .*extract_features\.py, compare"):
        load_config(arguments)


def test_models_that_cannot_be_opened(
    dinov2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message):
            open_encoder(folder)

    folder = Path(shutil.copytree(dinov2, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    normal = weights.pop("layernorm.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    refused("1 weights of a Dinov2Model are missing, such as layernorm.weight")
    save_file({**weights, "layernorm.weight": normal[:5]}, folder / "model.safetensors")
    refused("cannot be loaded as a model of transformers")
    (folder / "model.safetensors").write_bytes(b"not a file of tensors")
    refused("cannot be loaded as a model of transformers")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    refused("has no weights as safetensors: other formats are pickles")
    (folder / "preprocessor_config.json").unlink()
    refused("does not say how its model's frames are normalized: add the preprocessor_config.json")
    (folder / "config.json").write_text('{"model_type": "bert"}')
    refused(f"is a bert of transformers, which .*: choose one of {', '.join(KINDS)}, or a model")
    (folder / "config.json").write_text('{"architecture": "no_such_model"}')
    refused("has no weights as safetensors")
    save_file(weights, folder / "model.safetensors")
    refused("cannot be loaded as a model of timm: .*no_such_model")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="pip install 'transformers>=5'"):
        open_encoder(dinov2)
