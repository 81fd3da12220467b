"""Zygotes at work, one a core: cases in, what came of them out; and what is found, made as small as it gets."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

from fuzzer.cases import Case

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]
FINDINGS = HERE / "findings"
PATHS = (ROOT, HERE, HERE.parent / "pipeline", HERE.parent / "shard_tools")


@dataclass(frozen=True)
class Result:
    """What came of a case."""

    case: Case
    complaints: list[str]
    seconds: float = 0.0
    skipped: str = ""  # why the case could not be made
    kept: Case | None = None  # the same case, as it is written down where there are complaints

    @property
    def kind(self) -> str:
        """Alike for two cases that meet the same fault, as far as that can be seen."""
        first = self.complaints[0] if self.complaints else self.skipped
        plain = re.sub(r"/[^\s:,'\"]+|0x[0-9a-f]+|'[^']*'|\"[^\"]*\"|[-+]?\d[\d.e+-]*", "#", first)
        return f"{self.case.target}: {' '.join(plain.split())[:160]}"


class Worker:
    """A zygote in a process of its own; a context manager."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join(map(str, PATHS))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment = {name: value for name, value in environment.items() if name != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzzer.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
        self.weights: dict[str, int] = self._answer()  # of all targets: how often each is drawn

    def run(self, case: Case) -> Result:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case.to_json()) + "\n")
        self._process.stdin.flush()
        said = self._answer()
        kept = Case.from_json(said["kept"]) if "kept" in said else None
        case = Case.from_json(said["case"])
        return Result(case, said["complaints"], said.get("seconds", 0.0), said.get("skipped", ""), kept)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(
                f"the process that forks has ended:\n{self._log.read()[-4000:].decode(errors='replace')}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # its loop ends, and it removes what it has made
        self._process.wait()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def cases(weights: dict[str, int], seed: int) -> Iterator[Case]:
    """Endless, the same for the same seed: targets in turn, the weightier ones more often."""
    turn = [name for name, weight in weights.items() for _ in range(weight)]
    Random(seed).shuffle(turn)
    number = 0
    while True:
        for name in turn:
            yield Case(name, seed * 1_000_000 + number)
            number += 1


def run_all(workers: list[Worker], stream: Iterator[Case]) -> Iterator[Result]:
    """Results as they come in order; as many cases are under way as there are workers."""
    with ThreadPoolExecutor(len(workers)) as threads:
        under_way = [(worker, threads.submit(worker.run, next(stream))) for worker in workers]
        while True:
            worker, future = under_way.pop(0)
            result = future.result()
            under_way.append((worker, threads.submit(worker.run, next(stream))))
            try:
                yield result
            except GeneratorExit:
                return


def shrunk(worker: Worker, found: Result) -> Result | None:
    """The same fault with as few edits as show it; None if it does not show again."""
    smallest = worker.run(replace(found.case, tree=None))
    if smallest.kind != found.kind:
        return None
    place = 0
    edits = list(smallest.case.edits or ())
    while place < len(edits):
        fewer = edits[:place] + edits[place + 1 :]
        result = worker.run(replace(smallest.case, edits=tuple(fewer)))
        if result.complaints and result.kind == found.kind:
            smallest, edits = result, fewer
        else:
            place += 1
    return smallest


def write_finding(folder: Path, found: Result) -> Path:
    """A file that `pytest tests/fuzz` plays again, named after its target and what it holds."""
    assert found.kept is not None
    complaints = [re.sub(r"/[^\s:,'\"]*/(given|out)/", r"\1/", text) for text in found.complaints]  # as on any machine
    said = {"found": complaints, **found.kept.to_json()}
    path = folder / f"{found.case.target}-{abs(found.case.seed)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(said, indent=1) + "\n")
    return path


def read_finding(path: Path) -> Case:
    return Case.from_json(json.loads(path.read_text()))
