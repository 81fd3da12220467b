"""Damaged or hostile YAML is rejected at once, with one sentence."""

import time
from pathlib import Path

import pytest
import yaml

from adamae.common.errors import InputError
from adamae.common.yaml_io import MAX_BYTES, parse_yaml, read_yaml

HOSTILE = {
    "an anchor that contains itself": ("model: &a {x: *a}\n", "aliases"),
    "aliases of aliases": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "aliases"),
    "merged aliases": ("a: &a {k: 1}\nb: {<<: *a}\n", "aliases"),
    "brackets without end": ("model: " + "[" * 20_000, "nested more than 20 levels"),
    "a long number": ("seed: " + "9" * 5000 + "\n", "more than 4096 characters"),
    "a base-60 number": ("seed: " + ":".join(["59"] * 20_000) + "\n", "more than 4096 characters"),
    "code": (
        "model: !!python/object/apply:os.system ['touch exploded']\n",
        "could not determine a constructor",
    ),
    "bytes that are no text": (b"model: \xff\xfe\n", "invalid start byte"),
    "a control character": (b"model: \x00\n", "special characters are not allowed"),
    "an unhashable key": ("model: {? [1, 2] : 3}\n", "found unhashable key"),
    "no such date": ("day: 2001-99-99\n", "month must be in"),
    "large": ("# " + "x" * MAX_BYTES, "larger than 64 KiB"),
    "a long list": ("x: [" + "1," * (MAX_BYTES // 2 - 10), ""),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_yaml_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    started = time.process_time()
    with pytest.raises(InputError) as error:
        read_yaml(file)
    assert time.process_time() - started < 6
    assert message in str(error.value)
    assert str(error.value).startswith(f"{file} is damaged (")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "exploded").exists()


def test_a_reader_of_the_callers_choice_is_bounded_too() -> None:
    assert parse_yaml("a: [1, 2]\n") == {"a": [1, 2]}
    assert parse_yaml("a: 1\n", reader=len) == 5
    with pytest.raises(yaml.YAMLError, match="aliases"):
        parse_yaml("a: &a 1\nb: *a\n", reader=len)
