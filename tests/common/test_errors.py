"""How commands end, and atomic files."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adamae.common import errors
from adamae.common.atomic_io import atomic_write, write_json
from adamae.common.errors import InputError, PeerLostError, run_command

ROOT = Path(errors.__file__).resolve().parents[1]


def end(
    error: BaseException, capsys: pytest.CaptureFixture[str], *, resumable: bool = False
) -> tuple[object, str]:
    """Run a command that raises `error`; return its exit code and stderr."""

    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(command, resumable=resumable)
    return ended.value.code, capsys.readouterr().err


def test_every_ending_is_one_sentence_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(InputError("it is wrong"), capsys) == (2, "error: it is wrong\n")
    assert end(KeyboardInterrupt(), capsys) == (130, "interrupted\n")
    message = "interrupted; progress is saved, re-run the same command to resume\n"
    assert end(KeyboardInterrupt(), capsys, resumable=True) == (130, message)
    assert end(OSError(28, "No space left on device", "/nowhere/x"), capsys)[0] == 74
    assert end(ModuleNotFoundError(name="nvidia.dali"), capsys) == (
        2,
        "error: the package nvidia is not installed: pip install nvidia-dali-cuda130\n",
    )
    busy = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    advice = "another process has this GPU for itself; choose another one with CUDA_VISIBLE_DEVICES"
    code, stderr = end(RuntimeError(f"{busy}\nCUDA kernel errors might be …"), capsys)
    assert (code, stderr) == (2, f"error: {busy}: {advice}\n")
    assert end(RuntimeError("CUDA error: out of memory\n…"), capsys)[0] == 2
    for bug in (
        ZeroDivisionError(),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ModuleNotFoundError(name="no_such_module"),
    ):
        with pytest.raises(type(bug)):
            end(bug, capsys)


COMMANDS = {
    "train": ["data.shards=s"],
    "evaluate": ["run", "s"],
    "visualize": ["run", "v"],
    "export": ["import", "w", "o"],
    "extract_features": ["v", "o", "--model", "m"],
    "search": ["f", "v.mp4"],
    "preview": ["s"],
    "doctor": ["s"],
    "shard_tools/make_shards": ["v", "o"],
    "shard_tools/check_shards": ["s"],
    "shard_tools/synthetic_videos": ["o"],
}


# What the console script does that pip installs.
CONSOLE_SCRIPT = ["-c", "from adamae.__main__ import main; main()", "search"]


@pytest.mark.parametrize("command", [*COMMANDS, "adamae search"])
def test_ctrl_c_while_a_command_imports_is_one_line(tmp_path: Path, command: str) -> None:
    words = [f"{ROOT}/{command}.py", *COMMANDS.get(command, [])]
    if command not in COMMANDS:
        words = [*CONSOLE_SCRIPT, *COMMANDS["search"]]
    for module in ("torch", "av"):
        (tmp_path / f"{module}.py").write_text(
            "import os, signal, time; os.kill(os.getpid(), 2); time.sleep(60)"
        )
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        # A shell's background jobs ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_ctrl_c_while_a_command_ends_is_one_line(tmp_path: Path) -> None:
    hook = "import atexit, os; atexit.register(os.kill, os.getpid(), 2)"
    (tmp_path / "sitecustomize.py").write_text(hook)
    done = subprocess.run(
        [sys.executable, f"{ROOT}/export.py", "import", "nowhere.pth", "x.safetensors"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    first, last = done.stderr.splitlines()
    assert first.startswith("error: nowhere.pth does not exist")
    assert (done.returncode, last) == (130, "interrupted")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_deleted_working_directory_is_named(tmp_path: Path, command: str) -> None:
    program = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.argv[1], sys.argv[1:])"
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, sys.executable, f"{ROOT}/{command}.py", *COMMANDS[command]],
        capture_output=True,
        text=True,
        cwd=tmp_path / "gone",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    sentence = "error: the working directory has been deleted: change to another one (cd)\n"
    assert (done.returncode, done.stderr) == (2, sentence)


def test_torchrun_sees_the_cause_before_its_consequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = {}
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    for error in (PeerLostError("a peer failed"), InputError("it is wrong")):
        end(error, capsys)
        reports[str(error)] = json.loads(file.read_text())
    assert reports["it is wrong"]["message"] == "error: it is wrong"
    assert int(reports["it is wrong"]["timestamp"]) < int(reports["a peer failed"]["timestamp"])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "error.json"))
    assert end(InputError("it is wrong"), capsys) == (2, "error: it is wrong\n")


def test_a_file_in_the_place_of_a_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "folder", tmp_path / ("x" * 300)):
        with pytest.raises(OSError, match=str(tmp_path)) as error:
            path.mkdir()
        code, stderr = end(error.value, capsys)
        assert code == 74
        assert stderr.startswith(f"error: cannot use {path}: ")


def test_a_failed_write_names_its_file_and_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that is not UTF-8 survives."""
    file = tmp_path / "a.json"
    value = {"source": os.fsdecode(b"caf\xe9.mp4"), "ratio": "ρ"}
    write_json(file, value)

    def fail_halfway() -> None:
        with atomic_write(file) as temporary:
            temporary.write_text("half")
            # Pillow and NumPy raise it without a file name.
            raise OSError(28, "No space left on device")

    with pytest.raises(SystemExit) as ended:
        run_command(fail_halfway)
    message = rf"error: cannot use {file}: No space left on device: free space and run .*\n"
    assert re.fullmatch(message, capsys.readouterr().err)
    assert ended.value.code == 74
    assert [path.name for path in file.parent.iterdir()] == ["a.json"]
    assert json.loads(file.read_text(encoding="utf-8")) == value
