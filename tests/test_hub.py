"""Weights go to the Hugging Face Hub, and come back: here, in transformers and in timm.

The Hub is a stand-in on this machine.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import IMAGE_CASES
from hub_server import HubServer
from huggingface_hub import constants
from made_videos import encode
from runs import is_same
from test_export import CLIP, CONFIG, pixel_values

from adamae import export, visualize
from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.classifier import VideoClassifier
from adamae.model.encoders.open_encoder import open_encoder
from adamae.model.load_adamae import load_adamae
from adamae.model.weights import pretrained
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.read_config import trained_rate
from adamae.training.remote_run import local_run


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


def push(source: Path, *arguments: str) -> None:
    export.main(export.parse_arguments(["export", str(source), "--push", "user/name", *arguments]))


@pytest.fixture
def model() -> AdaMAE:
    """Return a model whose sampler and biases differ from those of a new one."""
    model = AdaMAE(CONFIG).eval()
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.05)
    return model


def test_a_run_goes_there_and_comes_back(
    hub: HubServer,
    write_run: Callable[..., Path],
    model: AdaMAE,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = write_run(model)
    push(run, "--license", "cc-by-4.0")
    monkeypatch.chdir(tmp_path)
    again = load_adamae("user/name")
    assert again.config == load_adamae(run).config
    assert is_same(again.state_dict(), model.state_dict())
    encoder = load_encoder("hf://user/name@main")
    assert torch.equal(encoder.encode(CLIP).tokens, model.encode(CLIP).tokens)
    assert trained_rate(local_run("hf://user/name")) == trained_rate(run)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_adamae("user/name").config == again.config
    assert not hub.requests
    (tmp_path / "a.mp4").write_bytes(encode(20))
    visualize.visualize(visualize.parse_arguments(["hf://user/name", "a.mp4"]))
    assert (tmp_path / "figures/a.png").is_file(), "figures are written here, not into the cache"


def test_the_model_card_says_how_to_load_it(
    hub: HubServer, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports transformers, which takes seconds."""
    push(tiny_run, "--license", "cc-by-4.0")
    monkeypatch.chdir(tmp_path)
    card = hub.models["user/name"]["README.md"].decode()
    assert card.startswith("---\nlicense: cc-by-4.0\n")
    assert "| `steps` | 6 |" in card
    assert "| reconstruction_loss | " in card
    assert str(tiny_run.parent) not in card, "nothing of the machine that it was made on"
    model = load_adamae(tiny_run)
    num_frames = model.config.num_frames
    height, width = model.config.frame_size
    image = torch.randint(0, 256, (1, 1, height, width, 3), dtype=torch.uint8)
    clip = torch.randint(0, 256, (1, num_frames, height, width, 3), dtype=torch.uint8)
    inputs = {"clip": clip, "frames": list(clip[0].numpy()), "images": pixel_values(image)[:, 0]}
    examples = re.findall(r"^```python\n(.*?)^```", card, re.M | re.S)
    features, by_transformers, of_image = (run_code(code, inputs) for code in examples)
    torch.testing.assert_close(by_transformers, features.tokens, atol=1e-4, rtol=1e-4)
    tubelet = model.config.tubelet_size
    encoder = load_encoder(tiny_run, num_frames=tubelet)
    # timm's encoder of images is that of clips in which nothing moves.
    still = encoder.encode(image.repeat(1, tubelet, 1, 1, 1)).pooled
    torch.testing.assert_close(of_image, still, atol=1e-4, rtol=1e-4)


def run_code(code: str, inputs: dict[str, object]) -> Any:
    """Run an example with the variables `inputs`; return its variable `features`."""
    variables = dict(inputs)
    with torch.no_grad():
        exec(compile(code, "model card", "exec"), variables)
    return variables["features"]


def test_classifiers_and_what_transformers_has_no_place_for(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    classifier = VideoClassifier(CONFIG, num_classes=2).eval()
    file = tmp_path / "classifier.safetensors"
    pretrained.save(
        file, classifier.state_dict(), pretrained.make_metadata(CONFIG, classes=["up", "down"])
    )
    push(file)
    state, config, classes, *_ = pretrained.load("user/name")
    assert (config, classes) == (CONFIG, ["up", "down"])
    assert is_same(state, classifier.state_dict())
    gray = replace(CONFIG, positions="separable-3d", in_channels=1)
    other = AdaMAE(gray)
    pretrained.save(file, other.state_dict(), pretrained.make_metadata(gray))
    push(file)
    again = load_adamae("user/name")
    assert again.config == gray
    assert is_same(again.state_dict(), other.state_dict())
    assert "transformers" not in hub.models["user/name"]["README.md"].decode()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "user/nothing",
            "user/nothing is neither a path here nor a model on the Hugging Face Hub that you may"
            " read",
        ),
        ("user/empty@v2", "user/empty@v2 is neither a path here"),
        ("user/empty", "user/empty on the Hugging Face Hub has no weights"),
        ("user/name@../../x", "user/name@../../x has .. in its revision: give a branch"),
        ("user/--", "user/-- is neither a path here"),
        ("runs/mine/checkpoints", "runs/mine/checkpoints does not exist"),
        (Path("user/nothing"), "user/nothing does not exist"),
    ],
)
def test_wrong_names_are_one_sentence(hub: HubServer, name: str | Path, message: str) -> None:
    hub.models["user/empty"] = {"README.md": b"# nothing"}
    with pytest.raises(InputError, match=message):
        load_encoder(name)


def test_encoders_of_other_libraries(hub: HubServer, tmp_path: Path) -> None:
    """It imports transformers, which takes seconds."""
    IMAGE_CASES["dinov2"].write(tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    hub.models["user/dino"] = files
    encoder = open_encoder("hf://user/dino@main", num_frames=2)
    assert encoder.name == "user/dino@main"
    clip = torch.zeros(1, 2, 32, 32, 3, dtype=torch.uint8)
    assert torch.equal(encoder.pooled(clip), open_encoder(tmp_path, num_frames=2).pooled(clip))
    # Only with hf:// is a name looked up.
    with pytest.raises(InputError, match="user/dino does not exist"):
        open_encoder("user/dino")
    pickled = {"config.json": files["config.json"], "pytorch_model.bin": b"a pickle"}
    hub.models["user/pickled"] = pickled
    with pytest.raises(InputError, match=r"user/pickled .* has no weights as safetensors"):
        open_encoder("hf://user/pickled")
    assert not any("pytorch_model.bin" in request for request in hub.requests)


def test_nobody_there(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in (load_adamae, open_encoder):
        with pytest.raises(InputError, match="in its cache, and it cannot be reached"):
            load("hf://user/name")
    file = tmp_path / "a.safetensors"
    pretrained.save(file, AdaMAE(CONFIG).state_dict(), pretrained.make_metadata(CONFIG))
    message = "user/name cannot be written on the Hugging Face Hub"
    with pytest.raises(InputError, match=f"{message} .*offline"):
        push(file)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Nothing listens there.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=f"{message} .*refused"):
        push(file)
    with pytest.raises(InputError, match="give OUTPUT or --push"):
        export.parse_arguments(["export", "run"])


def test_torch_hub_loads_it(write_run: Callable[..., Path], model: AdaMAE) -> None:
    clone = str(Path(__file__).parents[1])
    encoder = torch.hub.load(clone, "video_encoder", write_run(model), source="local")
    assert torch.equal(encoder.encode(CLIP).tokens, model.encode(CLIP).tokens)
