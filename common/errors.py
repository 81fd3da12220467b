"""How every command ends on bad input: one sentence on stderr, a non-zero exit code, no traceback."""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from adamae.common.logging import escape, log

# Import name -> pip name of packages that are imported only where they are used; the rest works without them.
LAZY_PACKAGES = {"nvidia": "nvidia-dali-cuda130", "jsonargparse": "jsonargparse", "wandb": "wandb"}
# In CUDA's words, and what to do about a GPU that cannot be used.
GPU_ERRORS = {
    "out of memory": "lower the batch size, or end what else runs on this GPU (see nvidia-smi)",
    "busy or unavailable": "another process has this GPU for itself; choose another one with CUDA_VISIBLE_DEVICES",
}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
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

T = TypeVar("T")


def exit_on_interrupt(*_: object) -> None:
    """Handle Ctrl-C while a command imports: for seconds, a KeyboardInterrupt could come up anywhere in a library."""
    os.write(2, b"interrupted\n")
    os._exit(130)


# Not in the programs of others, which import this too, and not where Ctrl-C is ignored, as nohup has it.
MAIN = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
if (
    Path(__file__).resolve().parents[1] in MAIN.parents[:2]
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, exit_on_interrupt)


class InputError(Exception):
    """The user's input cannot be used. The message is one sentence: what is wrong, where, and what to do."""


class PeerLostError(InputError):
    """Another rank of the run failed and reports the cause; this rank only cannot continue without it."""


def run_command(main: Callable[[], int | None], *, resumable: bool = False) -> None:
    """Run a command's `main` and exit.

    Exit codes: `main`'s return value or 0, 2 on bad input, a missing optional package or a full GPU, 74 on disk errors,
    130 on Ctrl-C. `resumable`: re-running the command only does what is missing.
    """
    with _exit_on_error(resumable):
        if signal.getsignal(signal.SIGINT) is exit_on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main() or 0)


def parse_early(parse: Callable[[list[str]], T]) -> T:
    """Parse a command's arguments before its heavy imports: --help and mistakes are answered in under a second.

    torch, timm and torchvision take 3 to 5 s to import: a command's file parses between the imports that this needs and
    all others, as train.py does.
    """
    with _exit_on_error():
        return parse(sys.argv[1:])


@contextmanager
def _exit_on_error(resumable: bool = False) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        _exit(f"error: {error}", 2, is_cause=not isinstance(error, PeerLostError))
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in LAZY_PACKAGES:
            raise
        _exit(
            f"error: the package {module} is not installed: pip install {LAZY_PACKAGES[module]}", 2
        )
    except KeyboardInterrupt:
        _exit(
            f"interrupted{'; progress is saved, re-run the same command to resume' if resumable else ''}",
            130,
        )
    except BrokenPipeError:
        # The reader of our output has exited (`… | head`): not an error, but stdout must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        path = error.filename2 or error.filename or "the output"  # of a rename, the target
        free = ": free space and run the same command again" if error.errno in DISK_FULL else ""
        _exit(f"error: cannot use {path}: {error.strerror}{free}", 74)
    except RuntimeError as error:
        sentence = str(error).partition("\n")[0].partition(". ")[0]
        advice = next((advice for words, advice in GPU_ERRORS.items() if words in sentence), None)
        if advice is None or not sentence.startswith("CUDA"):
            raise
        _exit(f"error: {sentence}: {advice}", 2)


@contextmanager
def name_disk_errors(path: Path) -> Iterator[None]:
    """Add `path` to disk errors of an open file: Python names only the files that it fails to open."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_ERRORS:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def _exit(sentence: str, code: int, *, is_cause: bool = True) -> None:
    log(sentence, sys.stderr)
    # torchrun reports the failure with the earliest timestamp, in whole seconds; a consequence must not look earlier.
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": escape(sentence), "timestamp": time.time() + (0 if is_cause else 1)}
        with suppress(OSError):  # the disk may be what failed
            Path(error_file).write_text(json.dumps(report), encoding="utf-8")
    sys.exit(code)
