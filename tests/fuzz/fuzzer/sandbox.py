"""The bounds of a case: a process that may open no port, and folders in which every file that is touched is seen."""

import ctypes
import ctypes.util
import os
import platform
import struct
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38
SOCKET = {"x86_64": 41, "aarch64": 198}  # number of the system call
AF_INET, AF_INET6 = 2, 10
IN_ACCESS, IN_MODIFY, IN_CLOSE_WRITE, IN_OPEN, IN_CREATE, IN_DELETE = 0x1, 0x2, 0x8, 0x20, 0x100, 0x200
IN_ISDIR = 0x40000000
NETWORK = "it opened a network socket"


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def forbid_network() -> None:
    """From now on this process and its children end with SIGSYS where they ask for an internet socket, also in C."""
    load, equal, end, kill, allow = 0x20, 0x15, 0x06, 0x80000000, 0x7FFF0000
    said = (
        (load, 0, 0, 0),  # the number of the system call
        (equal, 0, 4, SOCKET[platform.machine()]),
        (load, 0, 0, 16),  # its first argument
        (equal, 1, 0, AF_INET),
        (equal, 0, 1, AF_INET6),
        (end, 0, 0, kill),
        (end, 0, 0, allow),
    )
    program = _Program(len(said), (_Instruction * len(said))(*(_Instruction(*one) for one in said)))
    for number, first, second in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, 2, ctypes.byref(program))):
        if LIBC.prctl(number, first, second, 0, 0):
            raise OSError(ctypes.get_errno(), "the system has no filter of system calls, without which ports go unseen")


def adopt_orphans() -> None:
    """From now on what the children of this process leave behind become its own children."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Watch:
    """Sees every file that is opened, read, made or removed in a folder; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._number = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        wanted = IN_ACCESS | IN_MODIFY | IN_CLOSE_WRITE | IN_OPEN | IN_CREATE | IN_DELETE
        if self._number < 0 or LIBC.inotify_add_watch(self._number, str(folder).encode(), wanted) < 0:
            raise OSError(ctypes.get_errno(), "a folder cannot be watched", str(folder))

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)

    def touched(self) -> set[str]:
        """Names of the files to which something happened."""
        names = set()
        try:
            while events := os.read(self._number, 65536):
                start = 0
                while start < len(events):
                    _, mask, _, length = struct.unpack_from("iIII", events, start)
                    name = events[start + 16 : start + 16 + length].rstrip(b"\0").decode(errors="replace")
                    if name and not mask & IN_ISDIR:
                        names.add(name)
                    start += 16 + length
        except BlockingIOError:
            pass
        return names


def descendants(process: int) -> list[int]:
    """All living processes below this one."""
    found = []
    for child in _children(process):
        found += [child, *descendants(child)]
    return found


def _children(process: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended
        return []


def own_bytes(process: int) -> int:
    """Memory of a process that is not a file's, in bytes; pages that it has in common with its parent count too."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def cpu_seconds(process: int) -> float:
    """Of a process and of those of its children that have ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
