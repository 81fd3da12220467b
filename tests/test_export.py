"""`export.py`: weights go out, are read by those they are for, and come back unchanged."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from av import VideoFrame
from runs import is_same
from safetensors.torch import load_file

import adamae
from adamae import export
from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.classifier import Probe, VideoClassifier
from adamae.model.config import ModelConfig
from adamae.model.encoders.teacher import make_teacher
from adamae.model.load_adamae import load_adamae
from adamae.model.targets import make_target
from adamae.model.weights import pretrained
from adamae.model.weights.external_layouts import to_external
from adamae.model.weights.load_model import load_encoder
from adamae.pipeline.decoding.video_source import Scaler
from adamae.pipeline.planning.crops import view_crop

CONFIG = ModelConfig(
    size="tiny",
    encoder_depth=2,
    decoder_depth=1,
    num_frames=4,
    image_size=32,
    patch_size=8,
    mask_ratio=0.75,
)
CLIP = torch.randint(
    0, 256, (2, 4, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


def run_export(*arguments: str | Path) -> None:
    export.main(export.parse_arguments([str(word) for word in arguments]))


def pixel_values(clip: torch.Tensor) -> torch.Tensor:
    """Return Hugging Face's input: frames first, then channels, floats already normalized."""
    mean = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
    std = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
    return (clip.movedim(4, 2) / 255 - mean) / std


@pytest.fixture
def model() -> AdaMAE:
    return AdaMAE(CONFIG).eval()


@pytest.fixture
def run(write_run: Callable[..., Path], model: AdaMAE) -> Path:
    """Write a run of `model`, whose older checkpoint has other weights."""
    return write_run(AdaMAE(CONFIG), model)


@pytest.fixture
def hub(run: Path, tmp_path: Path) -> Path:
    run_export("export", run, tmp_path / "hub", "--to", "huggingface")
    return tmp_path / "hub"


