"""A process that has imported everything once and forks for every case: a case costs what its commands do.

It reads a case a line from stdin, as JSON, and answers with a line of JSON on stdout.
"""

import atexit
import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import run_command
from fuzzer import sandbox
from fuzzer.cases import Case, Ended, Limits, Place, Step, Target, differences, read_tree
from fuzzer.materials import Materials
from fuzzer.targets import NEEDS, TARGETS

USUAL = Limits()
GRACE = 2.0  # seconds in which the children of a command that has ended may end
LONGEST_SENTENCE = 4000
DISK = 74  # every command's exit code where something in a file's place cannot be opened, as if the disk failed
EXCEPTION = re.compile(r"(?m)^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Iteration|Interrupt)\b.*")  # of a traceback
FOLDERS = ("out", "tmp", "cwd", "home", "elsewhere")
SECRET = "secret.mp4"


class End(NamedTuple):
    """How a forked child ended."""

    code: int  # negative: the signal
    fault: str = ""  # what it did that it must not


class Zygote:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.materials = Materials(folder / "materials")
        sandbox.adopt_orphans()
        resource_tracker.ensure_running()  # inherited by all: to start one takes 0.1 s
        self.own = set(sandbox.descendants(os.getpid()))
        gc.freeze()
        self.base = sandbox.own_bytes(os.getpid())
        self.base_in_all = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run(self, case: Case) -> dict[str, Any]:
        """What came of a case: `complaints` say what is wrong, `skipped` that it could not be made."""
        started = time.perf_counter()
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            target = TARGETS[case.target]
            for name in NEEDS.get(target.name, ()):
                self.materials.folder(name)
            place = Place(folder, self.materials.folder(target.material))
            case = case.drawn(target)
            made = self.in_child(lambda: case.prepare(target, place.material, place.given), folder / "prepare")
            if made.code or made.fault:
                said = (folder / "prepare.err").read_text(errors="replace")
                return {"case": case.to_json(), "skipped": f"{made.fault} {said}".strip(), "complaints": []}
            complaints = list(self.complaints(target, place))
            kept = {}
            if complaints:
                changed = differences(read_tree(place.material), read_tree(place.given))
                kept = {"kept": Case(case.target, case.seed, case.edits, changed).to_json()}
            seconds = time.perf_counter() - started
            return {"case": case.to_json(), "complaints": complaints, "seconds": seconds, **kept}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def complaints(self, target: Target, place: Place) -> Iterator[str]:
        for name in FOLDERS:
            (place.folder / name).mkdir()
        elsewhere = place.folder / "elsewhere"
        shutil.copyfile(self.materials.folder("secret") / SECRET, elsewhere / SECRET)
        before = read_tree(place.given)
        steps: list[Ended] = []
        with sandbox.Watch(elsewhere) as watch:
            for step in target.steps(place):
                log = place.folder / step.name
                end = self.in_child(lambda step=step: _as_command(step, place), log, target.limits, sandboxed=True)
                ended = Ended(
                    step.name, end.code, *(log.with_suffix(end).read_text(errors="replace") for end in (".out", ".err"))
                )
                steps.append(ended)
                if end.fault:
                    yield f"{step.name}: {end.fault}"
                yield from (f"{step.name}: {fault}" for fault in _faults_of(ended, step))
                if end.fault or end.code:
                    break
            if touched := watch.touched():
                yield f"{', '.join(sorted(touched))} outside of what was given was opened or made"
        if read_tree(place.given) != before and not target.changes_given:
            yield f"what was given has been changed: {', '.join(differences(before, read_tree(place.given)))}"
        yield from _left_behind(place)
        if steps[-1].code >= 0:
            yield from self.judged(target, place, steps)

    def judged(self, target: Target, place: Place, steps: list[Ended]) -> Iterator[str]:
        said = place.folder / "judged"

        def judge() -> None:
            said.write_text(json.dumps(list(target.judge(place, steps))))

        end = self.in_child(judge, place.folder / "judge")
        if end.code or end.fault:
            yield f"the judge fails: {end.fault} {(place.folder / 'judge.err').read_text(errors='replace')}"
        else:
            yield from json.loads(said.read_text())

    def in_child(self, call: Callable[[], object], log: Path, limits: Limits = USUAL, sandboxed: bool = False) -> End:
        """Call it in a fork; its output goes to `log`.out and `log`.err."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _live(call, log, sandboxed)
        return self._watched(child, limits)

    def _watched(self, child: int, limits: Limits) -> End:
        began = time.monotonic()
        fault = ""
        pause = 0.002
        while True:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                break
            living = [child, *sandbox.descendants(child)]
            if sum(map(sandbox.cpu_seconds, living)) > limits.seconds:
                fault = f"it takes more than {limits.seconds:g} seconds of processor time"
            elif time.monotonic() - began > limits.wait:
                fault = f"it hangs: {limits.wait:g} seconds have gone by"
            elif max(map(sandbox.own_bytes, living)) - self.base > limits.num_bytes:
                fault = f"it takes more than {limits.num_bytes / 2**30:g} GiB of memory"
            if fault:
                for process in reversed(living):
                    _kill(process)
                _, status, usage = os.wait4(child, 0)
                break
            time.sleep(pause)
            pause = min(0.02, 1.5 * pause)
        if not fault and usage.ru_maxrss * 1024 - self.base_in_all > limits.num_bytes:  # too short for a look
            fault = f"it takes more than {limits.num_bytes / 2**30:g} GiB of memory"
        return End(os.waitstatus_to_exitcode(status), fault or self._orphans())

    def _orphans(self) -> str:
        """Says so, and ends them, if a child that has ended has left processes behind."""
        deadline = time.monotonic() + GRACE
        while left := [process for process in sandbox.descendants(os.getpid()) if process not in self.own]:
            for process in left:
                try:
                    os.waitpid(process, os.WNOHANG)
                except ChildProcessError:  # a grandchild
                    continue
            if time.monotonic() > deadline:
                for process in left:
                    _kill(process)
                return f"it has left {len(left)} processes behind"
            time.sleep(0.01)
        return ""


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def _live(call: Callable[[], object], log: Path, sandboxed: bool) -> None:
    """In the child: call, then end as an interpreter does."""
    code = 1
    try:
        with open(log.with_suffix(".out"), "wb") as out:
            os.dup2(out.fileno(), 1)
        with open(log.with_suffix(".err"), "wb") as err:
            os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", errors="backslashreplace") for number in (1, 2))
        sys.stdin = open(os.devnull)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sandboxed:
            sandbox.forbid_network()
        call()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _as_command(step: Step, place: Place) -> None:
    """Run a command's `main` as its script does, in an environment of its own."""
    os.environ |= {"TMPDIR": str(place.folder / "tmp"), "HOME": str(place.folder / "home")}
    os.environ["XDG_CACHE_HOME"] = str(place.folder / "home")
    tempfile.tempdir = None
    os.chdir(place.folder / "cwd")
    run_command(step.call, goes_on=step.goes_on)


