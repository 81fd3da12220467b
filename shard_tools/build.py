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
from pipeline.shards.format import (
    REJECTED_FILE,
    DatasetInfo,
    Sample,
    ShardInfo,
    is_described,
    read_dataset_info,
    read_samples,
)
from shard_tools.inputs import Inputs, assign_class_ids
from shard_tools.output import PLAN_FILE, LocalOutput
from shard_tools.plan import Entry, Plan, assign_shards, make_key, save_plan, split_long_videos
from shard_tools.report import describe_samples
from shard_tools.settings import Settings
from shard_tools.work import Job, Outcome, load_outcome
from shard_tools.workers import Failed
from shard_tools.write import ChangedError, publish_tables, write_shard


class Build:
    """One dataset being made. `part` (i, n): this process works on the videos of shards i, i + n, …

    A video that is split belongs to the part of its first piece. A shard whose videos belong to several parts is put
    together by the part that ends last.
    """

    def __init__(self, output: LocalOutput, settings: Settings, part: tuple[int, int] = (0, 1)):
        self.output, self.settings = output, settings
        self.part, self.num_parts = part
        self.folder = output.folder
        self.plan_file = self.folder / PLAN_FILE
        self.work_folder = self.plan_file.parent
        self.done: DatasetInfo | None = read_dataset_info(self.folder) if is_described(self.folder) else None
        self._require_same_settings()

    def _require_same_settings(self) -> None:
        theirs = self.done.encode if self.done else None
        if self.plan_file.exists():
            theirs = Plan.load(self.plan_file).settings
        ours = self.settings.to_json()
        if theirs is None or theirs == ours:
            return
        names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
        different = ", ".join(f"{name} is {theirs.get(name)} there and {ours.get(name)} now" for name in names)
        raise InputError(
            f"{self.output.locate()} was made with other settings ({different}): give another output folder"
        )

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
                if not self._save_plan(inputs, classes, retry_rejects):
                    return None
            return Plan.load(self.plan_file)

    def _save_plan(self, inputs: Inputs, classes: list[str], retry_rejects: bool) -> bool:
        """Write the plan of what is new in `inputs`; False, and no plan, if nothing is."""
        where = self.output.locate()
        known = self.done.classes if self.done else []
        if classes[: len(known)] != known and classes:
            raise InputError(f"the label map does not start with the classes of {where}: their ids would change")
        if classes:
            inputs.apply_label_map(classes)
        names = classes or assign_class_ids(inputs.labels(), known)
        stored = ((it.source, None if it.label is None else known[it.label], it.source_size) for it in self._stored())
        inputs.compare(stored, () if retry_rejects else read_rejects(self.folder))
        if change := inputs.find_change():  # it would not be stored again
            raise InputError(f"{where} holds {change}: give another output folder")
        rejected = inputs.new_problems()
        items = split_long_videos(inputs.new(), self.settings.max_seconds)
        shards = assign_shards(items, self.settings, names)
        first = next(shards, None)
        if first is None and not rejected:
            return False
        for folder in ("items", "shards"):
            (self.work_folder / folder).mkdir(parents=True, exist_ok=True)
        last_number = max((int(shard.name[6:-4]) for shard in self._shards()), default=-1)
        planned = chain([first], shards) if first else ()
        save_plan(self.plan_file, self.settings, names, rejected, retry_rejects, planned, last_number + 1)
        return True

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
        """Process this part's videos, and write each shard as soon as it can be. Raise OSError when the disk fails.

        Memory holds the videos of shards that are begun; where videos are split, of all.
        """
        missing = self._missing(plan)
        awaited: dict[str, set[str]] = {}  # of shards that only this part works on: sources without an outcome

        def begin(shard: str) -> None:
            if shard not in awaited and plan.parts_of(shard, self.num_parts) == {self.part}:
                awaited[shard] = set(plan.sources(shard))

        def finish(outcome: Outcome, shards: list[str]) -> None:
            progress(outcome)
            for shard in dict.fromkeys(shards):
                if shard in awaited:
                    awaited[shard].discard(outcome.source)
                    if not awaited[shard]:
                        del awaited[shard]
                        self._finish_shard(plan, shard)

        def jobs() -> Iterator[Job]:
            needed = set(missing)
            for shard, entry in self.list_pending(plan):
                begin(shard)
                stem = self._stem(plan, entry.source, shard)
                stem.parent.mkdir(exist_ok=True)
                staged = self._load_staged(plan, entry.source, shard, needed)
                if staged is None:
                    location = inputs.location(entry.source)
                    if location is not None:
                        yield Job(entry.source, location, entry.label, stem, self.settings)
                        continue
                    staged = Outcome(entry.source, [], "it was there when the run began, and is gone now")
                    staged.save(stem)
                finish(staged, plan.shards_of(entry.source, shard))

        if plan.splits:  # a piece may be made before its shard is reached
            for shard in missing:
                begin(shard)
        for job, result in run_jobs(jobs()):
            if isinstance(result, OSError):
                raise result
            if isinstance(result, Failed):
                result = Outcome(job.source, [], result.reason)
                result.save(job.stem)
            finish(result, plan.shards_of(job.source, f"{job.stem.parent.name}.tar"))

    def _missing(self, plan: Plan) -> list[str]:
        """List the shards that are not whole yet."""
        return [shard for shard in plan.offsets if not self._marker(shard).exists()]

    def list_pending(self, plan: Plan) -> Iterator[tuple[str, Entry]]:
        """Yield (shard, video) of this part's videos of which a missing shard needs something, each source once."""
        seen: set[str] = set()  # of split videos
        for shard in self._missing(plan):
            if self.part not in plan.parts_of(shard, self.num_parts):
                continue
            for entry in plan.entries(shard):
                if plan.splits:
                    if entry.source in seen or plan.part_of(entry.source, shard, self.num_parts) != self.part:
                        continue
                    seen.add(entry.source)
                yield shard, entry

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
        outcomes: dict[str, Outcome] = {}
        for source in plan.sources(shard):
            outcomes[source] = self._load_staged(plan, source, shard, {shard}) or Outcome(source, [], changed)
        samples = []
        for entry in plan.entries(shard):
            last_piece = len(plan.shards_of(entry.source, shard)) - 1
            pieces = enumerate(outcomes[entry.source].samples)
            samples += [sample for piece, sample in pieces if min(piece, last_piece) == entry.piece]
        try:
            info = write_shard(self.folder, shard, samples) if samples else None
        except ChangedError:  # after the look above, which finds it this time
            self._finish_shard(plan, shard)
            return
        rejected = {outcome.source: outcome.reason for outcome in outcomes.values() if outcome.reason is not None}
        marker = {"shard": info and asdict(info), "rejected": rejected}
        write_text(self._marker(shard), json.dumps(marker) + "\n")
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
                parts = plan.parts_of(shard, self.num_parts)
                late = parts.pop() if len(parts) == 1 else None  # a part that has a shard for itself writes it itself
                if late is None:
                    awaited = (it for it in plan.sources(shard) if not self._load_staged(plan, it, shard, {shard}))
                    late = next((plan.part_of(source, shard, self.num_parts) for source in awaited), None)
                if late == self.part:
                    raise InputError(f"{self.folder / shard} is not complete yet: run the same command again")
                if late is not None:
                    return late
                self._finish_shard(plan, shard)
            self._publish(plan)
            return None

    def _publish(self, plan: Plan) -> None:
        markers = [json.loads(self._marker(shard).read_text(encoding="utf-8")) for shard in plan.offsets]
        # A run that was killed right after publishing may have put some in already.
        shards = [shard for shard in self._shards() if shard.name not in plan.offsets]
        shards += [ShardInfo(**marker["shard"]) for marker in markers if marker["shard"]]
        rejected = {} if plan.retries else read_rejects(self.folder)
        rejected |= plan.rejected
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
