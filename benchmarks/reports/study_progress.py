"""How far a study is while it runs: stage, step and time left, out of the metrics.jsonl that its runs write anyway."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Row
from common.progress import progress_bar
from training.reviews.metrics import MAX_LINE, figures_of

EVERY_S = 2.0  # seconds between two looks


@dataclass(frozen=True)
class RunningStage:
    """A run of train.py that is under way."""

    point: str
    name: str
    metrics: Path
    steps: int

    @property
    def step(self) -> int:
        return min(last_step(self.metrics), self.steps)

    def __str__(self) -> str:
        return f"{self.point} {self.name} {self.step}/{self.steps}"


class StudyProgress:
    """A bar over the steps of all stages of all points; a context manager, safe to use from many threads."""

    def __init__(self, total_steps: int) -> None:
        self._bar = progress_bar(unit="step", total=total_steps, desc="study")
        self._lock = threading.Lock()
        self._running: list[RunningStage] = []
        self._finished = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> "StudyProgress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.look()
        self._bar.close()

    @contextmanager
    def stage(self, stage: RunningStage) -> Iterator[None]:
        """The block is this stage."""
        with self._lock:
            self._running.append(stage)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(stage)
                self._finished += stage.steps

    def done(self, steps: int) -> None:
        """Count the steps of what was there already."""
        with self._lock:
            self._finished += steps

    def row(self, name: str, row: Row) -> None:
        """Say what became of a point as soon as it is known."""
        figures = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
        self._bar.write(f"{name}: {figures}", file=sys.stderr)

    def look(self) -> None:
        with self._lock:
            self._bar.n = self._finished + sum(stage.step for stage in self._running)
            self._bar.set_postfix_str("; ".join(map(str, self._running)), refresh=False)
        self._bar.update(0)

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.look()


def last_step(metrics: Path) -> int:
    """Of the last whole line that a run has written; 0 where there is none yet."""
    if not metrics.is_file():
        return 0
    with metrics.open("rb") as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - MAX_LINE))
        for line in reversed(opened.read().splitlines()):
            if (figures := figures_of(line)) is not None:
                return int(figures["step"])
    return 0
