"""The ends of commands on bad input: a sentence on stderr, a non-zero exit code, no traceback."""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from adamae.common.logging import escape, log

# Of packages that are imported only where they are used: import name -> what pip installs.
LAZY_PACKAGES = {"nvidia": "nvidia-dali-cuda130", "jsonargparse": "jsonargparse", "wandb": "wandb"}
# In CUDA's words, and what to do about a GPU that cannot be used.
GPU_ERRORS = {
    "out of memory": "lower the batch size, or end what else runs on this GPU (see nvidia-smi)",
    "busy or unavailable": (
        "another process has this GPU for itself; choose another one with CUDA_VISIBLE_DEVICES"
    ),
}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# What users can change. Others, such as EBADF, are bugs and keep their traceback.
DISK_ERRORS = (
    *DISK_FULL,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)

# Exit codes. Schedulers tell them apart (docs/clusters.md#exit-codes), so that a mistake is
# not tried again, and what was only stopped is. The last three are sysexits.h's EX_UNAVAILABLE,
# EX_IOERR and EX_TEMPFAIL.
BAD_INPUT = 2
# Another rank or object storage does not answer: the same command continues.
UNAVAILABLE = 69
DISK_ERROR = 74
# A signal has stopped a run, which has saved a checkpoint: the same command continues.
STOPPED = 75
INTERRUPTED = 130

T = TypeVar("T")


def exit_on_interrupt(*_: object) -> None:
    """End on Ctrl-C while a command imports.

    For seconds, a KeyboardInterrupt could come up anywhere in a library, which may swallow it.
    """
    # Not print: a signal may interrupt another print, whose lock is held.
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


# Other programs that import this keep their handler, and so does a command whose Ctrl-C is ignored,
# as in a shell's background jobs.
MAIN = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
IS_COMMAND = Path(__file__).resolve().parents[1] in MAIN.parents[:2]
if IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, exit_on_interrupt)


class InputError(Exception):
    """The user's input cannot be used.

    The message is one sentence: what is wrong, where, and what to do. `details` are lines that are
    printed below it.
    """

    exit_code = BAD_INPUT
    details: Sequence[str] = ()


class QuestionError(InputError):
    """The input can be read in several ways, or in one that the user should see first.

    details: the readings, each with the command to copy, the best proposal first.
    """

    def __init__(self, what: str, details: Sequence[str]) -> None:
        super().__init__(f"{what}: run one of the commands below (nothing was written)")
        self.details = details


class PeerLostError(InputError):
    """Another rank failed and reports the cause; this one only cannot continue without it."""

    exit_code = UNAVAILABLE


class SavedInterrupt(KeyboardInterrupt):
    """A signal that came when there was nothing left to save."""


def run_command(main: Callable[[], int | None], *, resumable: bool = False) -> None:
    """Run a command's `main` and exit.

    The exit code is `main`'s return value or 0, BAD_INPUT also for a missing optional package or a
    full GPU, or another of the codes above. `resumable`: re-running the command only does what is
    missing.
    """
    try:
        with _exit_on_error(resumable):
            # Imports are over: from now on, Ctrl-C runs the cleanup of `with` blocks.
            if signal.getsignal(signal.SIGINT) is exit_on_interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.exit(main() or 0)
    finally:
        # While the interpreter ends, it would print a traceback of whatever Ctrl-C interrupts.
        if IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, exit_on_interrupt)


def parse_early(parse: Callable[[list[str]], T]) -> T:
    """Parse a command's arguments before its heavy imports.

    So --help and mistakes are answered in under a second, where importing torch, timm and
    torchvision takes 3 to 5 s. A command's file parses between the imports that this needs and all
    others, as train.py does.
    """
    with _exit_on_error():
        return parse(sys.argv[1:])


def _require_working_directory() -> None:
    """Raise InputError in a deleted directory, in which importing torch ends the process."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise InputError(
            "the working directory has been deleted: change to another one (cd)"
        ) from error


@contextmanager
def _exit_on_error(resumable: bool = False) -> Iterator[None]:
    try:
        _require_working_directory()
        yield
    except InputError as error:
        is_cause = not isinstance(error, PeerLostError)
        _exit(f"error: {error}", error.exit_code, is_cause=is_cause, details=error.details)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in LAZY_PACKAGES:
            raise
        advice = f"pip install {LAZY_PACKAGES[module]}"
        _exit(f"error: the package {module} is not installed: {advice}", BAD_INPUT)
    except KeyboardInterrupt as error:
        advice = "; progress is saved, re-run the same command to resume" if resumable else ""
        code = STOPPED if isinstance(error, SavedInterrupt) else INTERRUPTED
        _exit(f"interrupted{advice}", code)
    except BrokenPipeError:
        # The reader of our output has exited (`… | head`). That is not an error, but flushing
        # stdout at exit would be one.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        # Of a rename, the second name is the target.
        path = error.filename2 or error.filename or "the output"
        advice = ": free space and run the same command again" if error.errno in DISK_FULL else ""
        _exit(f"error: cannot use {path}: {error.strerror}{advice}", DISK_ERROR)
    except RuntimeError as error:
        sentence = _explain_gpu_error(str(error))
        if sentence is None:
            raise
        _exit(f"error: {sentence}", BAD_INPUT)


def _explain_gpu_error(message: str) -> str | None:
    """Return the first sentence of an error of CUDA and what to do; None for other errors."""
    sentence = message.partition("\n")[0].partition(". ")[0]
    if sentence.startswith("CUDA"):
        for words, advice in GPU_ERRORS.items():
            if words in sentence:
                return f"{sentence}: {advice}"
    return None


@contextmanager
def name_disk_errors(path: Path) -> Iterator[None]:
    """Add `path` to disk errors: Python names only files that it fails to open, not open ones."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_ERRORS:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def _exit(
    sentence: str, code: int, *, is_cause: bool = True, details: Sequence[str] = ()
) -> NoReturn:
    """Log the sentence, for torchrun too, and exit; not `is_cause`: another rank has the cause."""
    for line in (sentence, *details):
        log(line, sys.stderr)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        # torchrun reports the failure with the earliest timestamp, in whole seconds. A consequence
        # must not look earlier than its cause.
        timestamp = time.time()
        if not is_cause:
            timestamp += 1
        report = {"message": escape(sentence), "timestamp": timestamp}
        # The disk may be what failed.
        with suppress(OSError):
            Path(error_file).write_text(json.dumps(report), encoding="utf-8")
    sys.exit(code)
