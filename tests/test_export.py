"""`export.py`: weights go out, are read by those they are for, and come back unchanged."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from av import VideoFrame
from runs import is_same
from safetensors.torch import load_file

from adamae import export
from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.classifier import Probe, VideoClassifier
from adamae.model.config import ModelConfig
from adamae.model.targets import make_target
from adamae.model.weights import pretrained
from adamae.model.weights.external_layouts import to_external
from adamae.model.weights.load_model import load_adamae, load_encoder
from adamae.model.weights.teachers import make_teacher
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
    """Hugging Face's input: frames first, floats already normalized."""
    mean, std = (
        torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    return (clip.movedim(4, 2) / 255 - mean) / std


@pytest.fixture
def model() -> AdaMAE:
    return AdaMAE(CONFIG).eval()


@pytest.fixture
def run(write_run: Callable[..., Path], model: AdaMAE) -> Path:
    """Its older checkpoint holds something else."""
    return write_run(AdaMAE(CONFIG), model)


@pytest.fixture
def hub(run: Path, tmp_path: Path) -> Path:
    run_export("export", run, tmp_path / "hub", "--to", "huggingface")
    return tmp_path / "hub"


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_authors_layout_there_and_back(
    run: Path, model: AdaMAE, tmp_path: Path, suffix: str
) -> None:
    there, back = tmp_path / f"reference{suffix}", tmp_path / "own.safetensors"
    for file in (there, tmp_path / f"again{suffix}"):
        run_export("export", run, file, "--to", "adamae")
        assert file.read_bytes() == there.read_bytes()
    published = (
        torch.load(there, weights_only=True)["model"] if suffix == ".pth" else load_file(there)
    )
    assert published["encoder.patch_embed.proj.weight"].shape == (96, 3, 2, 8, 8)
    run_export("import", there, back, "--num-frames", "4")
    assert is_same(load_file(back), model.state_dict())
    again = load_adamae(back, mask_ratio=0.75)
    assert again.config.grid == CONFIG.grid
    assert torch.equal(again(CLIP, 0, 0).pred, model(CLIP, 0, 0).pred)


def test_what_published_checkpoints_look_like(model: AdaMAE, tmp_path: Path) -> None:
    """With their command line beside the weights, and names as DistributedDataParallel and torch.compile leave them."""
    published = {
        f"module.{name}": value for name, value in to_external(model.state_dict(), "adamae").items()
    }
    torch.save(
        {"model": published, "epoch": 799, "args": argparse.Namespace(lr=1e-3)},
        tmp_path / "checkpoint-799.pth",
    )
    state, config, *_ = pretrained.load(tmp_path / "checkpoint-799.pth", num_frames=4)
    assert is_same(state, model.state_dict())
    assert config.grid == CONFIG.grid


def load_checked(
    kind: type[transformers.PreTrainedModel], folder: Path
) -> transformers.PreTrainedModel:
    """Load a folder with transformers, and check that every weight is there, and nothing else."""
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(
        report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    return model.eval()


def test_a_classifier_keeps_its_classes_at_hugging_face_and_in_an_import(tmp_path: Path) -> None:
    own, file = VideoClassifier(CONFIG, num_classes=2).eval(), tmp_path / "classifier.safetensors"
    torch.nn.init.normal_(own.head.weight)
    pretrained.save(
        file, own.state_dict(), pretrained.make_metadata(CONFIG, classes=["up", "down"])
    )
    run_export("export", file, tmp_path / "hub", "--to", "huggingface")
    reference = transformers.VideoMAEForVideoClassification.from_pretrained(tmp_path / "hub").eval()
    torch.testing.assert_close(
        reference(pixel_values(CLIP)).logits, own(CLIP), atol=1e-4, rtol=1e-4
    )
    assert reference.config.id2label == {0: "up", 1: "down"}
    run_export("import", file, tmp_path / "b.safetensors")
    again = pretrained.load(tmp_path / "b.safetensors")
    assert (again.config, again.classes) == (CONFIG, ["up", "down"])


def test_a_student_is_exported_without_its_teacher(tmp_path: Path) -> None:
    teacher, student = tmp_path / "teacher.safetensors", tmp_path / "student.safetensors"
    pretrained.save(teacher, AdaMAE(CONFIG).state_dict(), pretrained.make_metadata(CONFIG))
    config = replace(CONFIG, target="teacher", teacher=str(teacher))
    model = AdaMAE(config, make_target(config, make_teacher(config))).eval()
    pretrained.save(student, model.state_dict(), pretrained.make_metadata(config))
    teacher.unlink()
    for kind, name in (("encoder", "out"), ("adamae", "authors.pth"), ("huggingface", "hub")):
        run_export("export", student, tmp_path / name, "--to", kind)
    assert not [
        name
        for name in torch.load(tmp_path / "authors.pth")["model"]
        if name.startswith(("decoder", "token"))
    ]
    run_export(
        "export", tmp_path / "out/encoder.safetensors", tmp_path / "again", "--to", "huggingface"
    )
    for folder in (
        "hub",
        "again",
    ):  # a decoder there predicts pixels: what predicts features is left out
        features = load_checked(transformers.VideoMAEModel, tmp_path / folder)(
            pixel_values(CLIP)
        ).last_hidden_state
        torch.testing.assert_close(features, model.encode(CLIP).tokens, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("height", "width", "atol"), [(32, 32, 1e-5), (96, 192, 0.03)])
def test_huggingface_reads_a_model_and_makes_the_same_features_of_raw_frames(
    hub: Path, model: AdaMAE, height: int, width: int, atol: float
) -> None:
    """Of the middle of the frames, scaled by another library where it has to be scaled."""
    coarse = torch.rand(4, 3, 9, 18, generator=torch.Generator().manual_seed(1)) * 255
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 255)
    frames = [frame.permute(1, 2, 0).to(torch.uint8).numpy() for frame in smooth]
    processor = transformers.AutoImageProcessor.from_pretrained(hub)
    reference = load_checked(transformers.VideoMAEForPreTraining, hub)
    with torch.no_grad():
        features = reference.videomae(**processor(frames, return_tensors="pt")).last_hidden_state
    scaler = Scaler(view_crop(width, height, 0, 1), False, 32, (width, height))
    clip = torch.stack(
        [torch.from_numpy(scaler(VideoFrame.from_ndarray(frame, "rgb24"))) for frame in frames]
    )
    own = model.encode(clip[None]).tokens
    torch.testing.assert_close(features, own, rtol=0, atol=atol * own.abs().max().item())
    # and back, without the token sampler, for which it has no place
    again = load_adamae(hub)
    assert again.config.dimensions == CONFIG.dimensions
    assert torch.equal(again.encode(clip[None]).tokens, own)


def test_a_folder_of_hugging_face_with_a_damaged_description(hub: Path) -> None:
    file = hub / "config.json"
    for text, says in (
        ("{", "config.json is damaged"),
        ('{"model_type": "videomae"}', "config.json does not say hidden"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=says):
            pretrained.load(hub)


def test_an_import_says_what_the_file_does_not(
    run: Path, hub: Path, tmp_path: Path, capsys
) -> None:
    run_export("export", run, tmp_path / "reference.pth", "--to", "adamae")
    capsys.readouterr()
    run_export("import", hub, tmp_path / "a.safetensors")
    said = capsys.readouterr().err
    assert "does not say, so assumed: masking tube, mask_ratio 0.9\n" in said
    assert "it has no token sampler" in said
    run_export(
        "import", tmp_path / "reference.pth", tmp_path / "b.safetensors", "--num-frames", "4"
    )
    said = capsys.readouterr().err
    assert (
        "masking adaptive, mask_ratio 0.95, num_frames 4, image_size 32, positions flat-1d" in said
    )
    assert "no token sampler" not in said
    run_export("import", run, tmp_path / "c.safetensors")
    assert capsys.readouterr().err == ""


def test_encoder_alone_with_a_model_card(run: Path, model: AdaMAE, tmp_path: Path) -> None:
    run_export("export", run, tmp_path / "encoder")
    assert {path.name for path in (tmp_path / "encoder").iterdir()} == {
        "encoder.safetensors",
        "README.md",
    }
    encoder, tokens = (
        load_encoder(tmp_path / "encoder/encoder.safetensors"),
        model.encode(CLIP).tokens,
    )
    assert torch.equal(encoder.encode(CLIP).tokens, tokens)
    assert torch.equal(encoder.encode(CLIP).pooled, tokens.mean(1))
    card = (tmp_path / "encoder/README.md").read_text()
    count = sum(value.numel() for value in encoder.parameters()) / 1e6
    assert f"| parameters | {count:.1f} M |" in card
    assert "| input | 4 frames of 32×32, uint8, RGB |" in card
    assert str(tmp_path) not in card  # says nothing of the machine it was made on


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
def test_bad_input(run: Path, monkeypatch, arguments: str, sentence: str) -> None:
    monkeypatch.chdir(run.parent)
    torch.save([torch.zeros(1)], "list.pth")
    pretrained.save(
        Path("probe.safetensors"),
        Probe(CONFIG, 2, "linear").state_dict(),
        pretrained.make_metadata(CONFIG),
    )
    separable = replace(CONFIG, positions="separable-3d")
    pretrained.save(
        Path("separable.safetensors"),
        AdaMAE(separable).state_dict(),
        pretrained.make_metadata(separable),
    )
    before = set(Path().iterdir())
    with pytest.raises(InputError, match=sentence):
        run_export(*arguments.split())
    assert set(Path().iterdir()) == before  # nothing half-written
