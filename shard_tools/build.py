"""Make a dataset out of a list of inputs: plan, work, shards, report; go on where an earlier run stopped.

While a run is under way its state lies in OUTPUT/.work:

    plan.json            the settings, the classes, and which source goes into which shard: written first, never changed
    items/<n>.json, ...  staged results, removed when their shard is whole
    shards/<name>.json   a shard that is whole, with the rejects among its inputs

so that a run that was killed redoes only what is missing, and ends with the same bytes as one that was not.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from durable import write_text
from errors import InputError
from pipeline.shards import DATASET_FILE, REJECTED_FILE, DatasetInfo, ShardInfo, read_dataset_info, read_samples
from shard_tools.inputs import Item, class_names
from shard_tools.layout import assign
from shard_tools.report import describe
from shard_tools.settings import Settings
from shard_tools.work import Job, Outcome, load_outcome
from shard_tools.workers import Failed
from shard_tools.write import write_shard

WORK_FOLDER = ".work"


class Runner(Protocol):
    """Something that applies `work` to jobs: processes here, or a cluster."""

    def run(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Any]]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Which source goes into which shard; `shards` maps a shard's name to its (source, label id) pairs in order."""

    settings: dict[str, Any]
    classes: list[str]
    shards: dict[str, list[tuple[str, int | None]]]
    rejected: dict[str, str]  # sources that are known to be unusable, with the reason
    retries: bool = False  # whether it tries again what was rejected before

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Plan":
        value = json.loads(path.read_text(encoding="utf-8"))
        shards = {name: [(source, label) for source, label in pairs] for name, pairs in value.pop("shards").items()}
        return cls(shards=shards, **value)


