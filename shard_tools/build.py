"""Make a dataset from a list of inputs: plan, process videos, write shards, publish; or resume where a run stopped.

The state of a run lies in OUTPUT/.work:

    plan.jsonl                   settings, classes, which source goes into which shard: written first, never changed
    items/<shard>/<key>.json, …  staged results, by the shard that they go into; removed when that is whole
    shards/<name>.json           a shard that is whole, with the rejects among its inputs

so that a run that was killed repeats only what is missing, and ends with the same bytes as one that was not.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from adamae.common.atomic_io import write_text
from adamae.common.errors import InputError
from adamae.common.locks import exclusive_lock
from adamae.pipeline.shards.format import PLAN_FILE, REJECTED_FILE, DatasetInfo, ShardInfo
from adamae.pipeline.shards.read_format import has_dataset_json, read_dataset_info, read_samples
from adamae.shard_tools.inputs import Item, ItemStore, assign_class_ids
from adamae.shard_tools.inputs.item import split_name
from adamae.shard_tools.plan import Plan, make_key, save_plan, shard_number
from adamae.shard_tools.settings import COPY, Settings
from adamae.shard_tools.work import (
    CHANGED,
    Job,
    is_done,
    is_intact,
    make_sample,
    read_staged,
    reject,
    stage,
)
from adamae.shard_tools.write import publish_tables, write_card, write_shard

EMPTY = DatasetInfo(num_samples=0, num_frames=0, num_bytes=0, classes=[], encode={}, shards=[])


class Build:
    """One dataset being made. `part` (i, n): this process works on the videos of shards i, i + n, …

    Where several samples are cut out of a video, they go into any shards: the part that ends last writes all of them.
    """

    def __init__(self, folder: Path, settings: Settings, part: tuple[int, int] = (0, 1)):
        self.folder, self.settings = folder, settings
        self.part, self.num_parts = part
        self.plan_file, self.work_folder = folder / PLAN_FILE, (folder / PLAN_FILE).parent
        self.info = read_if_described(folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second run of the same part out."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be made ({error.strerror}): give another output folder"
            ) from error
        with ExitStack() as stack:
            try:
                stack.enter_context(
                    _passing_lock(self.folder / f".part-{self.part}.lock", wait=False)
                )
            except Timeout:
                raise InputError(
                    f"{self.folder} is locked by another run: wait for it to end"
                ) from None
            yield

    def plan(self, inputs: ItemStore, classes: list[str]) -> Plan | None:
        """Return the plan of an interrupted run, or one for what the dataset lacks of `inputs`; None if it has all."""
        with lock_folder(self.folder):
            self.info = read_if_described(self.folder)  # another part may have completed it
            if not self.plan_file.exists():
                shutil.rmtree(
                    self.work_folder, ignore_errors=True
                )  # of a run that was killed when all was done
                self._save_plan(inputs, classes)
            if not self.plan_file.exists():
                return None
            plan = Plan(self.plan_file)
            self._require_same_settings(plan.settings)
            return plan

    def _require_same_settings(self, then: dict[str, Any]) -> None:
        now = self.settings.to_json()
        names = [
            name for name in sorted(now.keys() | then.keys()) if now.get(name) != then.get(name)
        ]
        if names:
            different = ", ".join(
                f"{name} is {then.get(name)} there and {now.get(name)} now" for name in names
            )
            raise InputError(
                f"{self.folder} was made with other settings ({different}): give another output folder"
            )

    def _save_plan(self, inputs: ItemStore, classes: list[str]) -> None:
        """Write the plan of what is new in `inputs`, if anything is."""
        if self.info.shards:
            self._require_same_settings(self.info.encode)
        known = self.info.classes
        if classes and classes[: len(known)] != known:
            raise InputError(
                f"the label map does not start with the classes of {self.folder}: their ids would change"
            )
        names = classes or assign_class_ids(inputs.labels(), known)
        rejects = set(read_rejects(self.folder))
        if self.settings.clip_seconds:  # pieces stand for their video
            rejects |= {split_name(name)[0] for name in rejects}
        inputs.mark_stored(self._list_stored(), rejects)
        if change := inputs.find_change():  # it would not be stored again
            raise InputError(f"{self.folder} holds {change}: give another output folder")
        if self.settings.encode == COPY and inputs.has_segments:
            raise InputError(
                "--encode copy keeps whole videos, and the input asks for segments: choose another --encode"
            )
        location = getattr(next(inputs.new(), None), "location", None)
        if self.settings.fps is None and isinstance(location, str) and os.path.isdir(location):
            raise InputError(
                f"{location} is a folder of frames, which does not say their rate: give --fps"
            )
        first = max((shard_number(shard.name) for shard in self.info.shards), default=-1) + 1
        save_plan(self.plan_file, inputs, self.settings, names, first)

    def _list_stored(self) -> Iterator[tuple[str, str, tuple[str, ...] | None, int]]:
        """Yield source, segment, labels and bytes of what the dataset holds. Raise InputError if a shard is gone."""
        for shard in self.info.shards:
            path = self.folder / shard.name
            if not path.is_file() or path.stat().st_size != shard.num_bytes:
                raise InputError(
                    f"{path} is missing or incomplete: restore it, or give another output folder"
                )
            for sample in read_samples(self.folder, shard):
                labels = (
                    None
                    if sample.labels is None
                    else tuple(self.info.classes[label] for label in sample.labels)
                )
                for segment in {
                    sample.segment,
                    "" if self.settings.clip_seconds else sample.segment,
                }:
                    yield sample.source, segment, labels, sample.source_size

    def run(
        self,
        plan: Plan,
        inputs: ItemStore,
        run_jobs: Callable[[Iterator[Job]], Iterator[tuple[Job, Any]]],
    ) -> Iterator[Item]:
        """Process this part's videos, write each shard as soon as it can be, and yield what became of each item."""
        num_remaining = dict(plan.shards)
        for job, result in run_jobs(self._make_jobs(plan, inputs)):
            if isinstance(result, OSError):
                raise result
            for stem, planned in job.items.items():
                # What was finished before the worker died or took too long is kept.
                item = read_staged(stem)
                if item is None:
                    item = reject(planned, str(result))
                    stage(item, stem)
                yield item
                num_remaining[item.shard] -= 1
                # A shard of which another part makes some samples does not come to zero here.
                if num_remaining[item.shard] == 0:
                    self._finish_shard(plan, item.shard)

    def _make_jobs(self, plan: Plan, inputs: ItemStore) -> Iterator[Job]:
        for video in self.list_pending(plan):
            for item in video:
                self._folder_of(item.shard).mkdir(parents=True, exist_ok=True)
            items = {self._stem(item): item for item in video}
            yield Job(inputs.location(video[0].source), items, self.settings)

    def _missing(self, plan: Plan) -> set[str]:
        """Return the shards that are not whole yet."""
        return {shard for shard in plan.shards if not self._marker(shard).exists()}

    def list_pending(self, plan: Plan) -> Iterator[list[Item]]:
        """Yield what missing shards need of each of this part's videos."""
        missing = self._missing(plan)
        for video in plan.videos():
            pending = [item for item in video if item.shard in missing]
            if pending and self._part_of(video) == self.part:
                yield pending

    def _part_of(self, video: list[Item]) -> int:
        """Return the part that works on a video: that of its first shard."""
        return shard_number(video[0].shard) % self.num_parts

    def _folder_of(self, shard: str) -> Path:
        """Return where its staged results lie: looking one up takes as long as its folder is full."""
        return self.work_folder / "items" / shard.removesuffix(".tar")

    def _stem(self, item: Item) -> Path:
        return self._folder_of(item.shard) / make_key(item.source, item.segment)

    def _marker(self, shard: str) -> Path:
        return self.work_folder / "shards" / f"{shard}.json"

    def _finish_shard(self, plan: Plan, shard: str) -> None:
        """Write a shard of what is staged for it, and its marker. Raise InputError if something is missing."""
        items = []
        for path in self._folder_of(shard).glob("*.json"):
            item = read_staged(path.with_suffix(""))
            if item is not None:
                items.append(item)
        if len(items) != plan.shards[shard]:
            raise InputError(f"{self.folder} is not complete yet: run the same command again")
        items.sort(key=lambda item: item.position)
        class_ids = {name: number for number, name in enumerate(plan.classes)}
        samples = []
        rejected = {}
        for item in items:
            if not is_intact(item):
                item = reject(item, CHANGED)
            if item.problem is None:
                samples.append(make_sample(item, make_key(item.source, item.segment), class_ids))
            else:
                rejected[item.name] = item.problem
        info = write_shard(self.folder, shard, samples) if samples else None
        self._marker(shard).parent.mkdir(exist_ok=True)
        write_text(
            self._marker(shard),
            json.dumps({"shard": info and asdict(info), "rejected": rejected}) + "\n",
        )
        shutil.rmtree(self._folder_of(shard), ignore_errors=True)

    def finish(self, plan: Plan) -> int | None:
        """Publish the dataset once all parts are done; before that, return one that is not."""
        with lock_folder(self.folder):
            if not self.plan_file.exists():  # another part was here first
                self.info = read_if_described(self.folder)
                return None
            missing = self._missing(plan)
            for video in plan.videos():
                part = self._part_of(video)
                if part != self.part and any(
                    item.shard in missing and not is_done(self._stem(item)) for item in video
                ):
                    return part
            for shard in sorted(missing):
                self._finish_shard(plan, shard)
            self._publish(plan)
            return None

    def _publish(self, plan: Plan) -> None:
        markers = [
            json.loads(self._marker(shard).read_text(encoding="utf-8")) for shard in plan.shards
        ]
        # A run that was killed right after publishing may have put some in already.
        shards = [shard for shard in self.info.shards if shard.name not in plan.shards]
        shards += [ShardInfo(**marker["shard"]) for marker in markers if marker["shard"]]
        rejected = read_rejects(self.folder) | plan.rejected
        for marker in markers:
            rejected |= marker["rejected"]
        if shards:
            known = replace(
                self.info, classes=plan.classes, encode=plan.settings, num_rejected=len(rejected)
            )
            self.info = publish_tables(self.folder, replace(known, shards=shards))
            write_card(self.folder, self.info)
        lines = [
            json.dumps({"source": source, "reason": reason})
            for source, reason in sorted(rejected.items())
        ]
        write_text(self.folder / REJECTED_FILE, "".join(line + "\n" for line in lines))
        for path in self.folder.glob(".*.partial"):  # left by a kill
            path.unlink()
        self.plan_file.unlink()
        shutil.rmtree(self.work_folder)


def read_if_described(folder: Path) -> DatasetInfo:
    """Read `dataset.json`, if there is one."""
    return read_dataset_info(folder) if has_dataset_json(folder) else EMPTY


def list_sources(folder: Path) -> Iterator[str]:
    """Yield the files that a dataset holds or is about to."""
    if (plan := folder / PLAN_FILE).exists():
        yield from (video[0].source for video in Plan(plan).videos())
    for shard in read_if_described(folder).shards:
        yield from (sample.source for sample in read_samples(folder, shard))


def read_rejects(folder: Path) -> dict[str, str]:
    """Read reasons by source from `rejected.jsonl`, without which all are tried again."""
    path = folder / REJECTED_FILE
    if not path.exists():
        return {}
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {entry["source"]: entry["reason"] for entry in entries}
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"{path} is damaged ({error}): restore it, or remove it to retry its videos"
        ) from error


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait for, and hold, the lock on a folder."""
    with _passing_lock(folder / ".lock", wait=True):
        yield


@contextmanager
def _passing_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock, and remove its file from the dataset at the end.

    Whoever waits for a file that has been removed makes a new one, and waits for that.
    """
    with exclusive_lock(path, wait=wait):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
