"""Files of weights that are damaged, odd or hostile: one sentence, little memory, and no code run."""

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

import export
from common.errors import InputError
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.encoder import VideoEncoder
from model.weights import pretrained
from model.weights.layouts import to_adamae, to_huggingface
from model.weights.weight_files import read_state_dict, save_tensors


def run_export(arguments: list[str]) -> None:
    export.main(export.parse_arguments(arguments))


CONFIG = ModelConfig(
    size="tiny", encoder_depth=1, decoder_depth=1, num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75
)
NORM = "encoder.norm.weight"  # ours and theirs
ZEROS = torch.zeros(96)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return AdaMAE(CONFIG).state_dict()


class Writing:
    """Unpickled without care, this would write a file."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


class Swelling:
    """400 bytes that torch.load, with weights_only, makes a gigabyte of."""

    def __reduce__(self) -> Any:
        return bytearray, (2**30,)


TENSORS: dict[str, tuple[torch.Tensor | Callable[[], torch.Tensor], str]] = {
    "NaN": (torch.full((96,), float("nan")), "holds NaN or infinity"),
    "infinity": (torch.full((96,), float("-inf")).half(), "holds NaN or infinity"),
    "whole numbers": (torch.zeros(96, dtype=torch.int8), "is of int8"),
    "complex": (torch.zeros(96, dtype=torch.complex64), "is of complex64"),
    "8 bits": (ZEROS.to(torch.float8_e4m3fn), "is of float8_e4m3fn"),
    "one number": (torch.zeros(()), "has the shape (), which no weights have"),
    "no number": (torch.zeros(0), "has the shape (0,), which no weights have"),
    "more numbers than the file holds": (
        torch.zeros(1).expand(10**10),
        "has the shape (10000000000,), for which the file holds",
    ),
    "sparse": (lambda: ZEROS.to_sparse(), "is sparse"),
    "sparse and huge": (lambda: torch.sparse_coo_tensor([[0]], [1.0], (10**12,)), "is sparse"),
    "without memory": (torch.zeros(96, device="meta"), "is sparse, quantized, nested or empty"),
}


@pytest.mark.parametrize(("value", "says"), TENSORS.values(), ids=list(TENSORS))
def test_tensors_that_are_no_weights_are_named(state, tmp_path: Path, value, says: str) -> None:
    theirs = to_adamae(state) | {NORM: value() if callable(value) else value}
    torch.save({"model": theirs}, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", f"w.pth cannot be used: {NORM} {says}")


def test_tensors_that_share_their_memory_are_refused(state, tmp_path: Path) -> None:
    one = torch.zeros(100, 100)
    torch.save({f"block.{i}": one for i in range(100)}, tmp_path / "w.pt")
    refused(tmp_path / "w.pt", "its tensors share memory")


def test_a_name_given_twice_is_refused(state, tmp_path: Path) -> None:
    save_file({NORM: ZEROS, f"module.{NORM}": ZEROS.clone()}, tmp_path / "w.safetensors")
    refused(tmp_path / "w.safetensors", f"it holds {NORM} twice")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"encoder_depth": 10**9}, "model.encoder_depth is 1000000000: must be at least 1 and at most 256"),
        ({"encoder_depth": 200}, "encoder_depth is 1, and 200 is said"),
        ({"encoder_width": 96 * 10**4}, "model.encoder_width is 960000: must be at least 1 and at most 16384"),
        ({"decoder_width": 9600}, "decoder_width is 96, and 9600 is said"),
        ({"sampler_depth": 100}, "sampler_depth is 1, and 100 is said"),
        ({"num_frames": 10**5}, "make 800000 tokens per clip: at most 131072"),
        ({"image_size": 8 * 10**5}, "tokens per clip: at most 131072"),
        ({"patch_size": 2**16, "image_size": 2**20}, "it is for patches of 384 values"),
        ({"encoder_depth": 1.5}, "does not describe a model of this version"),
        ({"encoder_depth": [1]}, "does not describe a model of this version"),
        ({"encoder_depth": True}, "does not describe a model of this version"),
        ({"mask_ratio": float("nan")}, "model.mask_ratio is nan"),
        ({"masking": "odd"}, "does not describe a model of this version"),
        ({"flavour": "odd"}, "does not describe a model of this version"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_description_that_is_not_the_models_is_refused(state, tmp_path: Path, changes, says: str) -> None:
    metadata = {pretrained.CONFIG_KEY: json.dumps(asdict(CONFIG) | changes)}
    save_file(state, tmp_path / "w.safetensors", metadata=metadata)
    refused(tmp_path / "w.safetensors", says)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({pretrained.CONFIG_KEY: "{"}, "is damaged"),
        ({pretrained.CONFIG_KEY: "[" * 100_000}, "is damaged"),
        ({pretrained.CONFIG_KEY: "[]"}, "it is no table of keys and values"),
        ({pretrained.CONFIG_KEY: " " * 2**21}, "it is longer than"),
        ({pretrained.CLASSES_KEY: '{"a": 1}'}, "its classes are no list of names"),
        ({pretrained.CLASSES_KEY: "[1, 2]"}, "its classes are no list of names"),
        ({pretrained.CLASSES_KEY: "[1,"}, "is damaged"),
    ],
)
def test_damaged_metadata_is_one_sentence(state, tmp_path: Path, metadata, says: str) -> None:
    save_file(state, tmp_path / "w.safetensors", metadata=pretrained.make_metadata(CONFIG) | metadata)
    refused(tmp_path / "w.safetensors", says)


def test_classes_that_are_not_as_many_as_the_weights_are_refused(tmp_path: Path, state) -> None:
    save_file(
        state | {"head.weight": torch.zeros(3, 96)}, tmp_path / "w.safetensors",
        metadata=pretrained.make_metadata(CONFIG, ["up", "down"]),
    )  # fmt: skip
    refused(tmp_path / "w.safetensors", "it names 2 classes")


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ("{", "config.json is damaged"),
        ("[" * 10**6, "config.json is damaged"),
        ({"num_hidden_layers": 10**9}, "model.encoder_depth is 1000000000"),
        ({"hidden_size": [96]}, "does not describe a model"),
        ({"num_attention_heads": 0}, "model.encoder_heads is 0"),
        ({"patch_size": 0}, "model.patch_size is 0"),
        ({"num_frames": 10**6}, "tokens per clip"),
    ],
)
def test_a_folder_of_hugging_face_with_a_damaged_description(state, tmp_path: Path, described, says: str) -> None:
    export_folder = tmp_path / "hub"
    (tmp_path / "run").mkdir()
    save_file(state, tmp_path / "run/model.safetensors", metadata=pretrained.make_metadata(CONFIG))
    run_export(["export", str(tmp_path / "run"), str(export_folder), "--to", "huggingface"])
    file = export_folder / "config.json"
    whole = json.loads(file.read_text())
    file.write_text(described if isinstance(described, str) else json.dumps(whole | described))
    refused(export_folder, says)


ODD_NAMES = {
    "encoder.get_token_probs.999999999.weight": ZEROS,
    "encoder.get_token_probs.x.weight": ZEROS,
    "encoder.get_token_probs.": ZEROS,
    "mask_token": torch.zeros(3, 5),
    "encoder.pos_embed_probs": torch.zeros(3),
    "encoder.patch_embed.proj.weight": torch.zeros(7),
    **{f"encoder.blocks.{i}.norm1.weight": torch.zeros(1) for i in (10**9, 0)},
}


@pytest.mark.parametrize("name", list(ODD_NAMES))
def test_names_and_shapes_of_nobody_are_one_sentence(state, tmp_path: Path, name: str) -> None:
    torch.save(to_adamae(state) | {name: ODD_NAMES[name]}, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", "")


def test_parts_of_an_attention_that_do_not_fit_each_other(state, tmp_path: Path) -> None:
    theirs = to_huggingface(state)
    name = next(name for name in theirs if name.endswith("attention.attention.key.weight"))
    torch.save(theirs | {name: torch.zeros(5, 7)}, tmp_path / "w.pth")
    refused(tmp_path / "w.pth", "checkpoint does not match the model")


def test_more_tensors_than_any_model_has(tmp_path: Path) -> None:
    header: dict[str, Any] = {
        f"encoder.blocks.{i}.x": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i in range(10001)
    }
    safetensors(tmp_path / "w.safetensors", json.dumps(header).encode(), bytes(4 * 10001))
    refused(tmp_path / "w.safetensors", "it holds 10001 tensors")


def safetensors(file: Path, header: bytes, data: bytes = b"") -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def whole_pth(file: Path) -> bytes:
    torch.save({"model": to_adamae(AdaMAE(CONFIG).state_dict())}, file)
    return file.read_bytes()


def compressed(file: Path) -> None:
    whole_pth(file.with_suffix(".whole"))
    with zipfile.ZipFile(file.with_suffix(".whole")) as source, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        for part in source.infolist():
            is_numbers = part.filename.endswith("data/0")
            out.writestr(part.filename, bytes(2**26) if is_numbers else source.read(part.filename))


FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a pickle": ("w.pth", lambda file: file.write_bytes(pickle.dumps(Writing()))),
    "code beside weights": ("w.pth", lambda file: torch.save({"model": Writing()}, file)),
    "an array that swells": ("w.pth", lambda file: torch.save({"model": Swelling()}, file)),
    "an array that swells, as of old": (
        "w.pth",
        lambda file: torch.save({"model": Swelling()}, file, _use_new_zipfile_serialization=False),
    ),
    "a program": ("w.pth", lambda file: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)),
    "compressed": ("w.pth", compressed),
    "cut off": ("w.pth", lambda file: file.write_bytes(whole_pth(file)[:5000])),
    "empty": ("w.pth", lambda file: file.touch()),
    "a header without end": ("w.safetensors", lambda file: file.write_bytes(struct.pack("<Q", 2**62) + b"{}")),
    "a header that is no text": ("w.safetensors", lambda file: safetensors(file, b'{"__metadata__":{"\xff":"x"}}')),
}


@pytest.mark.parametrize(("name", "write"), FILES.values(), ids=list(FILES))
@pytest.mark.filterwarnings("ignore")
def test_files_that_are_no_weights_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name)
    tracemalloc.start()
    try:
        refused(tmp_path / name, f"{name} cannot be read as weights: ")
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_precisions_are_read(state, tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({name: value.to(dtype) for name, value in state.items()}, tmp_path / "w.safetensors")
    assert set(read_state_dict(tmp_path / "w.safetensors")[0]) == set(state)


def refused(path: Path, says: str) -> None:
    for read in (AdaMAE.from_pretrained, VideoEncoder.from_pretrained):
        with pytest.raises(InputError) as error:
            read(path)
        assert says in str(error.value)
        assert "\n" not in str(error.value)


def test_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    """safetensors orders its metadata by a hash of which every table, so every file, has a seed of its own."""
    metadata = pretrained.make_metadata(CONFIG, ["ρ", 'a "quoted" name', "\n"]) | {f"key {i}": str(i) for i in range(8)}
    tensors = {"a": ZEROS, "b": ZEROS.half()}
    for i in range(4):
        save_tensors(tmp_path / f"{i}.safetensors", tensors, metadata)
        metadata, tensors = dict(reversed(metadata.items())), dict(reversed(tensors.items()))
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
    read, said = read_state_dict(tmp_path / "0.safetensors")
    assert said == metadata
    assert torch.equal(read["b"], ZEROS.half())
    assert torch.equal(load_file(tmp_path / "0.safetensors")["a"], ZEROS)


def test_pytorch_files_of_the_same_weights_are_the_same_bytes(state, tmp_path: Path) -> None:
    for name in ("one.pth", "two.pth"):
        export.write_weights(tmp_path / name, {"a": ZEROS})
    assert (tmp_path / "one.pth").read_bytes() == (tmp_path / "two.pth").read_bytes()
