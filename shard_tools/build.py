"""Make a dataset from a list of inputs, or resume where an interrupted run stopped.

The steps are: plan, process videos, write shards, publish. A resumed run offers all videos of the
incomplete shards to `process_job` (work.py), which skips results that are staged and intact. The
state of a run lies in OUTPUT/.work:

    plan.jsonl                settings, classes, which source goes into which shard; written first,
                              never changed
    items/<shard>/<key>.json  staged results, with their videos, by the shard that they go into;
                              removed when the shard is complete
    shards/<name>.json        a shard that is complete, with the rejects among its inputs

So a run that was killed repeats only what is missing, and ends with the same bytes as one that was
not.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from adamae.common.atomic_io import write_text
from adamae.common.errors import InputError
from adamae.common.locks import exclusive_lock
from adamae.pipeline.reading.storage import StorageError
from adamae.pipeline.shards.format import PLAN_FILE, REJECTED_FILE, DatasetInfo, ShardInfo
from adamae.pipeline.shards.read_format import has_dataset_json, read_dataset_info, read_samples
from adamae.shard_tools.inputs import Item, ItemStore, assign_class_ids
from adamae.shard_tools.inputs.item import split_name
from adamae.shard_tools.plan import Plan, make_key, save_plan, shard_number
from adamae.shard_tools.settings import COPY, Settings
from adamae.shard_tools.work import (
    CHANGED,
    PASSING_REASONS,
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
    """One dataset being made, or a part of it.

    With `part` (i, n), this process works on the videos whose first sample goes into one of the
    shards i, i + n, i + 2n, … The samples that are cut out of one video may go into several shards.
    The part that ends last writes the shards that several parts contribute to.
    """

    def __init__(self, folder: Path, settings: Settings, part: tuple[int, int] = (0, 1)) -> None:
        self.folder = folder
        self.settings = settings
        self.part, self.num_parts = part
        self.plan_file = folder / PLAN_FILE
        self.work_folder = self.plan_file.parent
        self.info = read_info_or_empty(folder)
        # Whether the next plan has rejects that may be usable now. A part does not know whether the
        # other parts, which would have to take part, are still to come.
        self._retries = self.num_parts == 1

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the output folder, and keep a second run of the same part out of it.

        Raise InputError if the folder cannot be made or another run holds the lock.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be made ({error.strerror}): give another output folder"
            ) from error
        path = self.folder / f".part-{self.part}.lock"
        # The stack outlives the `try`: a Timeout that the caller's block raises is not caught here.
        with ExitStack() as stack:
            try:
                stack.enter_context(_passing_lock(path, wait=False))
            except Timeout:
                raise InputError(
                    f"{self.folder} is locked by another run: wait for it to end"
                ) from None
            yield

    def plan(self, inputs: ItemStore, classes: list[str]) -> Plan | None:
        """Return the plan of an interrupted run, or else one for the inputs that are new.

        An input is new if the dataset neither holds nor has rejected it. Return None if none is
        new. Raise InputError if the settings have changed.
        """
        with lock_folder(self.folder):
            # Another part may have completed the dataset since `info` was read.
            self.info = read_info_or_empty(self.folder)
            if not self.plan_file.exists():
                # A run that was killed right after it had published leaves this folder behind.
                shutil.rmtree(self.work_folder, ignore_errors=True)
                self._save_plan(inputs, classes)
            if not self.plan_file.exists():
                return None
            plan = Plan(self.plan_file)
            self._require_same_settings(plan.settings)
            return plan

    def _require_same_settings(self, stored: dict[str, Any]) -> None:
        current = self.settings.to_json()
        differences = []
        for name in sorted(current.keys() | stored.keys()):
            before = stored.get(name)
            now = current.get(name)
            if before != now:
                differences.append(f"{name} is {before} there and {now} now")
        if differences:
            raise InputError(
                f"{self.folder} was made with other settings ({', '.join(differences)}): give"
                " another output folder"
            )

    def _save_plan(self, inputs: ItemStore, classes: list[str]) -> None:
        """Write a plan for the inputs that are new, if there are any.

        Raise InputError if `inputs` contradict the dataset or the settings.
        """
        if self.info.shards:
            self._require_same_settings(self.info.encode)
        stored_classes = self.info.classes
        if classes and classes[: len(stored_classes)] != stored_classes:
            raise InputError(
                f"the label map does not start with the classes of {self.folder}: their ids would"
                " change"
            )
        names = classes or assign_class_ids(inputs.labels(), stored_classes)
        reasons = read_rejects(self.folder)
        inputs.mark_stored(self._list_stored(), self._add_videos(reasons))
        if self._retries:
            retried = [name for name in reasons if reasons[name] in PASSING_REASONS]
            inputs.retry(self._add_videos(retried))
            # Once a command: what fails again would be tried without end.
            self._retries = False
        # A stored video whose size or labels have changed is not new, so it would keep
        # the old ones.
        change = inputs.find_change()
        if change:
            raise InputError(f"{self.folder} holds {change}: give another output folder")
        if self.settings.encode == COPY and inputs.has_segments:
            raise InputError(
                "--encode copy keeps whole videos, and the input asks for segments: choose another"
                " --encode"
            )
        if self.settings.fps is None:
            self._refuse_frame_folders(inputs)
        numbers = [shard_number(shard.name) for shard in self.info.shards]
        save_plan(self.plan_file, inputs, self.settings, names, first=max(numbers, default=-1) + 1)

    def _add_videos(self, names: Iterable[str]) -> set[str]:
        """Return names of rejects: with pieces, a video counts as rejected if one of them was."""
        added = set(names)
        if self.settings.clip_seconds:
            added |= {split_name(name)[0] for name in added}
        return added

    def _refuse_frame_folders(self, inputs: ItemStore) -> None:
        """Raise InputError if `inputs` are folders of frames, which come without a frame rate."""
        # The first item is enough: all items of an input are folders of frames, or none is.
        item = next(inputs.new(), None)
        if item is None or not isinstance(item.location, str):
            return
        if os.path.isdir(item.location):
            raise InputError(
                f"{item.location} is a folder of frames, which does not say their rate: give --fps"
            )

    def _list_stored(self) -> Iterator[tuple[str, str, tuple[str, ...] | None, int]]:
        """Yield source, segment, labels and bytes of each sample of the dataset.

        Raise InputError if a shard is missing or incomplete.
        """
        for shard in self.info.shards:
            path = self.folder / shard.name
            if not path.is_file() or path.stat().st_size != shard.num_bytes:
                raise InputError(
                    f"{path} is missing or incomplete: restore it, or give another output folder"
                )
            for sample in read_samples(self.folder, shard):
                labels = None
                if sample.labels is not None:
                    labels = tuple(self.info.classes[label] for label in sample.labels)
                yield sample.source, sample.segment, labels, sample.source_size
                if self.settings.clip_seconds and sample.segment:
                    # A video counts as stored if one of its pieces is.
                    yield sample.source, "", labels, sample.source_size

    def run(
        self,
        plan: Plan,
        inputs: ItemStore,
        run_jobs: Callable[[Iterator[Job]], Iterator[tuple[Job, Any]]],
    ) -> Iterator[Item]:
        """Process this part's videos and yield each item with its result.

        Each shard is written as soon as all of its items are staged. Raise OSError if the disk
        fails, InputError if object storage does.
        """
        num_remaining = dict(plan.shards)
        for job, result in run_jobs(self._make_jobs(plan, inputs)):
            if isinstance(result, OSError):
                raise result
            if isinstance(result, StorageError):
                raise InputError(
                    f"{result}; what is done is kept: run the same command again, or take this"
                    " video out of the input"
                ) from result
            for stem, planned in job.items.items():
                # Items that were staged before the worker died or took too long are kept. The
                # others are rejected.
                item = read_staged(stem)
                if item is None:
                    item = reject(planned, str(result))
                    stage(item, stem)
                yield item
                num_remaining[item.shard] -= 1
                # The count of a shard that another part contributes to does not reach 0 here.
                if num_remaining[item.shard] == 0:
                    self._finish_shard(plan, item.shard)

    def _make_jobs(self, plan: Plan, inputs: ItemStore) -> Iterator[Job]:
        for video in self.list_pending(plan):
            for item in video:
                self._folder_of(item.shard).mkdir(parents=True, exist_ok=True)
            items = {self._stem(item): item for item in video}
            yield Job(inputs.location(video[0].source), items, self.settings)

    def _missing(self, plan: Plan) -> set[str]:
        """Return the names of the shards that are not complete yet."""
        return {shard for shard in plan.shards if not self._marker(shard).exists()}

    def list_pending(self, plan: Plan) -> Iterator[list[Item]]:
        """Yield, of each of this part's videos, the items that go into missing shards."""
        missing = self._missing(plan)
        for video in plan.videos():
            pending = [item for item in video if item.shard in missing]
            if pending and self._part_of(video) == self.part:
                yield pending

    def _part_of(self, video: list[Item]) -> int:
        """Return the part that works on a video: the one of its first shard."""
        return shard_number(video[0].shard) % self.num_parts

    def _folder_of(self, shard: str) -> Path:
        """Return the folder of a shard's staged results.

        Each shard has its own folder: the more files a folder holds, the longer a lookup takes.
        """
        return self.work_folder / "items" / shard.removesuffix(".tar")

    def _stem(self, item: Item) -> Path:
        """Return the path of an item's staged result, without extension."""
        return self._folder_of(item.shard) / make_key(item.source, item.segment)

    def _marker(self, shard: str) -> Path:
        """Return the path of the file that exists once a shard is complete."""
        return self.work_folder / "shards" / f"{shard}.json"

    def _finish_shard(self, plan: Plan, shard: str) -> None:
        """Write a shard from its staged results, then its marker, and remove the results.

        Raise InputError if a result is missing.
        """
        items = []
        for path in self._folder_of(shard).glob("*.json"):
            item = read_staged(path.with_suffix(""))
            if item is not None:
                items.append(item)
        if len(items) != plan.shards[shard]:
            raise InputError(f"{self.folder} is not complete yet: run the same command again")
        items.sort(key=lambda item: item.position)
        class_ids = {name: index for index, name in enumerate(plan.classes)}
        samples = []
        rejected = {}
        for item in items:
            if not is_intact(item):
                item = reject(item, CHANGED)
            if item.problem is None:
                samples.append(make_sample(item, make_key(item.source, item.segment), class_ids))
            else:
                rejected[item.name] = item.problem
        # A shard without any usable video is complete without a file.
        info = None
        if samples:
            info = asdict(write_shard(self.folder, shard, samples))
        self._marker(shard).parent.mkdir(exist_ok=True)
        write_text(self._marker(shard), json.dumps({"shard": info, "rejected": rejected}) + "\n")
        shutil.rmtree(self._folder_of(shard), ignore_errors=True)

    def finish(self, plan: Plan) -> int | None:
        """Publish the dataset if all parts are done, else return the number of one that is not."""
        with lock_folder(self.folder):
            if not self.plan_file.exists():
                # Another part has published the dataset.
                self.info = read_info_or_empty(self.folder)
                return None
            missing = self._missing(plan)
            for video in plan.videos():
                part = self._part_of(video)
                # This part's own videos are done.
                if part == self.part:
                    continue
                for item in video:
                    if item.shard in missing and not is_done(self._stem(item)):
                        return part
            for shard in sorted(missing):
                self._finish_shard(plan, shard)
            self._publish(plan)
            return None

    def _publish(self, plan: Plan) -> None:
        """Add the planned shards to the dataset, and remove the state of the run."""
        # A run that was killed right after publishing may have added planned shards already.
        shards = [shard for shard in self.info.shards if shard.name not in plan.shards]
        rejected = read_rejects(self.folder) | plan.rejected
        for video in plan.videos():
            for item in video:
                # It may have been rejected by an earlier run.
                rejected.pop(item.name, None)
        for name in plan.shards:
            marker = json.loads(self._marker(name).read_text(encoding="utf-8"))
            rejected |= marker["rejected"]
            if marker["shard"]:
                shards.append(ShardInfo(**marker["shard"]))
        if shards:
            info = replace(
                self.info,
                classes=plan.classes,
                encode=plan.settings,
                num_rejected=len(rejected),
                shards=shards,
            )
            self.info = publish_tables(self.folder, info)
            write_card(self.folder, self.info)
        lines = []
        for source, reason in sorted(rejected.items()):
            lines.append(json.dumps({"source": source, "reason": reason}) + "\n")
        write_text(self.folder / REJECTED_FILE, "".join(lines))
        # Remove the files that a killed run was writing.
        for path in self.folder.glob(".*.partial"):
            path.unlink()
        # While the plan is there, the run can be repeated, so it stays until all is published.
        self.plan_file.unlink()
        shutil.rmtree(self.work_folder)


def read_info_or_empty(folder: Path) -> DatasetInfo:
    """Read `dataset.json`; return EMPTY if the folder has none."""
    return read_dataset_info(folder) if has_dataset_json(folder) else EMPTY


def list_sources(folder: Path) -> Iterator[str]:
    """Yield the sources of all samples that a dataset holds or is about to hold."""
    plan_file = folder / PLAN_FILE
    if plan_file.exists():
        for video in Plan(plan_file).videos():
            yield video[0].source
    for shard in read_info_or_empty(folder).shards:
        for sample in read_samples(folder, shard):
            yield sample.source


def read_rejects(folder: Path) -> dict[str, str]:
    """Read the reasons by source from `rejected.jsonl`.

    Return {} if there is no such file: a user who removes it has its videos tried again. Raise
    InputError if it is damaged.
    """
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

    A process that was waiting for the removed file makes a new one, and waits for its lock.
    """
    with exclusive_lock(path, wait=wait):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
