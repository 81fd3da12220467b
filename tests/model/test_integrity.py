"""One bit that flips in a file of weights is told before the weights are used."""

import json
from pathlib import Path

import pytest
import torch

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.weights import pretrained
from adamae.model.weights.integrity import hash_tensors
from adamae.model.weights.load_model import load_encoder
from adamae.training.checkpoint import TrainState, save_checkpoint

CONFIG = ModelConfig(
    encoder_width=16,
    encoder_depth=1,
    encoder_heads=1,
    decoder_width=16,
    decoder_depth=1,
    decoder_heads=1,
    num_frames=4,
    image_size=32,
    patch_size=8,
    mask_ratio=0.75,
)
NUM_FLIPS = 50


@pytest.fixture
def model() -> AdaMAE:
    torch.manual_seed(0)
    return AdaMAE(CONFIG)


def check_flips(file: Path, loaded: Path, is_padded: bool = False) -> None:
    """Flip bits all over a file: `loaded` is refused, or its file has said all that it needs.

    is_padded: the format has bytes that mean nothing, such as the times in a zip.
    """
    content = file.read_bytes()
    expected = load_encoder(loaded).state_dict()
    num_refused = 0
    for index in range(NUM_FLIPS):
        damaged = bytearray(content)
        damaged[index * (len(content) - 1) // (NUM_FLIPS - 1)] ^= 1 << index % 8
        file.write_bytes(damaged)
        try:
            state = load_encoder(loaded).state_dict()
        except InputError:
            num_refused += 1
            continue
        assert is_padded
        for name, value in expected.items():
            assert torch.equal(state[name], value), "what is damaged is not used"
    assert num_refused > NUM_FLIPS / 2
    file.write_bytes(content)
    load_encoder(loaded)


def test_exports(model: AdaMAE, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    pretrained.save(file, model.state_dict(), pretrained.make_metadata(CONFIG))
    check_flips(file, file)


def test_exports_in_pytorchs_format(model: AdaMAE, tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    pretrained.save(file, model.state_dict())
    check_flips(file, file, is_padded=True)


def test_checkpoints(model: AdaMAE, tmp_path: Path) -> None:
    """Also where a whole file is that of another step."""
    (tmp_path / "config.yaml").write_text(json.dumps({"model": vars(CONFIG), "data": {}}))
    state = TrainState(5, 8, "dataset")
    checkpoint = save_checkpoint(
        tmp_path / "checkpoints", state, {"model": model.state_dict()}, {}, {"format": "pt"}
    )
    check_flips(checkpoint / "model.safetensors", tmp_path)
    other = {name: value + 1 for name, value in model.state_dict().items()}
    file = checkpoint / "model.safetensors"
    pretrained.save(file, other, pretrained.make_metadata(CONFIG))
    with pytest.raises(InputError, match=r"hash is not the one in train_state.json\): take anoth"):
        load_encoder(tmp_path)
    (checkpoint / "train_state.json").write_text("{")
    with pytest.raises(InputError, match=r"train_state.json is damaged"):
        load_encoder(tmp_path)


def test_the_hash_is_of_names_shapes_types_and_numbers() -> None:
    state = {"a": torch.arange(6.0), "b": torch.tensor(1)}
    hashes = {
        hash_tensors(state),
        hash_tensors({"c": state["a"], "b": state["b"]}),
        hash_tensors({**state, "a": state["a"].view(2, 3)}),
        hash_tensors({**state, "a": state["a"].view(torch.int32)}),
        hash_tensors({**state, "a": state["a"] + 1}),
        hash_tensors(state, {"format": "pt"}),
    }
    assert len(hashes) == 6
    assert hash_tensors(dict(reversed(state.items()))) == hash_tensors(state)
