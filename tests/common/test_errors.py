"""How commands end, and files that are whole or absent."""

import json
import os
from pathlib import Path

import pytest

from common.atomic_io import atomic_write, write_json
from common.errors import InputError, PeerLostError, run_command


def ending(error: BaseException, capsys: pytest.CaptureFixture[str], *, goes_on: bool = False) -> tuple[object, str]:
    """(exit code, what stands on stderr) of a command that raises `error`."""

    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(command, goes_on=goes_on)
    return ended.value.code, capsys.readouterr().err


def test_every_ending_is_one_sentence_and_a_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(InputError("it is wrong"), capsys) == (2, "error: it is wrong\n")
    assert ending(KeyboardInterrupt(), capsys) == (130, "interrupted\n")
    code, said = ending(KeyboardInterrupt(), capsys, goes_on=True)
    assert (code, said) == (130, "interrupted: what was finished is kept; the same command goes on from there\n")


def test_torchrun_is_told_which_failure_was_first(tmp_path: Path, capsys, monkeypatch) -> None:
    told = {}
    for error in (PeerLostError("the other one"), InputError("it is wrong")):
        file = tmp_path / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        ending(error, capsys)
        told[str(error)] = json.loads(file.read_text())
    assert told["it is wrong"]["message"] == "error: it is wrong"
    assert int(told["it is wrong"]["timestamp"]) < int(told["the other one"]["timestamp"])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "error.json"))
    assert ending(InputError("it is wrong"), capsys) == (2, "error: it is wrong\n")


def test_a_file_where_a_folder_is_meant_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "folder", tmp_path / ("x" * 300)):
        with pytest.raises(OSError, match=str(tmp_path)) as error:
            path.mkdir()
        code, said = ending(error.value, capsys)
        assert code == 74
        assert said.startswith(f"error: cannot use {path}: ")


def test_a_package_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    error = ModuleNotFoundError("No module named 'nvidia.dali'", name="nvidia.dali")
    sentence = "error: this needs the package nvidia, which is not installed: pip install nvidia-dali-cuda130\n"
    assert ending(error, capsys) == (2, sentence)
    with pytest.raises(ModuleNotFoundError):
        run_command(lambda: __import__("no_such_module_of_ours"))


def test_an_error_of_the_program_stays_one() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_what_fails_halfway_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"old": 1})

    def fail_halfway() -> None:
        with atomic_write(tmp_path / "a.json") as aside:
            aside.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}


def test_names_that_are_not_utf8_are_written_and_read_back(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.mp4")
    write_json(tmp_path / "a.json", {"source": name, "ratio": "ρ"})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"source": name, "ratio": "ρ"}
