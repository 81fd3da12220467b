"""How many clips are DALI's and how many PyAV's: both are timed on a run's own videos, and share every batch in the
ratio of what they make, so that both are done at the same time.

The run keeps what was found, and which videos DALI has failed at, in decoders.jsonl: when it goes on, every clip is
decoded as it would have been.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from devices import device_name
from pipeline.config import DataConfig, Decoder
from pipeline.decoding.choice import Choice, notice
from pipeline.lines import Lines
from pipeline.planning.plan import ClipPlan, PlanRow

TIMED_BATCHES = 4  # again and again
LOOKED_AT = 16  # batches, for clips that suit DALI
TIMED_S = 1.5  # of each way, after the first two batches


@dataclass(frozen=True)
class Speeds:
    """What was found."""

    dali: float  # clips a second, of videos that suit it
    pyav: float
    suited: float  # share of the clips that suit DALI, by codec and sides

    @property
    def share(self) -> float:
        """Of the clips that suit DALI, how many it is to decode."""
        if not self.dali:
            return 0.0
        return min(1.0, self.dali / (self.dali + self.pyav) / self.suited)


class Timed(Protocol):
    """What is timed of a loader."""

    def batches(self, first: int) -> Iterator[Any]: ...
    @property
    def counters(self) -> dict[str, float]: ...


class Repeated(ClipPlan):
    """A few batches of a plan again and again, without augmentation."""

    def __init__(self, plan: ClipPlan, batches: Sequence[list[PlanRow]]) -> None:
        self.num_frames, self.frame_size = plan.num_frames, plan.frame_size
        self.batch_size, self.views, self.lanes = plan.batch_size, plan.views, plan.lanes
        self._plan, self._batches = plan, batches

    def batch(self, index: int) -> list[PlanRow]:
        return [replace(row, changes=(), erased=None) for row in self._batches[index % len(self._batches)]]

    def replacement(self, row: PlanRow, attempt: int) -> PlanRow | None:
        return self._plan.replacement(row, attempt)


def timed_plans(plan: ClipPlan, suits: Callable[[int], bool]) -> tuple[Repeated, Repeated | None, float]:
    """A plan of any clips, one of clips that suit DALI, None if there are none, and their share."""
    found = [rows for rows in map(plan.batch, range(LOOKED_AT)) if rows]
    decodes = [rows[first : first + plan.views] for rows in found for first in range(0, len(rows), plan.views)]
    suited = [rows for rows in decodes if suits(rows[0].sample)]
    a_batch = plan.batch_size // plan.views
    batches = [
        [row for rows in suited[first : first + a_batch] for row in rows]
        for first in range(0, min(len(suited), TIMED_BATCHES * a_batch), a_batch)
    ]
    return (
        Repeated(plan, found[:TIMED_BATCHES]),
        Repeated(plan, batches) if batches else None,
        len(suited) / max(1, len(decodes)),
    )


def clips_per_second(loader: Timed, decoder: Decoder, warm_up: int) -> float:
    """How many a decoder makes; those that PyAV makes because DALI has failed are not DALI's."""
    made = "clips" if decoder == "pyav" else "dali_clips"
    batches = loader.batches(0)
    for _ in islice(batches, warm_up):
        pass
    before, started = loader.counters[made], time.perf_counter()
    for _ in batches:
        seconds = time.perf_counter() - started
        if seconds > TIMED_S:
            break
    return (loader.counters[made] - before) / seconds


class RunDecoders:
    """decoders.jsonl of a run, as far as this process is concerned."""

    def __init__(
        self, file: Path | None, device: torch.device, config: DataConfig, plan: ClipPlan, choice: Choice
    ) -> None:
        """Tell `choice` what DALI has failed at before. `file`: None where nothing goes on later."""
        self._lines = Lines(file) if file else None
        self._plan, self._choice, self._threads = plan, choice, config.threads
        self._rank = int(os.environ.get("RANK", "0"))
        # Speeds that were found under other conditions do not count.
        self._conditions = {
            "device": device_name(device),
            "threads": config.threads,
            "dali_threads": choice.dali_threads,
            "clip": [plan.num_frames, *plan.frame_size, plan.views],
        }
        for line in self._mine():
            with suppress(TypeError, ValueError, KeyError):
                choice.keep_from_dali(line["kept_from_dali"], int(line["failed_batch"]), int(line["from_batch"]))

    def share(self, clips_per_second: Callable[[ClipPlan, Decoder], float]) -> None:
        """Share the clips by what the run has found before, or is found now."""
        speeds = self._found_before()
        if speeds is None:
            speeds = self._found_now(clips_per_second)
            self._keep({"conditions": self._conditions, "speeds": asdict(speeds)})
        self._choice.share = speeds.share

    def keep_from_dali(self, samples: Sequence[int] | None, failed: int, since: int) -> None:
        """As `choice` is told; for the next time."""
        self._keep({"kept_from_dali": samples, "failed_batch": failed, "from_batch": since})

    def _found_before(self) -> Speeds | None:
        for line in reversed(self._mine()):
            if line.get("conditions") == self._conditions:
                with suppress(TypeError, ValueError, KeyError):
                    found = Speeds(*(float(line["speeds"][name]) for name in ("dali", "pyav", "suited")))
                    if 0 < found.suited <= 1 and 0 <= found.dali < math.inf and 0 <= found.pyav < math.inf:
                        return found
        return None

    def _found_now(self, clips_per_second: Callable[[ClipPlan, Decoder], float]) -> Speeds:
        """Each decoder alone on the first clips of the plan."""
        any_clips, suited_clips, suited = timed_plans(self._plan, lambda sample: self._choice.suits(sample) is not None)
        # DALI takes what it takes, also where that is not all.
        dali = clips_per_second(suited_clips, "hybrid") if suited_clips else 0.0
        speeds = Speeds(dali, clips_per_second(any_clips, "pyav"), suited)
        notice(
            f"DALI makes {speeds.dali:.0f} clips a second of those that it takes ({suited:.0%} of all) and PyAV"
            f" {speeds.pyav:.0f}, on {self._threads} CPU threads: DALI gets {speeds.share:.0%} of its own",
            once_a_node=True,
        )
        return speeds

    def _keep(self, line: dict[str, Any]) -> None:
        if self._lines:
            self._lines.add({"rank": self._rank, **line})

    def _mine(self) -> list[dict[str, Any]]:
        return [line for line in self._lines.read() if line.get("rank") == self._rank] if self._lines else []
