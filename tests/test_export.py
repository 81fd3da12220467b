"""`export.py`: weights go out, are read by those they are for, and come back unchanged."""

import argparse
import errno
import json
from pathlib import Path

import pytest
import torch
from av import VideoFrame
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, VideoMAEForPreTraining, VideoMAEForVideoClassification

import export
from common.errors import InputError
from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.config import ModelConfig
from model.encoder import VideoEncoder
from model.weights import pretrained, weight_files
from model.weights.layouts import to_adamae
from pipeline.decoding.video_source import Scaler
from pipeline.planning.crops import view_crop


def run_export(arguments: list[str]) -> None:
    export.main(export.parse_arguments(arguments))


CONFIG = ModelConfig(
    size="tiny", encoder_depth=2, decoder_depth=1, num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75
)
CLIP = torch.randint(0, 256, (2, 4, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> AdaMAE:
    torch.manual_seed(0)
    return AdaMAE(CONFIG).eval()


@pytest.fixture
def run(tmp_path: Path, model: AdaMAE) -> Path:
    """As train.py leaves it; its older checkpoint holds something else."""
    for step, state in ((5, AdaMAE(CONFIG).state_dict()), (10, model.state_dict())):
        folder = tmp_path / f"run/checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        save_file(state, folder / "model.safetensors")
    (tmp_path / "run/config.yaml").write_text(json.dumps({"model": vars(CONFIG)}))
    return tmp_path / "run"


def same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_authors_layout_there_and_back(run: Path, model: AdaMAE, tmp_path: Path, suffix: str) -> None:
    there, back = tmp_path / f"theirs{suffix}", tmp_path / "ours.safetensors"
    run_export(["export", str(run), str(there), "--to", "adamae"])
    published = torch.load(there, weights_only=True)["model"] if suffix == ".pth" else load_file(there)
    assert published["encoder.patch_embed.proj.weight"].shape == (96, 3, 2, 8, 8)
    run_export(["import", str(there), str(back), "--num-frames", "4"])
    assert same(load_file(back), model.state_dict())
    again = AdaMAE.from_pretrained(back, mask_ratio=0.75)
    assert again.config.grid == CONFIG.grid
    assert torch.equal(again(CLIP, 0, 0).pred, model(CLIP, 0, 0).pred)


def test_what_published_checkpoints_look_like(model: AdaMAE, tmp_path: Path) -> None:
    """With their command line beside the weights, and names as DistributedDataParallel and torch.compile leave them."""
    published = {f"module.{name}": value for name, value in to_adamae(model.state_dict()).items()}
    torch.save({"model": published, "epoch": 799, "args": argparse.Namespace(lr=1e-3)}, tmp_path / "checkpoint-799.pth")
    state, config, _ = pretrained.load(tmp_path / "checkpoint-799.pth", num_frames=4)
    assert same(state, model.state_dict())
    assert config.grid == CONFIG.grid


def test_huggingface_reads_a_pretraining_model(run: Path, model: AdaMAE, tmp_path: Path) -> None:
    run_export(["export", str(run), str(tmp_path / "hub"), "--to", "huggingface"])
    theirs, report = VideoMAEForPreTraining.from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    features = theirs.videomae(pixel_values(CLIP)).last_hidden_state
    torch.testing.assert_close(features, model.encode(CLIP).tokens, atol=1e-5, rtol=1e-5)
    # and back, without the token sampler, for which they have no place
    again = AdaMAE.from_pretrained(tmp_path / "hub")
    assert again.config.dimensions == CONFIG.dimensions
    assert torch.equal(again.encode(CLIP).tokens, model.encode(CLIP).tokens)


def test_huggingface_reads_a_classifier(tmp_path: Path) -> None:
    classifier = VideoClassifier(CONFIG, num_classes=5).eval()
    torch.nn.init.normal_(classifier.head.weight)
    names = ["up", "down", "left", "right", "still"]
    about = pretrained.make_metadata(CONFIG, names)
    pretrained.save(tmp_path / "classifier.safetensors", classifier.state_dict(), about)
    export.main(
        export.parse_arguments(
            ["export", str(tmp_path / "classifier.safetensors"), str(tmp_path / "hub"), "--to", "huggingface"]
        )
    )
    theirs = VideoMAEForVideoClassification.from_pretrained(tmp_path / "hub").eval()
    torch.testing.assert_close(theirs(pixel_values(CLIP)).logits, classifier(CLIP), atol=1e-4, rtol=1e-4)
    assert [theirs.config.id2label[i] for i in range(5)] == names


@pytest.mark.parametrize(("height", "width", "atol"), [(32, 32, 1e-5), (96, 192, 0.03)])
def test_their_processor_makes_the_same_features_of_raw_frames(
    run: Path, model: AdaMAE, tmp_path: Path, height: int, width: int, atol: float
) -> None:
    """The middle of the frames, scaled by another library where it has to be scaled."""
    run_export(["export", str(run), str(tmp_path / "hub"), "--to", "huggingface"])
    coarse = torch.rand(4, 3, 9, 18, generator=torch.Generator().manual_seed(1)) * 255
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 255)
    frames = [frame.permute(1, 2, 0).to(torch.uint8).numpy() for frame in smooth]
    processor = AutoImageProcessor.from_pretrained(tmp_path / "hub")
    theirs = VideoMAEForPreTraining.from_pretrained(tmp_path / "hub").eval()
    with torch.no_grad():
        features = theirs.videomae(**processor(frames, return_tensors="pt")).last_hidden_state
    scaler = Scaler(view_crop(width, height, 0, 1), False, 32, (width, height))
    clip = torch.stack([torch.from_numpy(scaler(VideoFrame.from_ndarray(frame, "rgb24"))) for frame in frames])
    ours = model.encode(clip[None]).tokens
    torch.testing.assert_close(features, ours, rtol=0, atol=atol * ours.abs().max().item())


def test_an_import_says_what_the_file_does_not(run: Path, tmp_path: Path, capsys) -> None:
    run_export(["export", str(run), str(tmp_path / "hub"), "--to", "huggingface"])
    run_export(["export", str(run), str(tmp_path / "theirs.pth"), "--to", "adamae"])
    capsys.readouterr()
    run_export(["import", str(tmp_path / "hub"), str(tmp_path / "a.safetensors")])
    said = capsys.readouterr().err
    assert "does not say, so assumed: masking tube, mask_ratio 0.9\n" in said
    assert "it has no token sampler" in said
    export.main(
        export.parse_arguments(
            ["import", str(tmp_path / "theirs.pth"), str(tmp_path / "b.safetensors"), "--num-frames", "4"]
        )
    )
    said = capsys.readouterr().err
    assert "masking adaptive, mask_ratio 0.95, num_frames 4, image_size 32, positions flat-1d" in said
    assert "no token sampler" not in said
    run_export(["import", str(run), str(tmp_path / "c.safetensors")])
    assert capsys.readouterr().err == ""


def test_what_a_classifier_knows_survives_an_import(tmp_path: Path) -> None:
    classifier = VideoClassifier(CONFIG, num_classes=2)
    pretrained.save(
        tmp_path / "a.safetensors", classifier.state_dict(), pretrained.make_metadata(CONFIG, ["up", "down"])
    )
    run_export(["import", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")])
    again = pretrained.load(tmp_path / "b.safetensors")
    assert (again.config, again.classes) == (CONFIG, ["up", "down"])


def test_a_full_disk_is_an_error_of_the_disk(run: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weight_files, "save_file", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        run_export(["export", str(run), str(tmp_path / "out.safetensors"), "--to", "adamae"])
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.glob("*out*"))


def pixel_values(clip: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (clip.movedim(4, 2) / 255 - mean) / std


def test_encoder_alone_with_a_model_card(run: Path, model: AdaMAE, tmp_path: Path) -> None:
    run_export(["export", str(run), str(tmp_path / "encoder")])
    assert {path.name for path in (tmp_path / "encoder").iterdir()} == {"encoder.safetensors", "README.md"}
    encoder = VideoEncoder.from_pretrained(tmp_path / "encoder/encoder.safetensors")
    assert torch.equal(encoder.encode(CLIP).pooled, model.encode(CLIP).pooled)
    card = (tmp_path / "encoder/README.md").read_text()
    count = sum(value.numel() for value in encoder.parameters()) / 1e6
    assert f"| parameters | {count:.1f} M |" in card
    assert "| input | 4 frames of 32×32, uint8, RGB |" in card
    assert str(tmp_path) not in card  # says nothing of the machine it was made on


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["import", "nowhere.pth", "x.safetensors"], "nowhere.pth does not exist"),
        (["import", "text.pth", "x.safetensors"], "text.pth cannot be read as weights"),
        (["import", "text.safetensors", "x.safetensors"], "text.safetensors cannot be read as weights"),
        (["import", "list.pth", "x.safetensors"], "list.pth is no state dict"),
        (["import", "half.safetensors", "x.safetensors"], "missing keys: decoder.embed.weight"),
        (["import", "run", "x.bin"], "x.bin is not a safetensors file"),
        (["export", "run", "x.bin", "--to", "adamae"], "x.bin is not a file of weights"),
        (["export", "code.pth", "x.pth", "--to", "adamae"], "code.pth cannot be read as weights"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_bad_input(run: Path, model: AdaMAE, monkeypatch, arguments: list[str], sentence: str) -> None:
    monkeypatch.chdir(run.parent)
    Path("text.pth").write_text("no weights")
    Path("text.safetensors").write_text("no weights")
    torch.save([torch.zeros(1)], "list.pth")
    half = to_adamae(model.state_dict())
    del half["encoder_to_decoder.weight"]
    save_file(half, "half.safetensors")
    torch.save({"model": Exploding()}, "code.pth")
    before = set(Path().iterdir())
    with pytest.raises(InputError) as error:
        run_export(arguments)
    assert sentence in str(error.value)
    assert set(Path().iterdir()) == before  # nothing half-written, and no code in a file was run


class Exploding:
    """Unpickled without weights_only, this would write a file."""

    def __reduce__(self):
        return Path.touch, (Path("exploded"),)
