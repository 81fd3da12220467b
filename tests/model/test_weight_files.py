"""Files of weights that are damaged, odd or hostile: one sentence, little memory, no code run."""

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.state_dict import StateDict
from adamae.model.weights import pretrained
from adamae.model.weights.external_layouts import to_external
from adamae.model.weights.tensor_files import read_state_dict, save_tensors

CONFIG = ModelConfig(
    size="tiny",
    encoder_depth=1,
    decoder_depth=1,
    num_frames=4,
    image_size=32,
    patch_size=8,
    mask_ratio=0.75,
)
# A name that the authors' layout has, too.
NORM = "encoder.norm.weight"
ZEROS = torch.zeros(96)


@pytest.fixture(scope="module")
def state() -> StateDict:
    """Return the weights of a model of CONFIG."""
    torch.manual_seed(0)
    return AdaMAE(CONFIG).state_dict()


def refused(path: Path, *parts: str) -> None:
    """Check that the file is refused in one line, which has these parts."""
    with pytest.raises(InputError) as error:
        pretrained.load(path)
    message = str(error.value)
    for part in parts:
        assert part in message
    assert "\n" not in message


# Tensors, and parts of the messages that refuse them.
TENSORS: dict[str, tuple[torch.Tensor | Callable[[], torch.Tensor], str]] = {
    "NaN": (torch.full((96,), float("nan")), "holds NaN or infinity"),
    "integers": (torch.zeros(96, dtype=torch.int8), "is of int8"),
    "8 bits": (ZEROS.to(torch.float8_e4m3fn), "is of float8_e4m3fn"),
    "a scalar": (torch.zeros(()), "has the shape (), which no weights have"),
    "more numbers than the file holds": (
        torch.zeros(1).expand(10**10),
        "(10000000000,), for which the file holds",
    ),
    "sparse": (lambda: ZEROS.to_sparse(), "is sparse"),
    "sparse and huge": (lambda: torch.sparse_coo_tensor([[0]], [1.0], (10**12,)), "is sparse"),
    "without memory": (torch.zeros(96, device="meta"), "is sparse, quantized, nested or empty"),
}


