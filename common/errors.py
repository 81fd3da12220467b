"""How every command of this project ends when its input is bad: one sentence, non-zero exit, no traceback."""

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.logging import escape, log

# Packages that only some commands need, as pip knows them: without one, the others work.
PACKAGES = {"av": "av", "nvidia": "nvidia-dali-cuda130", "jsonargparse": "jsonargparse", "torchao": "torchao"}
FULL = (errno.ENOSPC, errno.EDQUOT)
# A file for a folder, and such.
OTHER_KIND = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
DISK_ERRORS = (*FULL, *OTHER_KIND, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM)


class InputError(Exception):
    """Something the user gave cannot be used: the message is one sentence on what is wrong, where, and what to do."""


class PeerLostError(InputError):
    """Another process of the run has failed, and says why; this one only cannot go on without it."""


def run_command(main: Callable[[], int | None], *, goes_on: bool = False) -> None:
    """Run a command's `main` and exit: 0 or its return value, 2 on bad input or where a package that it needs is not
    installed, 130 on Ctrl-C, 74 on a failing disk.

    `goes_on`: whether the command, started again, does only what is missing.
    """
    try:
        sys.exit(main() or 0)
    except InputError as error:
        _exit(f"error: {error}", 2, is_cause=not isinstance(error, PeerLostError))
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in PACKAGES:
            raise
        _exit(f"error: this needs the package {module}, which is not installed: pip install {PACKAGES[module]}", 2)
    except KeyboardInterrupt:
        _exit(
            f"interrupted{': what was finished is kept; the same command goes on from there' if goes_on else ''}", 130
        )
    except BrokenPipeError:
        # The reader of our output went away (`… | head`): not an error, but stdout must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _exit(f"error: {describe_error(error)}", 74)


def describe_error(error: InputError | OSError) -> str:
    """What is wrong, where, and what to do."""
    if isinstance(error, InputError):
        return str(error)
    where = error.filename2 or error.filename or "the output"  # of a rename, the name that it should have had
    return f"cannot use {where}: {error.strerror}{_room(where) if error.errno in FULL else ''}"


@contextmanager
def name_disk_errors(path: Path) -> Iterator[None]:
    """Name the file in what the disk says of one that is open: Python names only those that it opens."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_ERRORS:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _room(where: str) -> str:
    for folder in Path(where).absolute().parents:
        with suppress(OSError):
            return f" ({shutil.disk_usage(folder).free // 2**20} MiB are free there)"
    return ""


def _exit(sentence: str, code: int, *, is_cause: bool = True) -> None:
    log(sentence, sys.stderr)
    # torchrun ends with the failure that was first, in whole seconds: what came of it must not look as early.
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": escape(sentence), "timestamp": time.time() + (0 if is_cause else 1)}
        with suppress(OSError):  # the disk may be what is wrong
            Path(error_file).write_text(json.dumps(said), encoding="utf-8")
    sys.exit(code)
