"""How many clips are DALI's and how many PyAV's: both are timed on a run's own videos, and share every batch in the
ratio of what they make, so that both are done at the same time. Side by side, and beside the step, they make another
ratio than alone: the share follows the one that is waited for.

The run keeps what was found, and which videos DALI has failed at, in decoders.jsonl: when it goes on, every clip is
decoded as it would have been.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from common.devices import get_device_name
from pipeline.config import DataConfig, Decoder
from pipeline.decoding.policy import DecoderPolicy, notice
from pipeline.jsonl import JsonlFile
from pipeline.planning.plan import ClipPlan, PlanRow

TIMED_BATCHES = 4  # again and again
LOOKED_AT = 16  # batches, for clips that suit DALI
TIMED_S = 1.5  # of each way, after the first two batches
# How the share follows.
FIRST_WATCH, LAST_WATCH = 8, 256  # batches after which it is asked for which decoder they were waited for
FIRST_STEP, LAST_STEP = 0.16, 0.02  # of the share's logit: .04 and .005 of a share of a half
NO_WAIT = 0.02  # share of the time; where less is waited, nothing is to be had
BALANCED = 0.5  # of what is waited, so much more for one than for the other
AT_ONCE = 0.05  # of what is waited; DALI was done before PyAV if no more is waited for it behind PyAV
SMALLEST = 0.01  # share of either, once it is moved
DAMAGED = (TypeError, ValueError, KeyError, OverflowError)  # what a line that makes no sense raises


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


class Balance:
    """Moves DALI's share until neither decoder is the last one more often.

    What a decoder has ready hides for a while that it is now the slower one, so the share swings: with every turn back
    the steps get smaller, and the time between them longer.
    """

    def __init__(self, shares: Sequence[tuple[int, float]]) -> None:
        """`shares`: those until now, each with its first batch."""
        since, self.share = shares[-1]
        moves = [after - before for (_, before), (_, after) in pairwise(shares)]
        self._turns = sum(after * before < 0 for before, after in pairwise(moves))
        self._sign = moves[-1] if moves else 0.0
        self._begin(since)

    def waited(self, batch: int, for_pyav: float, for_dali: float, following: int) -> bool:
        """Tell how many seconds a batch was waited for, for PyAV's part and then for DALI's; whether, from batch
        `following` on, the share is another."""
        if batch < self._since:
            return False
        self._batches += 1
        if self._batches == 1:
            self._started = time.perf_counter()
            return False
        waited = for_pyav + for_dali
        self._waited += waited
        self._late += waited if for_dali > AT_ONCE * waited else -waited
        if self._batches <= FIRST_WATCH * self._calm:
            return False
        matters = self._waited > NO_WAIT * (time.perf_counter() - self._started)
        before = self.share
        if matters and abs(self._late) > BALANCED * self._waited:
            self._move(-math.copysign(1.0, self._late))
        self._begin(batch + 1 if self.share == before else following)
        return self.share != before

    @property
    def _calm(self) -> int:
        """How much smaller the steps are, and longer the time between them, than at first."""
        most = LAST_WATCH // FIRST_WATCH
        return most if self._turns > most else min(2**self._turns, most)

    def _begin(self, since: int) -> None:
        self._since, self._batches, self._started = since, 0, 0.0
        self._waited, self._late = 0.0, 0.0  # seconds; of those, for DALI as the last one, less those for PyAV

    def _move(self, sign: float) -> None:
        self._turns += sign * self._sign < 0
        self._sign = sign
        step = max(FIRST_STEP / self._calm, LAST_STEP)
        moved = 1 / (1 + (1 / self.share - 1) * math.exp(-sign * step))
        self.share = min(max(moved, SMALLEST), 1 - SMALLEST)


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
        return [replace(row, augment_ops=(), erase_box=None) for row in self._batches[index % len(self._batches)]]

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
        self, file: Path | None, device: torch.device, config: DataConfig, plan: ClipPlan, choice: DecoderPolicy
    ) -> None:
        """Tell `choice` what DALI has failed at before. `file`: None where nothing goes on later."""
        self._lines = JsonlFile(file) if file else None
        self._plan, self._policy, self._threads = plan, choice, config.threads
        self._balance: Balance | None = None
        self._rank = int(os.environ.get("RANK", "0"))
        # Speeds that were found under other conditions do not count.
        self._conditions = {
            "device": get_device_name(device),
            "threads": config.threads,
            "dali_threads": choice.dali_threads,
            "clip": [plan.num_frames, *plan.frame_size, plan.views],
        }
        for line in self._mine():
            with suppress(*DAMAGED):
                choice.ban_from_dali(line["kept_from_dali"], int(line["failed_batch"]), int(line["from_batch"]))

    def share(self, clips_per_second: Callable[[ClipPlan, Decoder], float]) -> None:
        """Share the clips by what the run has found before, or is found now."""
        shares = self._found_before()
        if not shares:
            speeds = self._found_now(clips_per_second)
            self._keep({"conditions": self._conditions, "speeds": asdict(speeds)})
            shares = [(0, speeds.share)]
        for since, share in shares:
            self._policy.give_dali(share, since)
        if self._policy.share:
            self._balance = Balance(shares)

    def waited(self, batch: int, for_pyav: float, for_dali: float, following: int) -> None:
        """Tell how many seconds a batch was waited for; batches from `following` on are not begun yet."""
        if self._balance and self._balance.waited(batch, for_pyav, for_dali, following):
            self._policy.give_dali(self._balance.share, following)
            moved = {"share": self._balance.share, "from_batch": following, "batch_size": self._plan.batch_size}
            self._keep({"conditions": self._conditions, **moved})

    def ban_from_dali(self, samples: Sequence[int] | None, failed: int, since: int) -> None:
        """As `choice` is told; for the next time."""
        self._keep({"kept_from_dali": samples, "failed_batch": failed, "from_batch": since})

    def _found_before(self) -> list[tuple[int, float]]:
        """DALI's shares, each with its first batch; none if both decoders are to be timed."""
        shares: list[tuple[int, float]] = []
        for line in self._mine():
            if line.get("conditions") != self._conditions:
                continue
            with suppress(*DAMAGED):
                if "speeds" in line:
                    found = Speeds(*(float(line["speeds"][name]) for name in ("dali", "pyav", "suited")))
                    if 0 < found.suited <= 1 and 0 <= found.dali < math.inf and 0 <= found.pyav < math.inf:
                        shares = [(0, found.share)]
                elif shares and line["batch_size"] == self._plan.batch_size and 0 < float(line["share"]) <= 1:
                    shares.append((int(line["from_batch"]), float(line["share"])))
        return shares

    def _found_now(self, clips_per_second: Callable[[ClipPlan, Decoder], float]) -> Speeds:
        """Each decoder alone on the first clips of the plan."""
        any_clips, suited_clips, suited = timed_plans(self._plan, lambda sample: self._policy.suits(sample) is not None)
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
