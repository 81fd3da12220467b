"""Make a dataset from a list of inputs: plan, process videos, write shards, publish; or resume where a run stopped.

The state of a run lies in OUTPUT/.work:

    plan.jsonl                   settings, classes, which source goes into which shard: written first, never changed
    items/<shard>/<key>.json, …  staged results, by the first shard that they go into; removed when all are whole
    shards/<name>.json           a shard that is whole, with the rejects among its inputs

so that a run that was killed repeats only what is missing, and ends with the same bytes as one that was not.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from common.atomic_io import write_text
from common.errors import InputError
from pipeline.shards.format import REJECTED_FILE, Sample, ShardInfo, is_described, read_dataset_info, read_samples
from shard_tools.inputs import Inputs, assign_class_ids
from shard_tools.output import PLAN_FILE, LocalOutput
from shard_tools.plan import Entry, Plan, assign_shards, make_key, save_plan, shard_number, split_long_videos
from shard_tools.report import describe_samples
from shard_tools.settings import Settings
from shard_tools.work import Job, Outcome, load_outcome
from shard_tools.workers import Failed
from shard_tools.write import ChangedError, publish_tables, write_shard


class Build:
    """One dataset being made. `part` (i, n): this process works on the videos of shards i, i + n, …

    Where videos are split, a shard holds pieces of many: the part that ends last writes all shards.
    """

    def __init__(self, output: LocalOutput, settings: Settings, part: tuple[int, int] = (0, 1)):
        self.output, self.settings = output, settings
        self.part, self.num_parts = part
        self.folder = output.folder
        self.plan_file = self.folder / PLAN_FILE
        self.work_folder = self.plan_file.parent
        self.done = read_dataset_info(self.folder) if is_described(self.folder) else None
        ours, theirs = settings.to_json(), self.done.encode if self.done else None
        if self.plan_file.exists():
            theirs = Plan.load(self.plan_file).settings
        if theirs is not None and theirs != ours:
            names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
            different = ", ".join(f"{name} is {theirs.get(name)} there and {ours.get(name)} now" for name in names)
            where = output.locate()
            raise InputError(f"{where} was made with other settings ({different}): give another output folder")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second run of the same part out."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be made ({error.strerror}): give another output folder") from error
        path = self.folder / f".part-{self.part}.lock"
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{self.folder} is locked by another run: wait for it to end") from None
            try:
                yield
            finally:
                path.unlink()

    def plan(self, inputs: Inputs, classes: list[str], retry_rejects: bool) -> Plan | None:
        """Return the plan of an interrupted run, or one for what the dataset lacks of `inputs`; None if it has all."""
        with lock_folder(self.folder):
            if not self.plan_file.exists():
                shutil.rmtree(self.work_folder, ignore_errors=True)  # of a run that was killed when all was done
                self._save_plan(inputs, classes, retry_rejects)
            return Plan.load(self.plan_file) if self.plan_file.exists() else None

    def _save_plan(self, inputs: Inputs, classes: list[str], retry_rejects: bool) -> None:
        """Write the plan of what is new in `inputs`, if anything is."""
        where = self.output.locate()
        known = self.done.classes if self.done else []
        if classes:
            if classes[: len(known)] != known:
                raise InputError(f"the label map does not start with the classes of {where}: their ids would change")
            inputs.apply_label_map(classes)
        names = classes or assign_class_ids(inputs.labels(), known)
        stored = ((it.source, it.segment, name_labels(it, known), it.source_size) for it in self._stored())
        inputs.compare(stored, () if retry_rejects else read_rejects(self.folder))
        if change := inputs.find_change():  # it would not be stored again
            raise InputError(f"{where} holds {change}: give another output folder")
        rejected = inputs.new_problems()
        shards = assign_shards(split_long_videos(inputs.new(), self.settings.max_seconds), self.settings, names)
        first = next(shards, None)
        if first is not None or rejected:
            for folder in ("items", "shards"):
                (self.work_folder / folder).mkdir(parents=True, exist_ok=True)
            first_number = max((shard_number(shard.name) for shard in self._shards()), default=-1) + 1
            planned = chain([first], shards) if first else ()
            save_plan(self.plan_file, self.settings, names, rejected, retry_rejects, planned, first_number)

    def _shards(self) -> list[ShardInfo]:
        return list(self.done.shards) if self.done else []

    def _stored(self) -> Iterator[Sample]:
        """Yield all samples that the dataset holds. Raise InputError if a shard of it is gone."""
        for shard in self._shards():
            if self.output.file_size(shard.name) != shard.num_bytes:
                where = self.output.locate(shard.name)
                raise InputError(f"{where} is missing or incomplete: restore it, or give another output folder")
            yield from read_samples(self.folder, shard)

    def run(
        self,
        plan: Plan,
        inputs: Inputs,
        run_jobs: Callable[[Iterator[Job]], Iterator[tuple[Job, Any]]],
        progress: Callable[[Outcome], None],
    ) -> None:
        """Process this part's videos, and write each shard as soon as it can be. Raise OSError when the disk fails."""
        left: dict[str, int] = {}  # videos without an outcome, of shards that are begun

        def finish(outcome: Outcome, shard: str) -> None:
            progress(outcome)
            left[shard] -= 1
            if not left[shard] and not plan.splits:
                self._finish_shard(plan, shard)

        def reject(source: str, stem: Path, reason: str) -> Outcome:
            outcome = Outcome(source, [], reason)
            outcome.save(stem)
            return outcome

        def jobs() -> Iterator[Job]:
            needed = set(self._missing(plan))
            for shard, entry in self.list_pending(plan):
                stem = self._stem(plan, entry.source, shard)
                first = f"{stem.parent.name}.tar"
                if first not in left:
                    stem.parent.mkdir(exist_ok=True)
                    left[first] = len(plan.entries(first))
                staged = self._load_staged(plan, entry.source, shard, needed)
                if staged is None and (location := inputs.location(entry.source)) is not None:
                    yield Job(entry.source, location, stem, self.settings, entry.labels, entry.segment, entry.fields)
                else:
                    gone = "it was there when the run began, and is gone now"
                    finish(staged or reject(entry.source, stem, gone), first)

        for job, result in run_jobs(jobs()):
            if isinstance(result, OSError):
                raise result
            if isinstance(result, Failed):
                result = reject(job.source, job.stem, result.reason)
            finish(result, f"{job.stem.parent.name}.tar")

    def _missing(self, plan: Plan) -> list[str]:
        """List the shards that are not whole yet."""
        return [shard for shard in plan.offsets if not self._marker(shard).exists()]

    def list_pending(self, plan: Plan) -> Iterator[tuple[str, Entry]]:
        """Yield (shard, video) of this part's videos of which a missing shard needs something, each source once."""
        seen: set[str] = set()  # of split videos
        for shard in self._missing(plan):
            if plan.splits:
                for entry in plan.entries(shard):
                    if entry.source not in seen and self._part_of(plan.shards_of(entry.source, shard)[0]) == self.part:
                        seen.add(entry.source)
                        yield shard, entry
            elif self._part_of(shard) == self.part:
                yield from ((shard, entry) for entry in plan.entries(shard))

    def _part_of(self, shard: str) -> int:
        """Return the part that works on the videos of which this is the first shard."""
        return shard_number(shard) % self.num_parts

    def _load_staged(self, plan: Plan, source: str, shard: str, needed: set[str]) -> Outcome | None:
        """Return an earlier outcome of a video, if all that the `needed` shards want of it is there."""
        shards = plan.shards_of(source, shard)
        return load_outcome(
            self._stem(plan, source, shard), lambda piece: shards[min(piece, len(shards) - 1)] in needed
        )

    def _stem(self, plan: Plan, source: str, shard: str) -> Path:
        # A folder per shard: looking up a staged result takes as long as its folder is full.
        first = plan.shards_of(source, shard)[0]
        return self.work_folder / "items" / first.removesuffix(".tar") / make_key(source)

    def _marker(self, shard: str) -> Path:
        return self.work_folder / "shards" / f"{shard}.json"

    def _finish_shard(self, plan: Plan, shard: str) -> None:
        changed = "it was changed while it was read"  # a copied video is read again here
        entries = plan.entries(shard)
        outcomes = {
            source: self._load_staged(plan, source, shard, {shard}) or Outcome(source, [], changed)
            for source in dict.fromkeys(entry.source for entry in entries)
        }
        samples = []
        for entry in entries:
            last_piece = len(plan.shards_of(entry.source, shard)) - 1
            pieces = enumerate(outcomes[entry.source].samples)
            samples += [sample for piece, sample in pieces if min(piece, last_piece) == entry.piece]
        try:
            info = write_shard(self.folder, shard, samples) if samples else None
        except ChangedError:  # after the look above, which finds it this time
            self._finish_shard(plan, shard)
            return
        rejected = {outcome.source: outcome.reason for outcome in outcomes.values() if outcome.reason is not None}
        write_text(self._marker(shard), json.dumps({"shard": info and asdict(info), "rejected": rejected}) + "\n")
        if info is not None:
            self.output.add_shard(info)
        for _, path in samples:
            if self.work_folder in path.parents:
                path.unlink(missing_ok=True)
        for source in outcomes:
            if all(self._marker(other).exists() for other in plan.shards_of(source, shard)):
                stem = self._stem(plan, source, shard)
                for path in stem.parent.glob(f"{stem.name}[-.]*"):
                    path.unlink(missing_ok=True)

    def finish(self, plan: Plan) -> int | None:
        """Publish the dataset once all parts are done; before that, return one that is not."""
        with lock_folder(self.folder):
            if not self.plan_file.exists():  # another part was here first
                self.done = read_dataset_info(self.folder) if is_described(self.folder) else None
                return None
            for shard in self._missing(plan):
                awaited: Iterator[str] = iter([shard])  # first shards of videos without an outcome
                if plan.splits:
                    sources = dict.fromkeys(entry.source for entry in plan.entries(shard))
                    late = (source for source in sources if not self._load_staged(plan, source, shard, {shard}))
                    awaited = (plan.shards_of(source, shard)[0] for source in late)
                if first := next(awaited, None):
                    if self._part_of(first) == self.part:
                        raise InputError(f"{self.folder / shard} is not complete yet: run the same command again")
                    return self._part_of(first)
                self._finish_shard(plan, shard)
            self._publish(plan)
            return None

    def _publish(self, plan: Plan) -> None:
        markers = [json.loads(self._marker(shard).read_text(encoding="utf-8")) for shard in plan.offsets]
        # A run that was killed right after publishing may have put some in already.
        shards = [shard for shard in self._shards() if shard.name not in plan.offsets]
        shards += [ShardInfo(**marker["shard"]) for marker in markers if marker["shard"]]
        rejected = ({} if plan.retries else read_rejects(self.folder)) | plan.rejected
        for marker in markers:
            rejected |= marker["rejected"]
        lines = [json.dumps({"source": source, "reason": reason}) for source, reason in sorted(rejected.items())]
        write_text(self.folder / REJECTED_FILE, "".join(line + "\n" for line in lines))
        if shards:
            samples = (sample for shard in shards for sample in read_samples(self.folder, shard))
            info = describe_samples(samples, shards, plan.classes, plan.settings, len(rejected))
            self.done = publish_tables(self.folder, info)
        self.output.publish(self.done if shards else None)
        for path in self.folder.glob(".*.partial"):  # left by a kill
            path.unlink()
        self.plan_file.unlink()
        shutil.rmtree(self.work_folder)


def name_labels(sample: Sample, classes: list[str]) -> tuple[str, ...] | None:
    return None if sample.labels is None else tuple(classes[label] for label in sample.labels)


def read_rejects(folder: Path) -> dict[str, str]:
    """Read reasons by source from `rejected.jsonl`; empty if there is none. Raise InputError if it is damaged."""
    path = folder / REJECTED_FILE
    if not path.exists():
        return {}
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {entry["source"]: entry["reason"] for entry in entries}
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error}): restore it, or remove it to retry its videos") from error


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait for, and hold, the lock on a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
