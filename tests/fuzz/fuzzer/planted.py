"""Commands that do what a command must not: the fuzzer has to see each of these faults, or it sees nothing.

They are targets that are never drawn. What runs into a limit has that one low, so that it is soon reached; all others
have the usual limits, for a slow machine may take a second to start and end a process.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np

from common.errors import InputError
from fuzzer.cases import Ended, Limits, Place, Step, Target, ops


def fine(place: Place) -> None:
    (place.out / "result").write_bytes((place.given / "config.yaml").read_bytes())


def one_sentence(place: Place) -> None:
    raise InputError("config.yaml says nothing: give one that does")


def raises(place: Place) -> None:
    raise KeyError("step")


def no_sentence(place: Place) -> None:
    sys.exit(2)


def unknown_code(place: Place) -> None:
    sys.exit(7)


def colours_the_terminal(place: Place) -> None:
    print("\x1b[31mred")


def never_ends(place: Place) -> None:
    time.sleep(60)


def computes_for_ever(place: Place) -> None:
    while True:
        sum(range(10_000))


def takes_memory(place: Place) -> None:
    np.ones(2**27, np.uint8)
    time.sleep(0.1)


def leaves_a_child(place: Place) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)


def opens_a_port(place: Place) -> None:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def reads_elsewhere(place: Place) -> None:
    (place.folder / "elsewhere" / "secret.mp4").read_bytes()


def runs_code(place: Place) -> None:
    os.system("touch ../elsewhere/ran")


def changes_the_input(place: Place) -> None:
    (place.given / "config.yaml").write_text("run: x\n")


def litters(place: Place) -> None:
    Path("left.txt").write_text("")


def writes_half(place: Place) -> None:
    (place.out / ".result.7.partial").write_text("")


def crashes(place: Place) -> None:
    os.abort()


def wrong_result(place: Place) -> None:
    (place.out / "result").write_text("something else")


def same_as_given(place: Place, steps: list[Ended]) -> Iterator[str]:
    result = place.out / "result"
    if result.exists() and result.read_bytes() != (place.given / "config.yaml").read_bytes():
        yield "the result is another"


SOON = {
    never_ends: Limits(wait=2.0),
    computes_for_ever: Limits(seconds=0.4),
    takes_memory: Limits(num_bytes=64 * 2**20),
}


def _target(command: Callable[[Place], None]) -> Target:
    def steps(place: Place) -> list[Step]:
        return [Step("command", lambda: command(place))]

    limits = SOON.get(command, Limits())
    return Target(f"planted-{command.__name__}", "config", (), steps, same_as_given, weight=0, limits=limits)


FAULTS: dict[Callable[[Place], None], str] = {
    raises: "traceback: KeyError: 'step'",
    no_sentence: "stderr does not end in one line",
    unknown_code: "exit code 7",
    colours_the_terminal: "control characters",
    never_ends: "it hangs",
    computes_for_ever: "seconds of processor time",
    takes_memory: "of memory",
    leaves_a_child: "left 1 processes behind",
    opens_a_port: "network socket",
    reads_elsewhere: "secret.mp4 outside",
    runs_code: "ran outside",
    changes_the_input: "what was given has been changed: config.yaml",
    litters: "files are left in the cwd folder: left.txt",
    writes_half: "half-written files are left",
    crashes: "it ends by SIGABRT",
    wrong_result: "the result is another",
}


def _fails_on_ff(place: Place) -> list[Step]:
    def main() -> None:
        if b"\xff" in (place.given / "config.yaml").read_bytes():
            raise IndexError("0xFF")

    return [Step("command", main)]


def add_ff(data: bytes, rng: Random) -> bytes:
    return data + b"\xff"


def add_line(data: bytes, rng: Random) -> bytes:
    return data + b"\n"


PLANTED = [
    *(_target(command) for command in (fine, one_sentence, *FAULTS)),
    Target("planted-ff", "config", ops("*.yaml", (add_ff, add_line)), _fails_on_ff, same_as_given, weight=0),
]
