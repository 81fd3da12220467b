"""Configurations that are damaged or hostile: one sentence at once, from whoever reads them."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from common.errors import InputError
from common.yaml_io import MAX_BYTES, parse_yaml, read_yaml
from model.weights.pretrained import run_config, trained_stride
from training.config import parse

LETTERS = "abcdefgh"
BOMB = "a0: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{one}0: &{one} [{','.join([f'*{before}'] * 10)}]\n" for before, one in pairwise(LETTERS)
)
HOSTILE = {
    "an anchor that contains itself": ("model: &a {x: *a}\n", "'a' contains itself"),
    "an anchor that contains itself, deeper": ("model: &a\n  size: tiny\n  x: [[*a]]\n", "'a' contains itself"),
    "aliases of aliases": (f"{BOMB}model: {{size: tiny}}\n", "it holds more than 10000 values"),
    "merged aliases of aliases": (BOMB.replace("[", "{k: [").replace("]", "]}"), "it holds more than 10000 values"),
    "brackets without end": ("model: " + "[" * 5000, "it holds more than 10000 values, or 20 inside each other"),
    "a long list": ("model: {size: tiny}\nx: [" + "1," * 20_000 + "]\n", "it holds more than 10000 values"),
    "a long number": ("model: {size: tiny}\nseed: " + "9" * 5000 + "\n", "a value is 5000 letters long"),
    "a number to the base of 60": ("seed: " + ":".join(["59"] * 100_000) + "\n", "letters long"),
    "code": ("model: !!python/object/apply:os.system ['touch exploded']\n", "could not determine a constructor"),
    "bytes that are no text": (b"model: \xff\xfe\n", "invalid start byte"),
    "a control character": (b"model: \x00\n", "special characters are not allowed"),
    "a key that cannot be one": ("model: {? [1, 2] : 3}\n", "found unhashable key"),
    "megabytes": ("# " + "x" * MAX_BYTES, "it is larger than 1 MiB"),
}


@pytest.mark.parametrize("read", [run_config, lambda run: parse(["--config", f"{run}/config.yaml", "data.shards=x"])])
@pytest.mark.parametrize(("content", "says"), HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_yaml_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object], content: str | bytes, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    started = time.process_time()
    with pytest.raises(InputError) as error:
        read(tmp_path)
    assert time.process_time() - started < 2
    assert says in str(error.value)
    assert str(error.value).startswith(f"{file} is damaged (")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "exploded").exists()


def test_a_file_that_a_configuration_names_comes_through_the_same_door(tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(BOMB)
    (tmp_path / "config.yaml").write_text(f"model: {tmp_path}/bomb.yaml\n")
    with pytest.raises(InputError, match="10000 values"):
        parse(["--config", str(tmp_path / "config.yaml"), "data.shards=x"])


def test_aliases_that_are_meant_are_read(tmp_path: Path) -> None:
    assert parse_yaml("a: &a [1, 2]\nb: {c: *a, d: *a}\n") == {"a": [1, 2], "b": {"c": [1, 2], "d": [1, 2]}}
    with pytest.raises(yaml.YAMLError, match="found undefined alias"):
        parse_yaml("a: *nobody\n")
    (tmp_path / "file").write_text("day: 2001-99-99\n")
    with pytest.raises(InputError, match="month must be in"):
        read_yaml(tmp_path / "file")


@pytest.mark.parametrize("data", ["", "data: 3", "data: {frame_stride: often}", "data: {frame_stride: 0}"])
def test_a_stride_that_is_none_is_said(tmp_path: Path, data: str) -> None:
    (tmp_path / "config.yaml").write_text(f"model: {{size: tiny}}\n{data}\n")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"config.yaml is damaged \(its data.frame_stride is"):
        trained_stride(tmp_path)
