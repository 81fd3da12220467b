"""Make a dataset out of a list of inputs: plan, work, shards, report; go on where an earlier run stopped.

While a run is under way its state lies in OUTPUT/.work:

    plan.json                    settings, classes, which source goes into which shard: written first, never changed
    items/<shard>/<key>.json, …  staged results, by the first shard that they go into; removed when all are whole
    shards/<name>.json           a shard that is whole, with the rejects among its inputs

so that a run that was killed redoes only what is missing, and ends with the same bytes as one that was not.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.atomic_io import write_text
from common.errors import InputError
from pipeline.shards.format import (
    REJECTED_FILE,
    DatasetInfo,
    Sample,
    ShardInfo,
    is_described,
    read_dataset_info,
    read_samples,
)
from shard_tools.inputs import Inputs
from shard_tools.layout import KEY_DIGITS
from shard_tools.new_plan import Planning, read_rejects, refuse_collisions
from shard_tools.output import WORK_FOLDER, LocalOutput
from shard_tools.plan import Plan
from shard_tools.report import describe
from shard_tools.settings import Settings
from shard_tools.tables import publish
from shard_tools.work import Job, Outcome, load_outcome
from shard_tools.workers import Failed
from shard_tools.write import ChangedError, write_shard

RunJobs = Callable[[Iterator[Job]], Iterator[tuple[Job, Any]]]


class Build:
    """One dataset folder being made. `part` (i, n): this process works on the videos of shards i, i + n, …

    A video that is split belongs to the part of its first piece. A shard whose videos belong to several parts is put
    together by the part that ends last.
    """

    def __init__(
        self, folder: Path, settings: Settings, part: tuple[int, int] = (0, 1), destination: LocalOutput | None = None
    ):
        """`destination`: where what is made in `folder` goes; it stays there otherwise."""
        self.folder = folder
        self.destination = destination or LocalOutput(folder)
        self.settings = settings
        self.part = part
        self.work_folder = folder / WORK_FOLDER
        self.plan_file = self.work_folder / "plan.json"
        self.done: DatasetInfo | None = read_dataset_info(folder) if is_described(folder) else None
        self._refuse_other_settings()

    def _refuse_other_settings(self) -> None:
        theirs = self.done.encode if self.done else None
        if self.plan_file.exists():
            theirs = Plan.load(self.plan_file, self.part).settings
        ours = self.settings.to_json()
        if theirs is None or theirs == ours:
            return
        names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
        different = ", ".join(f"{name} is {theirs.get(name)} there and {ours.get(name)} now" for name in names)
        where = self.destination.place_of()
        raise InputError(f"{where} was made with other settings ({different}): give another output folder")

    def plan(self, inputs: Inputs, classes: list[str], retry_rejects: bool) -> Plan | None:
        """The plan of a run that was interrupted, or one for the items that the dataset lacks; None if it holds all."""
        with locked_folder(self.folder):
            if not self.plan_file.exists():
                shutil.rmtree(self.work_folder, ignore_errors=True)  # left by a run that was killed when all was done
                planning = Planning(self.destination, self.settings, self.done, self._stored)
                if not planning.save(inputs, classes, retry_rejects, self.plan_file):
                    return None
            plan = Plan.load(self.plan_file, self.part)
            if plan.key_digits != KEY_DIGITS:  # planned by an earlier version, which did not look
                new = ((plan.key(source), source) for name in plan.shards for source in plan.sources(name))
                what_to_do = f"remove {self.work_folder}, planned by an earlier version, and start again"
                refuse_collisions(new, (), self.destination.place_of(), what_to_do)
            return plan

    def _stored(self) -> Iterator[Sample]:
        """All samples that the dataset holds. Raises InputError if a shard of it is gone."""
        for shard in self.done.shards if self.done else []:
            if self.destination.size_of(shard.name) != shard.num_bytes:
                where = self.destination.place_of(shard.name)
                raise InputError(f"{where} is missing or not whole: put it back, or give another output folder")
            yield from read_samples(self.folder, shard)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run of the same part out."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be made ({error.strerror}): give another output folder") from error
        path = self.folder / f".part-{self.part[0]}.lock"
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"another run is making {self.folder}: wait for it to end") from None
            try:
                yield
            finally:
                path.unlink()

    def run(self, plan: Plan, inputs: Inputs, run_jobs: RunJobs, progress: Callable[[Outcome], None]) -> None:
        """Work on this part's videos, and make a shard as soon as it can be. Raises OSError when the disk fails.

        Memory holds the videos of shards that are begun; where videos are split, of all.
        """
        missing = set(self._missing(plan))
        waiting: dict[str, set[str]] = {}

        def reach(name: str) -> None:
            if name not in waiting and plan.parts_of(name, self.part[1]) == {self.part[0]}:
                waiting[name] = set(plan.sources(name))

        def finish(outcome: Outcome, shards: list[str]) -> None:
            progress(outcome)
            for name in dict.fromkeys(shards):
                if name in waiting:
                    waiting[name].discard(outcome.source)
                    if not waiting[name]:
                        del waiting[name]
                        self._finish_shard(plan, name)

        def jobs() -> Iterator[Job]:
            for name, source, label in self._unfinished(plan):
                reach(name)
                stem, shards = self._stem(plan, source, name), plan.places_of(source, name)
                staged = self._staged(plan, source, name, missing)
                stem.parent.mkdir(exist_ok=True)
                if staged is None:
                    location = inputs.location(source)
                    if location is not None:
                        yield Job(source, location, label, stem, self.settings)
                        continue
                    staged = Outcome(source, [], "it was there when the run began, and is gone now")
                    staged.save(stem)
                finish(staged, shards)

        if plan.splits:  # a piece may be made before its shard is reached
            for name in self._missing(plan):
                reach(name)
        for job, result in run_jobs(jobs()):
            if isinstance(result, OSError):
                raise result
            if isinstance(result, Failed):
                result = Outcome(job.source, [], result.reason)
                result.save(job.stem)
            finish(result, plan.places_of(job.source, f"{job.stem.parent.name}.tar"))

    def _missing(self, plan: Plan) -> list[str]:
        """The shards that are not whole yet."""
        return [name for name in plan.shards if not self._marker(name).exists()]

    def _unfinished(self, plan: Plan) -> Iterator[tuple[str, str, int | None]]:
        """This part's videos of which a shard still needs something: (that shard, source, label), each source once."""
        part, num_parts = self.part
        seen: set[str] = set()  # of videos in pieces
        for name in self._missing(plan):
            if part not in plan.parts_of(name, num_parts):
                continue
            for entry in plan.shards[name]:
                if not plan.splits:
                    yield name, entry.source, entry.label
                elif entry.source not in seen and plan.part_of(entry.source, name, num_parts) == part:
                    seen.add(entry.source)
                    yield name, entry.source, entry.label

    def num_missing(self, plan: Plan) -> int:
        """How many inputs `run` will have to see to."""
        return sum(1 for _ in self._unfinished(plan))

    def _staged(self, plan: Plan, source: str, shard: str, shards: set[str]) -> Outcome | None:
        """What was made earlier of a video that goes into `shard`, if all that `shards` need of it is there."""
        stem = self._stem(plan, source, shard)
        return load_outcome(stem, lambda piece: plan.shard_of(source, shard, piece) in shards)

    def _stem(self, plan: Plan, source: str, shard: str) -> Path:
        # A folder of its own for each shard: what is staged is looked for by name, in as long as its folder is full.
        first = plan.places_of(source, shard)[0]
        return self.work_folder / "items" / first.removesuffix(".tar") / plan.key(source)

    def _marker(self, name: str) -> Path:
        return self.work_folder / "shards" / f"{name}.json"

    def _finish_shard(self, plan: Plan, name: str) -> None:
        changed = "it was changed while it was read"  # a copied video is read again here
        outcomes: dict[str, Outcome] = {}
        for source in plan.sources(name):
            outcomes[source] = self._staged(plan, source, name, {name}) or Outcome(source, [], changed)
        samples = [
            sample
            for entry in plan.shards[name]
            for piece, sample in enumerate(outcomes[entry.source].samples)
            if plan.entry_of(entry.source, name, piece) == entry.piece
        ]
        try:
            info = write_shard(self.folder, name, samples) if samples else None
        except ChangedError:  # since it was looked at above, where it is found out this time
            self._finish_shard(plan, name)
            return
        rejected = {outcome.source: outcome.reason for outcome in outcomes.values() if outcome.reason is not None}
        marker = {"shard": info and asdict(info), "rejected": rejected}
        write_text(self._marker(name), json.dumps(marker) + "\n")
        if info is not None:
            self.destination.send(info)
        staging = self.work_folder / "items"
        for path in [path for _, path in samples if staging in path.parents]:
            path.unlink(missing_ok=True)
        for source in outcomes:
            if all(self._marker(other).exists() for other in plan.places_of(source, name)):
                stem = self._stem(plan, source, name)
                for path in stem.parent.glob(f"{stem.name}[-.]*"):
                    path.unlink(missing_ok=True)

    def finish(self, plan: Plan) -> int | None:
        """Write `rejected.jsonl` and `dataset.json` once all parts are done; before that, give one that is not."""
        with locked_folder(self.folder):
            if not self.plan_file.exists():  # another part was here first
                self.done = read_dataset_info(self.folder) if is_described(self.folder) else None
                return None
            for name in self._missing(plan):
                late = self._late_part(plan, name)
                if late == self.part[0]:
                    raise InputError(f"{self.folder / name} is not whole yet: start the same command again")
                if late is not None:
                    return late
                self._finish_shard(plan, name)
            self._finish(plan)
            return None

    def _late_part(self, plan: Plan, name: str) -> int | None:
        """A part that has to do something yet before a missing shard can be made here."""
        parts = plan.parts_of(name, self.part[1])
        if len(parts) == 1:
            return parts.pop()  # which makes it by itself
        missing = (source for source in plan.sources(name) if not self._staged(plan, source, name, {name}))
        return next((plan.part_of(source, name, self.part[1]) for source in missing), None)

    def _finish(self, plan: Plan) -> None:
        markers = [json.loads(self._marker(name).read_text(encoding="utf-8")) for name in plan.shards]
        # Some may be in there already: an earlier run may have been killed right after writing it.
        shards = [shard for shard in (self.done.shards if self.done else []) if shard.name not in plan.shards]
        shards += [ShardInfo(**marker["shard"]) for marker in markers if marker["shard"]]
        rejected = {} if plan.retries else read_rejects(self.folder)
        rejected |= plan.rejected
        for marker in markers:
            rejected |= marker["rejected"]
        lines = [json.dumps({"source": source, "reason": reason}) for source, reason in sorted(rejected.items())]
        write_text(self.folder / REJECTED_FILE, "".join(line + "\n" for line in lines))
        if shards:
            samples = (sample for shard in shards for sample in read_samples(self.folder, shard))
            info = describe(samples, shards, plan.classes, plan.settings, len(rejected))
            self.done = publish(self.folder, info)
        self.destination.publish(self.done if shards else None)
        for path in self.folder.glob(".*.partial"):  # left by a kill
            path.unlink()
        self.plan_file.unlink()
        shutil.rmtree(self.work_folder)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Wait for, and hold, the lock on a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
