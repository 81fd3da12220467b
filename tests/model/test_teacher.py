"""Features of frozen teachers as the target, with random weights."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from encoder_models import VIDEO_CASES
from material import random_clip, small
from timm.models import save_for_hf
from torch import Tensor

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.encoders.open_encoder import open_encoder
from adamae.model.encoders.teacher import hash_teacher, make_teacher
from adamae.model.load_adamae import load_adamae
from adamae.model.maps import reconstruct
from adamae.model.targets import Target, fit_to_grid, make_target
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.pretrained import load, make_metadata, save
from adamae.training.parallelize import compile_in_place

# Of the images that the teachers of timm were trained with.
MEAN = (0.5, 0.4, 0.3)
STD = (0.2, 0.25, 0.3)


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write weights of this project, and return their file."""
    file = tmp_path_factory.mktemp("own") / "teacher.safetensors"
    config = small(encoder_width=24, patch_size=16)
    save(file, AdaMAE(config).state_dict(), make_metadata(config))
    return file


@pytest.fixture(scope="session")
def timm_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a vision transformer of timm, and return its folder."""
    arguments = {"embed_dim": 48, "num_heads": 3, "depth": 1, "img_size": 32}
    return write_timm(tmp_path_factory.mktemp("timm"), "vit_tiny_patch16_224", arguments)


def write_timm(folder: Path, architecture: str, arguments: dict[str, Any]) -> Path:
    model = timm.create_model(architecture, num_classes=3, pretrained_cfg_overlay={}, **arguments)
    model.pretrained_cfg |= {"input_size": (3, 32, 32), "mean": MEAN, "std": STD}
    save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return folder


def teach(teacher: Path, **changes: Any) -> ModelConfig:
    return small(**{"target": "teacher", "teacher": str(teacher), "loss": "smooth-l1"} | changes)


def target_of(config: ModelConfig) -> Target:
    return make_target(config, make_teacher(config))


def student_of(config: ModelConfig) -> AdaMAE:
    return AdaMAE(config, target_of(config))


def normalized(frames: Tensor) -> Tensor:
    """Make images [B·T, C, H, W] of frames, uint8 [B, T, H, W, C], as timm's encoders take them."""
    images = frames.flatten(0, 1).float() / 255
    return ((images - torch.tensor(MEAN)) / torch.tensor(STD)).movedim(-1, 1)


@torch.no_grad()
def test_a_teacher_of_this_project_is_its_encoder_on_the_students_grid(own: Path) -> None:
    config = teach(own)
    clip = random_clip(config)
    target = target_of(config)
    # The teacher has 2×2×2 tokens, and the student 2×4×4.
    tokens = load_encoder(own).encode(clip).tokens
    volume = tokens.unflatten(1, (2, 2, 2)).movedim(-1, 1)
    finer = F.interpolate(volume, (2, 4, 4), mode="trilinear").flatten(2).mT
    features = target.prepare(clip)
    torch.testing.assert_close(features, finer)
    assert target.num_values == 24
    ids = torch.tensor([[3, 30], [0, 7]])
    pred = torch.randn(2, 2, 24)
    chosen = torch.stack([finer[0, ids[0]], finer[1, ids[1]]])
    deviation = (chosen.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = (chosen - chosen.mean(-1, keepdim=True)) / deviation
    residual = (pred - expected).abs()
    smooth_l1 = torch.where(residual < 1, residual**2 / 2, residual - 0.5).mean(-1)
    torch.testing.assert_close(target(features, pred, ids), smooth_l1)
    # The cosine does not depend on the length of a prediction.
    cosine = target_of(replace(config, loss="cosine"))
    losses = cosine(features, 3 * expected, ids)
    torch.testing.assert_close(losses, torch.zeros(2, 2), atol=1e-6, rtol=0)
    raw = target_of(replace(config, loss="mse", normalize_target=False))
    torch.testing.assert_close(raw(features, pred, ids), (pred - chosen).square().mean(-1))


@torch.no_grad()
def test_a_teacher_of_timm_sees_normalized_frames_one_by_one(timm_vit: Path) -> None:
    config = teach(timm_vit)
    clip = random_clip(config)
    reference = timm.create_model(f"local-dir:{timm_vit}", pretrained=True, num_classes=0).eval()
    # Without the class token.
    tokens = reference.forward_features(normalized(clip[:, ::2]))[:, 1:]
    expected = fit_to_grid(tokens.reshape(2, 2, 2, 2, 48), config.grid)
    torch.testing.assert_close(target_of(config).prepare(clip), expected)
    larger = target_of(teach(timm_vit, teacher_image_size=64)).prepare(clip)
    assert larger.shape == expected.shape
    assert not torch.allclose(larger, expected)


@torch.no_grad()
def test_a_teacher_of_transformers_sees_scaled_clips(tmp_path: Path) -> None:
    """It imports transformers, which takes seconds."""
    VIDEO_CASES["vjepa2"].write(tmp_path)
    config = teach(tmp_path, num_frames=6, image_size=64)
    clip = random_clip(config)
    images = clip.flatten(0, 1).movedim(-1, 1).float()
    scaled = F.interpolate(images, (32, 32), mode="bilinear", antialias=True).round().byte()
    encoder = open_encoder(tmp_path, num_frames=6)
    tokens = encoder.tokens(scaled.movedim(1, -1).unflatten(0, (2, 6)))
    expected = fit_to_grid(tokens.unflatten(1, (3, 2, 2)), config.grid)
    torch.testing.assert_close(target_of(config).prepare(clip), expected)
    # As large as the clips, nothing is scaled.
    tokens = open_encoder(tmp_path, num_frames=6, image_size=64).tokens(clip)
    expected = fit_to_grid(tokens.unflatten(1, (3, 4, 4)), config.grid)
    large = teach(tmp_path, num_frames=6, image_size=64, teacher_image_size=64)
    torch.testing.assert_close(target_of(large).prepare(clip), expected)
    # What describes the model is part of the digest.
    digest = hash_teacher(config)
    file = tmp_path / "video_preprocessor_config.json"
    file.write_text(file.read_text().replace("0.485", "0.5"))
    assert hash_teacher(config) != digest


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "width", "arguments"),
    [
        ("resnet10t", 512, {}),
        (
            "swin_tiny_patch4_window7_224",
            32,
            {"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2), "img_size": 32},
        ),
    ],
)
def test_a_convolutional_teacher_and_one_with_windows(
    name: str, width: int, arguments: dict, tmp_path: Path
) -> None:
    target = target_of(teach(write_timm(tmp_path, name, arguments)))
    assert target.num_values == width
    assert target.prepare(random_clip(target.config)).shape == (2, 32, width)