@pytest.mark.parametrize("layout", ["encoder", "huggingface", "videomae"])
def test_the_last_line_is_a_call_that_loads_what_was_written(
    run: Path, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix = ".safetensors" if layout == "videomae" else ""
    run_export("export", run, tmp_path / f"out{suffix}", "--to", layout)
    call = capsys.readouterr().out.strip().rpartition("next, in Python: ")[2]
    assert eval(call, {"adamae": adamae, "transformers": transformers}).config.patch_size == 8


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_authors_layout_there_and_back(
    run: Path, model: AdaMAE, tmp_path: Path, suffix: str
) -> None:
    exported = tmp_path / f"reference{suffix}"
    for file in (exported, tmp_path / f"again{suffix}"):
        run_export("export", run, file, "--to", "adamae")
        assert file.read_bytes() == exported.read_bytes()
    state = torch.load(exported)["model"] if suffix == ".pth" else load_file(exported)
    assert state["encoder.patch_embed.proj.weight"].shape == (96, 3, 2, 8, 8)
    imported = tmp_path / "own.safetensors"
    run_export("import", exported, imported, "--num-frames", "4")
    assert is_same(load_file(imported), model.state_dict())
    again = load_adamae(imported, mask_ratio=0.75)
    assert again.config.grid == CONFIG.grid
    assert torch.equal(again(CLIP, 0, 0).pred, model(CLIP, 0, 0).pred)


def test_what_published_checkpoints_look_like(model: AdaMAE, tmp_path: Path) -> None:
    """They hold a command line, and weights named as DistributedDataParallel leaves them."""
    state = to_external(model.state_dict(), "adamae")
    published = {f"module.{name}": value for name, value in state.items()}
    content = {"model": published, "epoch": 799, "args": argparse.Namespace(lr=1e-3)}
    torch.save(content, tmp_path / "checkpoint-799.pth")
    state, config, *_ = pretrained.load(tmp_path / "checkpoint-799.pth", num_frames=4)
    assert is_same(state, model.state_dict())
    assert config.grid == CONFIG.grid


def load_checked(
    kind: type[transformers.PreTrainedModel], folder: Path
) -> transformers.PreTrainedModel:
    """Load a folder with transformers, and check that every weight is there, and nothing else."""
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[fault]
    return model.eval()


def test_a_classifier_keeps_its_classes_at_hugging_face_and_in_an_import(tmp_path: Path) -> None:
    own = VideoClassifier(CONFIG, num_classes=2).eval()
    torch.nn.init.normal_(own.head.weight)
    file = tmp_path / "classifier.safetensors"
    metadata = pretrained.make_metadata(CONFIG, classes=["up", "down"])
    pretrained.save(file, own.state_dict(), metadata)
    run_export("export", file, tmp_path / "hub", "--to", "huggingface")
    reference = transformers.VideoMAEForVideoClassification.from_pretrained(tmp_path / "hub").eval()
    logits = reference(pixel_values(CLIP)).logits
    torch.testing.assert_close(logits, own(CLIP), atol=1e-4, rtol=1e-4)
    assert reference.config.id2label == {0: "up", 1: "down"}
    run_export("import", file, tmp_path / "b.safetensors")
    again = pretrained.load(tmp_path / "b.safetensors")
    assert (again.config, again.classes) == (CONFIG, ["up", "down"])


def test_a_student_is_exported_without_its_teacher(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher.safetensors"
    student = tmp_path / "student.safetensors"
    pretrained.save(teacher, AdaMAE(CONFIG).state_dict(), pretrained.make_metadata(CONFIG))
    config = replace(CONFIG, target="teacher", teacher=str(teacher))
    model = AdaMAE(config, make_target(config, make_teacher(config))).eval()
    pretrained.save(student, model.state_dict(), pretrained.make_metadata(config))
    teacher.unlink()
    for kind, name in (("encoder", "out"), ("adamae", "authors.pth"), ("huggingface", "hub")):
        run_export("export", student, tmp_path / name, "--to", kind)
    for name in torch.load(tmp_path / "authors.pth")["model"]:
        assert not name.startswith(("decoder", "token"))
    encoder = tmp_path / "out/encoder.safetensors"
    run_export("export", encoder, tmp_path / "again", "--to", "huggingface")
    # transformers' decoder predicts pixels, so one that predicts features is left out.
    for folder in ("hub", "again"):
        reference = load_checked(transformers.VideoMAEModel, tmp_path / folder)
        features = reference(pixel_values(CLIP)).last_hidden_state
        torch.testing.assert_close(features, model.encode(CLIP).tokens, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("height", "width", "atol"), [(32, 32, 1e-5), (96, 192, 0.03)])
def test_huggingface_reads_a_model_and_makes_the_same_features_of_raw_frames(
    hub: Path, model: AdaMAE, height: int, width: int, atol: float
) -> None:
    """Features are those of the frames' middle, which another library may have scaled."""
    coarse = torch.rand(4, 3, 9, 18, generator=torch.Generator().manual_seed(1)) * 255
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 255)
    frames = [frame.permute(1, 2, 0).to(torch.uint8).numpy() for frame in smooth]
    processor = transformers.AutoImageProcessor.from_pretrained(hub)
    reference = load_checked(transformers.VideoMAEForPreTraining, hub)
    with torch.no_grad():
        features = reference.videomae(**processor(frames, return_tensors="pt")).last_hidden_state
    scaler = Scaler(view_crop(width, height, 0, 1), False, 32, (width, height))
    images = [scaler(VideoFrame.from_ndarray(frame, "rgb24")) for frame in frames]
    clip = torch.from_numpy(np.stack(images))
    own = model.encode(clip[None]).tokens
    torch.testing.assert_close(features, own, rtol=0, atol=atol * own.abs().max().item())
    # It also comes back, without the token sampler, for which transformers has no place.
    again = load_adamae(hub)
    assert again.config.dimensions == CONFIG.dimensions
    assert torch.equal(again.encode(clip[None]).tokens, own)


def test_a_folder_of_hugging_face_with_a_damaged_description(hub: Path) -> None:
    file = hub / "config.json"
    for text, message in (
        ("{", "config.json is damaged"),
        ('{"model_type": "videomae"}', "config.json does not say hidden"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            pretrained.load(hub)


def test_an_import_says_what_the_file_does_not(
    run: Path, hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_export("export", run, tmp_path / "reference.pth", "--to", "adamae")
    capsys.readouterr()
    run_export("import", hub, tmp_path / "a.safetensors")
    warnings = capsys.readouterr().err
    assert "does not say, so assumed: masking tube, mask_ratio 0.9\n" in warnings
    assert "it has no token sampler" in warnings
    reference = tmp_path / "reference.pth"
    run_export("import", reference, tmp_path / "b.safetensors", "--num-frames", "4")
    warnings = capsys.readouterr().err
    assumed = "masking adaptive, mask_ratio 0.95, num_frames 4, image_size 32, positions flat-1d"
    assert assumed in warnings
    assert "no token sampler" not in warnings
    run_export("import", run, tmp_path / "c.safetensors")
    assert capsys.readouterr().err == ""


def test_encoder_alone_with_a_model_card(run: Path, model: AdaMAE, tmp_path: Path) -> None:
    run_export("export", run, tmp_path / "encoder")
    names = {path.name for path in (tmp_path / "encoder").iterdir()}
    assert names == {"encoder.safetensors", "README.md"}
    encoder = load_encoder(tmp_path / "encoder/encoder.safetensors")
    tokens = model.encode(CLIP).tokens
    assert torch.equal(encoder.encode(CLIP).tokens, tokens)
    assert torch.equal(encoder.encode(CLIP).pooled, tokens.mean(1))
    card = (tmp_path / "encoder/README.md").read_text()
    count = sum(value.numel() for value in encoder.parameters()) / 1e6
    assert f"| parameters | {count:.1f} M |" in card
    assert "| input | 4 frames of 32×32, uint8, RGB |" in card
    assert str(tmp_path) not in card, "it says nothing of the machine that it was made on"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("import nowhere.pth x.safetensors", "nowhere.pth does not exist"),
        ("import list.pth x.safetensors", "list.pth is no state dict"),
        ("import run x.bin", "x.bin is not a safetensors file"),
        (
            "export separable.safetensors out --to huggingface",
            "separable-3d positions: use export … --to encoder",
        ),
        ("exprt run out", "command: invalid choice: 'exprt'"),
        ("export run x.bin --to adamae", "x.bin is not a file of weights"),
        ("export probe.safetensors x.pth --to adamae", "no other project has a probe: use"),
    ],
)
def test_bad_input(
    run: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, sentence: str
) -> None:
    monkeypatch.chdir(run.parent)
    torch.save([torch.zeros(1)], "list.pth")
    separable = replace(CONFIG, positions="separable-3d")
    for name, config, model in (
        ("probe", CONFIG, Probe(CONFIG, 2, "linear")),
        ("separable", separable, AdaMAE(separable)),
    ):
        metadata = pretrained.make_metadata(config)
        pretrained.save(Path(f"{name}.safetensors"), model.state_dict(), metadata)
    before = set(Path().iterdir())
    with pytest.raises(InputError, match=sentence):
        run_export(*arguments.split())
    assert set(Path().iterdir()) == before, "nothing is half-written"