@pytest.mark.parametrize(("value", "message"), TENSORS.values(), ids=list(TENSORS))
def test_tensors_that_are_no_weights_are_named(
    state: StateDict, tmp_path: Path, value: Any, message: str
) -> None:
    if callable(value):
        value = value()
    torch.save({"model": to_external(state, "adamae") | {NORM: value}}, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", f"w.pth cannot be used: {NORM} ", message)


def test_tensors_that_share_memory_or_a_name_are_refused(tmp_path: Path) -> None:
    tensor = torch.zeros(100, 100)
    # In a file of 40 kB, tensors of 4 MB.
    torch.save({f"block.{i}": tensor for i in range(100)}, tmp_path / "w.pt")
    refused(tmp_path / "w.pt", "its tensors share memory")
    tensors = {NORM: ZEROS.double(), f"module._orig_mod.{NORM}": ZEROS.half()}
    save_file(tensors, tmp_path / "w.safetensors")
    refused(tmp_path / "w.safetensors", f"it holds {NORM} twice")


def describe(**changes: Any) -> dict[str, str]:
    return {"model_config": json.dumps(asdict(CONFIG) | changes)}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            describe(encoder_depth=10**9),
            "model.encoder_depth is 1000000000: must be at least 1 and at most 256",
        ),
        (describe(decoder_width=9600), "(384, 96) instead of (38400, 9600)"),
        (describe(sampler_depth=100), "missing keys: token_sampler.body.1."),
        (describe(image_size=8 * 10**5), "tokens per clip: at most 16384"),
        (
            describe(patch_size=2**16, image_size=2**20),
            "weight (96, 384) instead of (96, 25769803776)",
        ),
        (describe(encoder_depth=1.5), "does not describe a model of this version"),
        (describe(flavor="odd"), "does not describe a model of this version"),
        ({"model_config": "{"}, "is damaged"),
        ({"model_config": "[" * 100_000}, "is damaged"),
        ({"model_config": "[]"}, "is damaged (Expected `object`, got `array`)"),
        ({"classes": '{"a": 1}'}, "is damaged (Expected `array`, got `object`)"),
        ({"classes": '["up", "down"]'}, "it names 2 classes"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_metadata_that_is_damaged_or_of_another_model_is_refused(
    state: StateDict, tmp_path: Path, metadata: dict[str, str], message: str
) -> None:
    metadata = pretrained.make_metadata(CONFIG) | metadata
    if "classes" in metadata:
        state = state | {"head.weight": torch.zeros(3, 96)}
    save_file(state, tmp_path / "w.safetensors", metadata=metadata)
    refused(tmp_path / "w.safetensors", message)


ODD_NAMES = {
    "encoder.get_token_probs.999999999.weight": ZEROS,
    "encoder.get_token_probs.x.weight": ZEROS,
    "mask_token": torch.zeros(3, 5),
    "encoder.patch_embed.proj.weight": torch.zeros(7),
    "encoder.blocks.1000000000.norm1.weight": torch.zeros(1),
    "encoder.blocks.0.norm1.weight": torch.zeros(1),
}


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_and_shapes_of_no_layout_are_one_sentence(
    state: StateDict, tmp_path: Path, name: str
) -> None:
    torch.save(to_external(state, "adamae") | {name: ODD_NAMES[name]}, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", "")


def test_parts_of_an_attention_that_do_not_fit_each_other(state: StateDict, tmp_path: Path) -> None:
    name = "videomae.encoder.layer.0.attention.attention.key.weight"
    torch.save(to_external(state, "huggingface") | {name: torch.zeros(5, 7)}, tmp_path / "w.pth")
    refused(
        tmp_path / "w.pth",
        "w.pth is damaged or of another model: missing keys: encoder.blocks.0.attn.qkv.weight",
    )


class Writing:
    """An object that would write a file where it is unpickled without care."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


class Swelling:
    """An object of 400 bytes, of which torch.load makes a gigabyte, also with weights_only."""

    def __reduce__(self) -> Any:
        return bytearray, (2**30,)


def pickled(model: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model}, file, **options)
    return file.getvalue()


def compressed(data: bytes) -> bytes:
    """Return the same file with 64 MiB of numbers, compressed."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for name in source.namelist():
            is_numbers = name.endswith("data/0")
            out.writestr(name, bytes(2**26) if is_numbers else source.read(name))
    return file.getvalue()


# Names and contents of files.
FILES: dict[str, tuple[str, bytes]] = {
    "a pickle": ("w.pth", pickle.dumps(Writing())),
    "code beside weights": ("w.pth", pickled(Writing())),
    "an array that swells": ("w.pth", pickled(Swelling())),
    "an array that swells, before PyTorch 1.6": (
        "w.pth",
        pickled(Swelling(), _use_new_zipfile_serialization=False),
    ),
    "compressed": ("w.pth", compressed(pickled({"x": torch.zeros(50)}))),
    "cut off": ("w.pth", pickled({"x": torch.zeros(5000)})[:5000]),
    "empty": ("w.pth", b""),
    "a header without end": ("w.safetensors", struct.pack("<Q", 2**62) + b"{}"),
    "a header that is no text": (
        "w.safetensors",
        struct.pack("<Q", 24) + b'{"__metadata__":{"\xff":""}}',
    ),
}


@pytest.mark.parametrize(("name", "content"), FILES.values(), ids=list(FILES))
@pytest.mark.filterwarnings("ignore")
def test_files_that_are_no_weights_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    tracemalloc.start()
    try:
        refused(tmp_path / name, f"{name} cannot be read as weights: ")
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 2**26
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "exploded").exists()


def test_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    """safetensors orders its metadata by a hash, whose seed differs from file to file."""
    classes = ["ρ", 'a "quoted" name', "\n"]
    facts = dict.fromkeys("abcdefgh", "x")
    metadata = pretrained.make_metadata(CONFIG, classes=classes, **facts)
    tensors = {"a": ZEROS, "b": ZEROS.half()}
    for i in range(4):
        save_tensors(tmp_path / f"{i}.safetensors", tensors, metadata)
        metadata = dict(reversed(metadata.items()))
        tensors = dict(reversed(tensors.items()))
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
    state, read_metadata = read_state_dict(tmp_path / "0.safetensors")
    assert read_metadata == metadata
    assert torch.equal(state["b"], ZEROS.half())
    assert torch.equal(load_file(tmp_path / "0.safetensors")["a"], ZEROS)