def test_features_are_averaged_or_interpolated() -> None:
    fine = torch.arange(32.0).view(1, 2, 4, 4, 1)
    assert fit_to_grid(fine, (2, 4, 4)).flatten().tolist() == list(range(32))
    assert fit_to_grid(fine, (1, 2, 2)).flatten().tolist() == [10.5, 12.5, 18.5, 20.5]
    finer = fit_to_grid(fine[:, :, :1, :2], (2, 1, 4)).view(2, 4)
    assert finer.tolist() == [[0, 0.25, 0.75, 1], [16, 16.25, 16.75, 17]]


def test_a_model_learns_from_a_teacher_that_is_neither_trained_nor_saved(own: Path) -> None:
    config = teach(own, masking="random")
    model = student_of(config)
    clip = random_clip(config)
    teacher = model.target.teacher.encoder
    assert not any("teacher" in name or name.startswith("target") for name in model.state_dict())
    assert not list(model.target.parameters())
    before = [value.clone() for value in teacher.parameters()]
    # It would change the teacher, too, if that had gradients.
    optimizer = torch.optim.AdamW([*model.parameters(), *teacher.parameters()], lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        output = model(clip, 0, 0)
        output.loss.backward()
        optimizer.step()
        losses.append(output.loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(map(torch.equal, before, teacher.parameters()))
    maps = reconstruct(model, clip)
    assert maps.reconstruction is None
    assert maps.error.isnan().sum() == 2 * config.num_visible


def test_a_compiled_student_has_the_same_loss_and_gradients(own: Path) -> None:
    config = teach(own, encoder_depth=1, decoder_depth=1)
    model = student_of(config).eval()
    clip = random_clip(config)

    def step() -> list[Tensor]:
        loss = model(clip, 0, 0).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = step()
    compile_in_place(model, backend="aot_eager")
    torch.testing.assert_close(step(), expected, atol=1e-5, rtol=1e-4)


def test_the_teacher_moves_to_the_clips_and_is_bf16_where_that_is_fast(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever the CPU is: first without bf16, then with it.
    monkeypatch.setattr("adamae.common.devices.choose_precision", lambda device, asked: "fp32")
    clip = random_clip(teach(own))
    exact = student_of(teach(own)).target.prepare(clip)
    monkeypatch.setattr("adamae.common.devices.choose_precision", lambda device, asked: asked)
    model = student_of(teach(own))
    encoder = model.target.teacher.encoder
    assert {value.dtype for value in encoder.parameters()} == {torch.bfloat16}
    assert {value.dtype for value in encoder.buffers()} == {torch.float32}
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert (model.target.prepare(clip) - exact).abs().max() < 0.03 * exact.abs().max()
    model.target.teacher.move_to(torch.device("meta"))
    assert {value.device.type for value in encoder.state_dict().values()} == {"meta"}


def test_a_digest_is_of_the_contents(own: Path, timm_vit: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(own, tmp_path / "copy.safetensors"))
    digest = hash_teacher(teach(own))
    assert hash_teacher(teach(copy)) == digest
    assert hash_teacher(teach(timm_vit)) != digest
    assert hash_teacher(small()) == ""
    # A single number differs.
    weights = load(own)
    weights.state["encoder.norm.bias"][0] = 1
    save(copy, weights.state, make_metadata(weights.config))
    assert hash_teacher(teach(copy)) != digest


def test_weights_are_loaded_without_the_teacher_they_learned_from(
    own: Path, tmp_path: Path
) -> None:
    teacher = Path(shutil.copy(own, tmp_path / "gone.safetensors"))
    config = teach(teacher)
    student = tmp_path / "student.safetensors"
    save(student, student_of(config).state_dict(), make_metadata(config))
    teacher.unlink()
    assert load(student).config == config
    load_encoder(student).encode(random_clip(config))
    with pytest.raises(InputError, match=r"model.teacher=.* cannot be used: .* does not exist"):
        load_adamae(student)


def test_a_teacher_that_does_not_fit_is_one_sentence(
    own: Path, timm_vit: Path, tmp_path: Path
) -> None:
    def refused(sentence: str, teacher: Path, **changes: Any) -> None:
        with pytest.raises(InputError, match=sentence):
            student_of(teach(teacher, **changes))

    refused("it takes 3 channels, and model.in_channels is 5", own, in_channels=5)
    refused("it takes 3 channels, and model.in_channels is 1", timm_vit, in_channels=1)
    refused("model.teacher=.*none cannot be used: .* does not exist", tmp_path / "none")
    refused("model.teacher=.* holds no checkpoint yet", tmp_path)
    (tmp_path / "config.json").write_text("{")
    refused("config.json is damaged", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    refused("is a bert of transformers, which no encoder here is for", tmp_path)
    refused("does not take images of 8×8 pixels", timm_vit, teacher_image_size=8)
