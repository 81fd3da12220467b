"""Untrusted names in a terminal and in plots."""

import os
from pathlib import Path

import pytest

from adamae.common.errors import InputError, run_command
from adamae.common.logging import (
    MAX_NAME_LENGTH,
    format_bytes,
    format_count,
    format_number,
    log,
    printable,
)
from adamae.shard_tools import make_shards

HOSTILE = {
    "\x1b[2J\x1b]0;title\x07.mp4": r"\x1b[2J\x1b]0;title\x07.mp4",
    "a\nerror: all is lost\r": r"a\nerror: all is lost\r",
    "\x9b31mred\x7f": r"\x9b31mred\x7f",
    "gpj.\u202e4pm\u2066": r"gpj.\u202e4pm\u2066",
    os.fsdecode(b"caf\xe9.mp4"): r"caf\udce9.mp4",
    "\U000e0041 tag": r"\U000e0041 tag",
}


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_control_characters_are_escaped(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(name) == HOSTILE[name]
    log(f"rejected {name}: why")
    assert capsys.readouterr().out == f"rejected {HOSTILE[name]}: why\n"

    def command() -> None:
        raise InputError(f"{name} is gone")

    with pytest.raises(SystemExit):
        run_command(command)
    assert capsys.readouterr().err == f"error: {HOSTILE[name]} is gone\n"


def test_readable_text_is_unchanged() -> None:
    for name in ("with spaces/日本語 видео ñ 🎬.mp4", 'it\'s "so" 100% $HOME \\ <b>', "ρ × …"):
        assert printable(name) == name
    assert len(printable("x" * 10**6)) == MAX_NAME_LENGTH + 1


def test_make_shards_escapes_every_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in\x1b[31m"
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.mp4").symlink_to("nowhere")
        (folder / f"{name}.jpg\x1b").touch()
        (folder / f".{name}").touch()
    output = tmp_path / "out\x1b[0m"
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: make_shards.main([str(folder), str(output)]))
    assert ended.value.code == 2
    output_text = "".join(capsys.readouterr())
    assert set(output_text) & set("\x1b\x07\x9b\x7f\u202e\u2066\udce9") == set()
    assert all(f"{name}.mp4" in output_text for name in HOSTILE.values())
    assert output_text.splitlines()[-1].startswith(
        "error: none of 6 videos can be used: 6 times: it is a link"
    )


def test_numbers_and_bytes_are_readable() -> None:
    assert [format_bytes(n) for n in (0, 999, 999.6, 1234, 1.23456e9, 9.99e14)] == [
        "0 bytes",
        "999 bytes",
        "1 kB",
        "1.23 kB",
        "1.23 GB",
        "999 TB",
    ]
    assert [format_number(n) for n in (0.5, 12.34, 999.9, 1234567)] == [
        "0.5",
        "12.3",
        "1,000",
        "1,230,000",
    ]


def test_one_is_singular() -> None:
    counts = [(0, "class"), (1, "class"), (1, "video"), (2048, "training video")]
    assert [format_count(*count) for count in counts] == [
        "0 classes",
        "1 class",
        "1 video",
        "2,048 training videos",
    ]
