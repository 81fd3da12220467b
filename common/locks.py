"""Locks on files, for processes that share a file system.

They are those of flock(2): the kernel releases them when a process ends, also when it is killed.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from adamae.common.errors import InputError


@contextmanager
def exclusive_lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing, alone among processes and threads.

    Raise filelock.Timeout if it is held elsewhere and `wait` is false, and InputError if `path` is
    a symbolic link.
    """
    lock = FileLock(path, blocking=wait)
    try:
        lock.acquire()
    except OSError as error:
        _explain_link(path, error)
        raise
    try:
        yield
    finally:
        lock.release()


def shared_lock(path: Path) -> BinaryIO:
    """Take a lock that many processes may hold until they close the file; exclusive_lock waits.

    filelock has no shared locks that mix with exclusive ones. Raise InputError if `path` is a
    symbolic link.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        _explain_link(path, error)
        raise
    file = os.fdopen(descriptor, "r+b")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _explain_link(path: Path, error: OSError) -> None:
    """Raise InputError if the file of a lock is a link.

    Who may write to the folder could else have a file of the user's choice created or opened.
    """
    if path.is_symlink():
        raise InputError(f"{path} is a link: remove it, or name a directory of your own") from error
