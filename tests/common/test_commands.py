"""Commands have names, and say what to run next in the way in which they were called."""

import sys
from pathlib import Path

import pytest

from adamae.__main__ import main
from adamae.common import commands
from adamae.common.commands import COMMANDS, command_line, log_next, name_as_called, run_step

ROOT = Path(__file__).parents[2]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Call `adamae` with arguments; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["adamae", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_every_command_at_the_top_has_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {command.file for command in COMMANDS.values()}
    assert {file.name for file in ROOT.glob("*.py")} - {"hubconf.py"} < files
    assert all((ROOT / file).is_file() for file in files)
    assert call(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


def test_an_unknown_command_is_refused_with_a_similar_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "trainn") == 2
    expected = "error: there is no command trainn: did you mean train? `adamae --help` lists all\n"
    assert capsys.readouterr().err == expected


def test_the_next_command_is_written_as_this_one_was_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert command_line("shards", "my videos") == "python shard_tools/make_shards.py 'my videos'"
    help_text = "python train.py --config x"
    assert name_as_called(help_text) == help_text
    monkeypatch.setattr(commands, "called_as", "adamae demo")
    assert command_line("features", Path("in"), "--stride", 8) == "adamae features in --stride 8"
    assert name_as_called(help_text) == "adamae train --config x"


def test_a_step_does_not_say_what_is_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log_next("adamae doctor")
    assert capsys.readouterr().err == "next: adamae doctor\n"
    monkeypatch.setenv(commands.IN_STEP, "1")
    log_next("adamae doctor")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("called_as", ["", "adamae start"])
def test_a_step_that_fails_ends_the_command_with_its_status(
    called_as: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "called_as", called_as)
    with pytest.raises(SystemExit) as ended:
        run_step("shards", "nowhere", "out")
    assert ended.value.code == 2
    printed = capfd.readouterr()
    assert printed.out == f"$ {command_line('shards', 'nowhere', 'out')}\n"
    assert printed.err.startswith("error: ")
