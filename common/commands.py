"""The commands of this project, by the names that `adamae NAME` has for them."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from adamae.common.logging import log

# Where `import adamae` looks: the clone's root, or site-packages.
IMPORT_ROOT = Path(__file__).absolute().parents[2]
# Where the files of commands are: the clone's root, or the installed package.
FILES = Path(__file__).resolve().parents[1]


class Command(NamedTuple):
    """Where a command is, and what it is for."""

    # Below `adamae`.
    module: str
    purpose: str

    @property
    def file(self) -> str:
        return self.module.replace(".", "/") + ".py"


COMMANDS = {
    "start": Command("start", "make shards of videos, and compare encoders on them"),
    "shards": Command("shard_tools.make_shards", "make shards from videos, lists or tars"),
    "check": Command("shard_tools.check_shards", "verify the shards of a dataset"),
    "preview": Command("preview", "show the clips that a run will see"),
    "doctor": Command("doctor", "check this machine, and estimate a run"),
    "train": Command("train", "pre-train, fine-tune or probe a model"),
    "features": Command("extract_features", "extract features with any encoder"),
    "compare": Command("compare", "compare encoders on your labeled videos"),
    "search": Command("search", "find the moments of videos that look like a query"),
    "evaluate": Command("evaluate", "evaluate a classifier on held-out videos"),
    "visualize": Command("visualize", "show what a model reconstructs"),
    "export": Command("export", "import weights, or export them to other projects"),
    "demo": Command("demo", "pre-train a small model in minutes, on a CPU"),
}
# A published encoder that is small enough to try on any machine, for advice.
PUBLISHED = "hf://MCG-NJU/videomae-base"
# Is in the environment of a step of another command.
IN_STEP = "ADAMAE_IN_STEP"
# "adamae train" if the user has called train.py by that name.
called_as = ""


def list_commands() -> Iterator[str]:
    """Yield the lines of `adamae --help`."""
    yield "usage: adamae COMMAND [ARGUMENT ...]"
    yield ""
    for name, command in COMMANDS.items():
        yield f"  {name:<11}{command.purpose}"
    yield ""
    yield "`adamae COMMAND --help` explains the arguments of a command."


def name_as_called(text: str) -> str:
    """Write the commands in a text as this one was called: `adamae train` for `python train.py`."""
    if called_as:
        for name, command in COMMANDS.items():
            text = text.replace(f"python {command.file}", f"adamae {name}")
    return text


def command_line(name: str, *arguments: object) -> str:
    """Return what a user types for a command, in the way in which this one was called.

    Example: `adamae features clips.csv out`, or `python extract_features.py clips.csv out`.
    """
    words = ["adamae", name]
    if not called_as:
        words = ["python", os.path.relpath(FILES / COMMANDS[name].file)]
    return shlex.join([*words, *map(str, arguments)])


def repeat_command(*options: str) -> str:
    """Return the command line of this process with more `options`, to be copied into a shell."""
    words = called_as.split() or ["python", sys.argv[0]]
    return shlex.join([*words, *sys.argv[1:], *options])


def log_next(command: str) -> None:
    """Print the command that a user would run next, but not in a step: what comes next is running.

    To stderr, as scripts read what commands print to stdout.
    """
    if IN_STEP not in os.environ:
        log(f"next: {command}", sys.stderr)


def run_step(step: str, *arguments: object) -> None:
    """Run a command, or a module below `adamae`, and exit with its status if that is not 0.

    A command is printed as the user could type it. A step gets a process of its own, so that the
    memory and the GPU that it has taken are free when it ends.
    """
    words = [f"adamae.{step}"]
    if step in COMMANDS:
        log(f"$ {command_line(step, *arguments)}")
        words = ["adamae", step] if called_as else [f"adamae.{COMMANDS[step].module}"]
    words = [sys.executable, "-m", *words, *map(str, arguments)]
    # What can be imported here can be imported there; an empty entry would be the current folder.
    search_path = [entry for entry in (str(IMPORT_ROOT), *sys.path) if entry]
    sys.stdout.flush()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path), IN_STEP: "1"}
    process = subprocess.Popen(words, env=environment)
    # The terminal sends Ctrl-C to both. The step saves what it has done, which this one waits for.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    if code:
        # A shell reports the end by a signal so.
        sys.exit(code if code > 0 else 128 - code)