class Build:
    """One dataset folder being made. `part` (i, n): of the plan's shards this process makes number i, i + n, …"""

    def __init__(self, folder: Path, settings: Settings, part: tuple[int, int] = (0, 1)):
        self.folder = folder
        self.settings = settings
        self.part = part
        self.work_folder = folder / WORK_FOLDER
        self.plan_file = self.work_folder / "plan.json"
        self.done: DatasetInfo | None = read_dataset_info(folder) if (folder / DATASET_FILE).exists() else None
        self._refuse_other_settings()

    def _refuse_other_settings(self) -> None:
        theirs = self.done.encode if self.done else None
        if self.plan_file.exists():
            theirs = Plan.load(self.plan_file).settings
        ours = self.settings.to_json()
        if theirs is None or theirs == ours:
            return
        names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
        different = ", ".join(f"{name} is {theirs.get(name)} there and {ours.get(name)} now" for name in names)
        raise InputError(f"{self.folder} was made with other settings ({different}): give another output folder")

    def plan(self, items: Sequence[Item], classes: list[str], retry_rejects: bool) -> Plan | None:
        """The plan of a run that was interrupted, or one for the items that the dataset lacks; None if it holds all."""
        with locked_folder(self.folder):
            if self.plan_file.exists():
                return Plan.load(self.plan_file)
            shutil.rmtree(self.work_folder, ignore_errors=True)  # left by a run that was killed when all was done
            return self._new_plan(items, classes, retry_rejects)

    def _new_plan(self, items: Sequence[Item], classes: list[str], retry_rejects: bool) -> Plan | None:
        known = set() if self.done is None else self._sources(retry_rejects)
        new = [item for item in items if item.source not in known]
        if not new:
            return None
        known_classes = self.done.classes if self.done else []
        if classes and classes[: len(known_classes)] != known_classes:
            raise InputError(f"the label map does not begin with the classes of {self.folder}: their ids would change")
        names = class_names(items, classes or known_classes)
        if classes and names != classes:
            new = [_with_known_label(item, classes) for item in new]
            names = classes
        ids = {name: identity for identity, name in enumerate(names)}
        usable = [item for item in new if item.problem is None]
        first = 1 + max((int(shard.name[6:-4]) for shard in self.done.shards), default=-1) if self.done else 0
        shards = {
            f"shard-{number:06d}.tar": [
                (item.source, None if item.label is None else ids[item.label]) for item in group
            ]
            for number, group in enumerate(assign(usable, self.settings), first)
        }
        rejected = {item.source: item.problem for item in new if item.problem is not None}
        plan = Plan(self.settings.to_json(), names, shards, rejected, retry_rejects)
        (self.work_folder / "items").mkdir(parents=True, exist_ok=True)
        (self.work_folder / "shards").mkdir(exist_ok=True)
        plan.save(self.plan_file)
        return plan

    def _sources(self, retry_rejects: bool) -> set[str]:
        assert self.done is not None
        sources = {sample.source for shard in self.done.shards for sample in read_samples(self.folder, shard)}
        return sources if retry_rejects else sources | set(read_rejects(self.folder))

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

    def run(self, plan: Plan, items: Sequence[Item], runner: Runner, progress: Callable[[Outcome], None]) -> None:
        """Make this part's missing shards, each as soon as its inputs are done. Raises OSError when the disk fails."""
        locations = {item.source: item.location for item in items}
        missing = self._missing(plan)
        waiting = {name: len(plan.shards[name]) for name in missing}
        shard_of = {self._stem(name, i): name for name in missing for i in range(len(plan.shards[name]))}

        def finish(stem: Path, outcome: Outcome) -> None:
            progress(outcome)
            name = shard_of[stem]
            waiting[name] -= 1
            if not waiting[name]:
                self._finish_shard(plan, name)

        def jobs() -> Iterator[Job]:
            for stem, name in shard_of.items():
                source, label = plan.shards[name][int(stem.name.rpartition("-")[2])]
                staged = load_outcome(stem)
                if staged is None and source not in locations:
                    staged = Outcome(source, [], "it was there when the run began, and is gone now")
                    staged.save(stem)
                if staged is not None:
                    finish(stem, staged)
                else:
                    yield Job(source, locations[source], label, stem, self.settings)

        for job, result in runner.run(jobs()):
            if isinstance(result, OSError):
                raise result
            if isinstance(result, Failed):
                result = Outcome(job.source, [], result.reason)
                result.save(job.stem)
            finish(job.stem, result)

    def _missing(self, plan: Plan) -> list[str]:
        """The shards of this part that are not whole yet."""
        mine = [name for number, name in enumerate(plan.shards) if number % self.part[1] == self.part[0]]
        return [name for name in mine if not self._marker(name).exists()]

    def num_missing(self, plan: Plan) -> int:
        """How many inputs `run` will have to see to."""
        return sum(len(plan.shards[name]) for name in self._missing(plan))

    def _stem(self, name: str, number: int) -> Path:
        return self.work_folder / "items" / f"{name.removesuffix('.tar')}-{number:06d}"

    def _marker(self, name: str) -> Path:
        return self.work_folder / "shards" / f"{name}.json"

    def _finish_shard(self, plan: Plan, name: str) -> None:
        stems = [self._stem(name, number) for number in range(len(plan.shards[name]))]
        sources = [source for source, _ in plan.shards[name]]
        changed = "it was changed while it was read"  # a copied video is read again here
        outcomes = [
            load_outcome(stem) or Outcome(source, [], changed) for stem, source in zip(stems, sources, strict=True)
        ]
        samples = [sample for outcome in outcomes for sample in outcome.samples]
        info = write_shard(self.folder, name, samples) if samples else None
        rejected = {outcome.source: outcome.reason for outcome in outcomes if outcome.reason is not None}
        marker = {"shard": info and asdict(info), "rejected": rejected}
        write_text(self._marker(name), json.dumps(marker) + "\n")
        for stem in stems:
            for path in stem.parent.glob(f"{stem.name}[-.]*"):
                path.unlink()

    def finish(self, plan: Plan) -> bool:
        """Write `rejected.jsonl` and `dataset.json` once all parts' shards are whole; False while some are missing."""
        with locked_folder(self.folder):
            if not self.plan_file.exists():  # another part was here first
                self.done = read_dataset_info(self.folder) if (self.folder / DATASET_FILE).exists() else None
                return True
            if not all(self._marker(name).exists() for name in plan.shards):
                return False
            self._finish(plan)
            return True

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
            samples = [sample for shard in shards for sample in read_samples(self.folder, shard)]
            info = describe(samples, shards, plan.classes, plan.settings, len(rejected))
            write_text(self.folder / DATASET_FILE, json.dumps(info.to_json(), indent=2) + "\n")
            self.done = info
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


def _with_known_label(item: Item, classes: list[str]) -> Item:
    if item.problem or item.label is None or item.label in classes:
        return item
    return Item(item.source, item.location, problem=f"its label {item.label!r} is not in the label map")


def read_rejects(folder: Path) -> dict[str, str]:
    """Reasons by source, from `rejected.jsonl`; empty where there is none."""
    path = folder / REJECTED_FILE
    if not path.exists():
        return {}
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {entry["source"]: entry["reason"] for entry in entries}
