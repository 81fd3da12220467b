"""Show how a list would be read, and what would become of it."""

from collections import Counter
from collections.abc import Iterable

from adamae.common.logging import format_count, printable
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs.cells import parse_time, to_text
from adamae.shard_tools.inputs.item import Item
from adamae.shard_tools.inputs.reading import FIELDS, Reading
from adamae.shard_tools.inputs.table_reader import Table

# The rows that are shown, and the characters of their cells.
NUM_ROWS = 3
MAX_CELL = 24
# Columns that are shown; JSON may have thousands.
MAX_COLUMNS = 40
# Reasons that are shown why rows cannot be used.
NUM_REASONS = 3


class Preview:
    """What a reading makes of some rows of a list."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = list(items)
        whole = [item for item in self.items if not item.segment]
        # Whole videos of which rows have different labels, or other cells that differ.
        self.num_conflicts = _count_several({(item.source, item.labels) for item in whole})
        self.num_differing = _count_several({(item.source, item.fields) for item in whole})
        self.num_unusable = sum(_find_problem(item) is not None for item in self.items)

    def describe_differing(self) -> str:
        """Return a sentence about whole videos that have several rows."""
        count = max(self.num_conflicts, self.num_differing)
        videos = format_count(count, "video")
        what = f"several rows name the same whole video and differ ({videos})"
        return f"{what}: give a start and an end of each"

    def describe(self) -> list[str]:
        """Return lines with the number of samples, and why rows cannot be used."""
        problems = Counter[str]()
        names = set()
        lengths = []
        has_labels = any(item.labels for item in self.items)
        for item in self.items:
            problem = _find_problem(item)
            if has_labels and item.labels is None:
                problem = problem or "it has no label, others have one"
            if problem:
                problems[problem] += 1
                continue
            names.add(item.name)
            if item.segment:
                segment = Segment.parse(item.segment)
                lengths.append(segment.end - segment.start)
        num_files = len({item.source for item in self.items})
        lines = [
            f"  the first {format_count(len(self.items), 'row')} would be"
            f" {format_count(len(names), 'sample')} of {format_count(num_files, 'file')}"
        ]
        if lengths:
            unit = "frames" if "frames=" in self.items[0].segment else "seconds"
            lines.append(f"  end - start: {min(lengths):g} to {max(lengths):g} {unit}")
        for problem, count in problems.most_common(NUM_REASONS):
            lines.append(f"  {count} of the rows cannot be used: {printable(problem)}")
        return lines


def _find_problem(item: Item) -> str | None:
    """Return why an item cannot be used; None if it may be."""
    if item.problem or not item.segment:
        return item.problem
    return Segment.parse(item.segment).problem


def _count_several(pairs: Iterable[tuple[str, object]]) -> int:
    """Return how many sources are in more than one pair."""
    counts = Counter(source for source, _ in pairs)
    return sum(count > 1 for count in counts.values())


def describe_columns(table: Table, reading: Reading) -> list[str]:
    """Return a line for each column: its name, what it would hold, and its cells in some rows."""
    roles = {name: reading.describe(role) for role, name in reading.columns.items()}
    rest = "kept as a field" if reading.rest == FIELDS else "not used"
    lines = []
    names = table.names[:MAX_COLUMNS]
    texts = [printable(table.title(name)) for name in names]
    width = max(map(len, texts))
    for name, text in zip(names, texts, strict=True):
        role = roles.get(name, rest)
        cells = table.cells[name]
        values = " | ".join(_shorten(to_text(cell)) for cell in cells[:NUM_ROWS])
        lines.append(f"  {text:{width}}  {role:16}  {values}{_summarize(cells)}")
    if len(table.names) > MAX_COLUMNS:
        lines.append(f"  … and {len(table.names) - MAX_COLUMNS} other columns: {rest}")
    return lines


def _shorten(text: str) -> str:
    text = printable(text)
    return text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]}…"


def _summarize(cells: list[object]) -> str:
    """Return the range of numbers, or the number of different texts if rows have some in common."""
    numbers = [number for number in map(parse_time, cells) if number is not None]
    if len(cells) <= NUM_ROWS:
        return ""
    if len(numbers) == len(cells):
        return f" …  ({min(numbers):g} to {max(numbers):g})"
    num_different = len(set(map(to_text, cells)))
    return f" …  ({num_different} different)"
