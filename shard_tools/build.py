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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from durable import write_text
from errors import InputError
from pipeline.shards import (
    REJECTED_FILE,
    DatasetInfo,
    Sample,
    ShardInfo,
    is_described,
    read_dataset_info,
    read_samples,
)
from shard_tools.destination import WORK_FOLDER, Folder
from shard_tools.inputs import Item, class_names, is_id
from shard_tools.layout import KEY_DIGITS, assign
from shard_tools.plan import Entry, Plan, in_pieces
from shard_tools.report import describe
from shard_tools.settings import Settings
from shard_tools.tables import publish
from shard_tools.work import Job, Outcome, load_outcome
from shard_tools.workers import Failed
from shard_tools.write import ChangedError, write_shard


class Runner(Protocol):
    """Something that applies `work` to jobs: processes here, or a cluster."""

    def run(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Any]]: ...


class Build:
    """One dataset folder being made. `part` (i, n): this process works on the videos of shards i, i + n, …

    A video that is split belongs to the part of its first piece. A shard whose videos belong to several parts is put
    together by the part that ends last.
    """

    def __init__(
        self, folder: Path, settings: Settings, part: tuple[int, int] = (0, 1), destination: Folder | None = None
    ):
        """`destination`: where what is made in `folder` goes; it stays there otherwise."""
        self.folder = folder
        self.destination = destination or Folder(folder)
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

    def plan(self, items: Sequence[Item], classes: list[str], retry_rejects: bool) -> Plan | None:
        """The plan of a run that was interrupted, or one for the items that the dataset lacks; None if it holds all."""
        with locked_folder(self.folder):
            if self.plan_file.exists():
                plan = Plan.load(self.plan_file, self.part)
                self._refuse_collisions(plan, ())
                return plan
            shutil.rmtree(self.work_folder, ignore_errors=True)  # left by a run that was killed when all was done
            return self._new_plan(items, classes, retry_rejects)

    def _new_plan(self, items: Sequence[Item], classes: list[str], retry_rejects: bool) -> Plan | None:
        known_classes = self.done.classes if self.done else []
        if classes and classes[: len(known_classes)] != known_classes:
            raise InputError(f"the label map does not begin with the classes of {self.folder}: their ids would change")
        names = class_names(items, classes or known_classes)
        if classes and names != classes:
            items = [_with_known_label(item, classes) for item in items]
            names = classes
        known = self._stored_unchanged(items) | (set() if retry_rejects else read_rejects(self.folder).keys())
        new = [item for item in items if item.source not in known]
        if not new:
            return None
        ids = {name: identity for identity, name in enumerate(names)}
        usable = [item for item in new if item.problem is None]
        first = 1 + max((int(shard.name[6:-4]) for shard in self.done.shards), default=-1) if self.done else 0
        shards = {
            f"shard-{number:06d}.tar": [
                Entry(item.source, None if item.label is None else ids[item.label], item.piece) for item in group
            ]
            for number, group in enumerate(assign(in_pieces(usable, self.settings.max_seconds), self.settings), first)
        }
        rejected = {item.source: item.problem for item in new if item.problem is not None}
        plan = Plan(self.settings.to_json(), names, shards, rejected, retry_rejects, KEY_DIGITS)
        self._refuse_collisions(plan, self._stored())
        (self.work_folder / "items").mkdir(parents=True, exist_ok=True)
        (self.work_folder / "shards").mkdir(exist_ok=True)
        plan.save(self.plan_file)
        return plan if self.part[1] == 1 else Plan.load(self.plan_file, self.part)

    def _refuse_collisions(self, plan: Plan, stored: Iterable[Sample]) -> None:
        """Raises InputError if two videos would have the same key: of one of them nothing would ever be staged."""
        owners: dict[str, str] = {}
        for source in plan.places:
            key = plan.key(source)
            self._refuse_collision(plan, key, owners.setdefault(key, source), source)
        in_pieces = self.settings.max_seconds is not None
        for sample in stored:
            key = sample.key.rpartition("-")[0] if in_pieces else sample.key
            self._refuse_collision(plan, key, sample.source, owners.get(key, sample.source))

    def _refuse_collision(self, plan: Plan, key: str, other: str, source: str) -> None:
        if other != source:
            what_to_do = "rename one of them"
            if plan.key_digits != KEY_DIGITS:
                what_to_do = f"remove {self.work_folder}, planned by an earlier version, and start again"
            raise InputError(f"{other} and {source} would have the same key {key} in {self.folder}: {what_to_do}")

    def _stored(self) -> Iterator[Sample]:
        """All samples that the dataset holds. Raises InputError if a shard of it is gone."""
        for shard in self.done.shards if self.done else []:
            if self.destination.size_of(shard.name) != shard.num_bytes:
                where = self.destination.place_of(shard.name)
                raise InputError(f"{where} is missing or not whole: put it back, or give another output folder")
            yield from read_samples(self.folder, shard)

    def _stored_unchanged(self, items: Sequence[Item]) -> set[str]:
        """The sources of those items that the dataset holds.

        Raises InputError if one is not what it was when it was stored: it would not be stored again.
        """
        known = self.done.classes if self.done else []
        by_source = {item.source: item for item in items}
        stored: set[str] = set()
        labels: dict[str, str] = {}
        sizes: dict[str, str] = {}
        for sample in self._stored():
            item = by_source.get(sample.source)
            if item is None:
                continue
            stored.add(item.source)
            label = None if sample.label is None else known[sample.label]
            if not item.problem and label != item.label:
                labels[item.source] = f"{item.source}, {label!r} there and {item.label!r} in the input"
            if not item.problem and item.size and sample.source_size and item.size != sample.source_size:
                sizes[item.source] = f"{item.source}, {sample.source_size} bytes then and {item.size} now"
        for what, found in (("have another label now", labels), ("have changed since they were stored", sizes)):
            if found:
                first = found[min(found)]
                raise InputError(
                    f"{len(found)} videos of {self.folder} {what} (the first: {first}): give another output folder"
                )
        return stored

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
        """Work on this part's videos, and make a shard as soon as it can be. Raises OSError when the disk fails."""
        locations = {item.source: item.location for item in items}
        waiting = {
            name: set(plan.sources(name))
            for name in self._missing(plan)
            if plan.parts_of(name, self.part[1]) == {self.part[0]}
        }

        def finish(outcome: Outcome) -> None:
            progress(outcome)
            for name in dict.fromkeys(plan.places[outcome.source]):
                if name in waiting:
                    waiting[name].discard(outcome.source)
                    if not waiting[name]:
                        self._finish_shard(plan, name)

        def jobs() -> Iterator[Job]:
            missing = set(self._missing(plan))
            for source, label in self._unfinished(plan).items():
                stem = self._stem(plan, source)
                staged = self._staged(plan, source, missing)
                stem.parent.mkdir(exist_ok=True)
                if staged is None and source not in locations:
                    staged = Outcome(source, [], "it was there when the run began, and is gone now")
                    staged.save(stem)
                if staged is not None:
                    finish(staged)
                else:
                    yield Job(source, locations[source], label, stem, self.settings)

        for job, result in runner.run(jobs()):
            if isinstance(result, OSError):
                raise result
            if isinstance(result, Failed):
                result = Outcome(job.source, [], result.reason)
                result.save(job.stem)
            finish(result)

    def _missing(self, plan: Plan) -> list[str]:
        """The shards that are not whole yet."""
        return [name for name in plan.shards if not self._marker(name).exists()]

    def _unfinished(self, plan: Plan) -> dict[str, int | None]:
        """This part's videos of which a shard still needs something, with their labels, in the order of the shards."""
        part, num_parts = self.part
        entries = (entry for name in self._missing(plan) for entry in plan.shards[name])
        return {entry.source: entry.label for entry in entries if plan.part_of(entry.source, num_parts) == part}

    def num_missing(self, plan: Plan) -> int:
        """How many inputs `run` will have to see to."""
        return len(self._unfinished(plan))

    def _staged(self, plan: Plan, source: str, shards: set[str]) -> Outcome | None:
        """What was made of a video earlier, if all that these shards need of it is there."""
        return load_outcome(self._stem(plan, source), lambda piece: plan.shard_of(source, piece) in shards)

    def _stem(self, plan: Plan, source: str) -> Path:
        # A folder of its own for each shard: what is staged is looked for by name, in as long as its folder is full.
        return self.work_folder / "items" / plan.places[source][0].removesuffix(".tar") / plan.key(source)

    def _marker(self, name: str) -> Path:
        return self.work_folder / "shards" / f"{name}.json"

    def _finish_shard(self, plan: Plan, name: str) -> None:
        changed = "it was changed while it was read"  # a copied video is read again here
        outcomes: dict[str, Outcome] = {}
        for source in plan.sources(name):
            outcomes[source] = self._staged(plan, source, {name}) or Outcome(source, [], changed)
        samples = [
            sample
            for entry in plan.shards[name]
            for piece, sample in enumerate(outcomes[entry.source].samples)
            if plan.entry_of(entry.source, piece) == entry.piece
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
            if all(self._marker(other).exists() for other in plan.places[source]):
                stem = self._stem(plan, source)
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
        missing = (source for source in plan.sources(name) if not self._staged(plan, source, {name}))
        return next((plan.part_of(source, self.part[1]) for source in missing), None)

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


def _with_known_label(item: Item, classes: list[str]) -> Item:
    """Under a label map, a label is a name of it, or a number of one."""
    if item.problem or item.label is None or item.label in classes:
        return item
    if is_id(item.label) and int(item.label) < len(classes):
        return replace(item, label=classes[int(item.label)])
    return Item(item.source, item.location, problem=f"its label {item.label!r} is not in the label map")


def read_rejects(folder: Path) -> dict[str, str]:
    """Reasons by source, from `rejected.jsonl`; empty where there is none. Raises InputError where it is damaged."""
    path = folder / REJECTED_FILE
    if not path.exists():
        return {}
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {entry["source"]: entry["reason"] for entry in entries}
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"{path} is damaged ({error}): put it back, or remove it to have its videos tried again"
        ) from error