def _faults_of(ended: Ended, step: Step) -> Iterator[str]:
    """What every command must keep to, whatever it is given."""
    said = ended.stdout + ended.stderr
    if "Traceback (most recent call last)" in said:
        yield f"traceback: {_last_line(chr(10).join(re.findall(EXCEPTION, said)) or said)}"
    elif ended.code == -signal.SIGSYS or "SIGSYS" in said:
        yield sandbox.NETWORK
    elif ended.code < 0:
        yield f"it ends by {signal.Signals(-ended.code).name}"
    elif ended.code not in (0, DISK, *step.refuses):
        yield f"exit code {ended.code}, which is not documented: {_last_line(ended.stderr)}"
    elif ended.code > 1 and not _last_line(ended.stderr).startswith("error: "):
        yield f"exit code {ended.code}, and stderr does not end in one line 'error: …': {_last_line(ended.stderr)!r}"
    if len(_last_line(ended.stderr)) > LONGEST_SENTENCE:
        yield f"a sentence of {len(_last_line(ended.stderr))} characters: {_last_line(ended.stderr)[:200]!r}"
    if controls := {char for char in said if char < " " and char not in "\n\r\t"}:
        yield f"control characters on the terminal: {sorted(controls)}"


def _last_line(text: str) -> str:
    lines = [line for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return lines[-1] if lines else ""


def _left_behind(place: Place) -> Iterator[str]:
    for name in ("tmp", "cwd", "home"):
        if found := sorted(path.name for path in (place.folder / name).iterdir()):
            yield f"files are left in the {name} folder: {', '.join(found)}"
    if found := sorted(path.name for path in (place.folder / "out").rglob("*.partial")):
        yield f"half-written files are left: {', '.join(found)}"


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="adamae-fuzz-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of `finally`
    with scratch() as folder:
        zygote = Zygote(folder)
        print(json.dumps({name: target.weight for name, target in TARGETS.items()}), file=answers)
        for line in sys.stdin:
            print(json.dumps(zygote.run(Case.from_json(json.loads(line)))), file=answers)


if __name__ == "__main__":
    main()
