"""What a dataset lacks of an input, cut into shards and written down, in memory that does not grow with it."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from common.errors import InputError
from pipeline.shards.format import REJECTED_FILE, DatasetInfo, Sample
from shard_tools.inputs import Inputs, assign_class_ids
from shard_tools.layout import KEY_DIGITS, Keys, Shuffled, assign, count_shards, make_key
from shard_tools.output import LocalOutput
from shard_tools.plan import Entry, Plan, in_pieces
from shard_tools.settings import Settings


class Planning:
    """Of one dataset, with what it holds already: `done`, or None, of which `stored` yields all samples."""

    def __init__(
        self,
        destination: LocalOutput,
        settings: Settings,
        done: DatasetInfo | None,
        stored: Callable[[], Iterable[Sample]],
    ):
        self.destination = destination
        self.settings = settings
        self.done = done
        self.stored = stored

    def save(self, inputs: Inputs, classes: list[str], retry_rejects: bool, plan_file: Path) -> bool:
        """Write the plan of what is new in `inputs`; False, and no plan, if nothing is.

        Raises InputError where new and old do not go together.
        """
        names = self._classes(inputs, classes)
        known = self.done.classes if self.done else []
        stored = ((it.source, None if it.label is None else known[it.label], it.source_size) for it in self.stored())
        inputs.compare(stored, () if retry_rejects else read_rejects(self.destination.folder).keys())
        self._refuse_changes(inputs)
        rejected = inputs.new_problems()
        with Shuffled(in_pieces(inputs.new(), self.settings.max_seconds), self.settings.seed) as order:
            if not order.count and not rejected:
                return False
            pairs = ((self._key(sample), sample.source) for sample in self.stored())
            new = ((make_key(item.source, KEY_DIGITS), item.source) for item in inputs.new())
            refuse_collisions(new, pairs, self.destination.place_of(), "rename one of them")
            ids = {name: identity for identity, name in enumerate(names)}
            shards = (
                (
                    f"shard-{number:06d}.tar",
                    [Entry(item.source, None if item.label is None else ids[item.label], item.piece) for item in group],
                )
                for number, group in enumerate(assign(order, self.settings), self._first_number())
            )
            for folder in ("items", "shards"):
                (plan_file.parent / folder).mkdir(parents=True, exist_ok=True)
            plan = Plan(self.settings.to_json(), names, {}, rejected, retry_rejects, KEY_DIGITS)
            plan.save_with(shards, count_shards(order, self.settings), plan_file)
        return True

    def _classes(self, inputs: Inputs, classes: list[str]) -> list[str]:
        known = self.done.classes if self.done else []
        if classes and classes[: len(known)] != known:
            where = self.destination.place_of()
            raise InputError(f"the label map does not begin with the classes of {where}: their ids would change")
        names = assign_class_ids(inputs.labels(), classes or known)
        if classes and names != classes:
            inputs.name_labels(classes)
            return classes
        return names

    def _refuse_changes(self, inputs: Inputs) -> None:
        """Raises InputError if an input is not what it was when it was stored: it would not be stored again."""
        for what, (count, first) in (
            ("have another label now", inputs.relabelled()),
            ("have changed since they were stored", inputs.resized()),
        ):
            if count:
                where = self.destination.place_of()
                raise InputError(f"{count} videos of {where} {what} (the first: {first}): give another output folder")

    def _key(self, sample: Sample) -> str:
        return sample.key if self.settings.max_seconds is None else sample.key.rpartition("-")[0]

    def _first_number(self) -> int:
        shards = self.done.shards if self.done else []
        return 1 + max((int(shard.name[6:-4]) for shard in shards), default=-1)


def refuse_collisions(
    new: Iterable[tuple[str, str]], stored: Iterable[tuple[str, str]], where: str, what_to_do: str
) -> None:
    """Raises InputError if two videos, given as (key, source), would have the same key."""
    with Keys() as keys:
        keys.add(new, are_stored=False)
        keys.add(stored, are_stored=True)
        if alike := keys.alike():
            key, source, other = alike
            raise InputError(f"{source} and {other} would have the same key {key} in {where}: {what_to_do}")


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
