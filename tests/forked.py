"""Run the project's scripts as processes forked from one that has imported everything.

It saves 8 s for each script.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "adamae.train",
        "adamae.evaluate",
        "torch._dynamo",
        "torch.distributed.launcher.api",
        # The first rank alone imports it, for seconds in which the others would wait.
        "torch.utils.tensorboard",
    ]
)


def start(
    command: Sequence[object], out: Path, err: Path, env: Mapping[str, str] | None = None
) -> ForkServerProcess:
    """Start a command, [python, script, argument...]; append its output to two files."""
    words = [str(word) for word in command]
    environment = dict(env or os.environ)
    process = SERVER.Process(target=_run, args=(words[1:], str(out), str(err), environment))
    process.start()
    return process


def run(
    command: Sequence[object], env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command as subprocess.run does, with captured text and a timeout of eight minutes."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        err = Path(folder) / "err"
        code = wait(start(command, out, err, env), 480)
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


def wait(process: ForkServerProcess, seconds: float) -> int:
    """Wait for a process and return its exit code; kill it and fail after `seconds`."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"not over after {seconds} s")
    return process.exitcode


def _run(words: list[str], out: str, err: str, env: dict[str, str]) -> None:
    """Become the script `words[0]` with its arguments, in a forked process."""
    for name, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
