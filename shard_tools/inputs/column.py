"""One column of a list, as the sampled rows show it."""

from collections.abc import Sequence
from functools import cached_property

from adamae.shard_tools.inputs import vocabulary
from adamae.shard_tools.inputs.cells import (
    WHOLE,
    Row,
    get_cell,
    is_missing,
    parse_time,
    to_text,
)

# With fewer rows, labels that are all different are believed.
MIN_REPEATING = 10


class Column:
    """The cells of the sampled rows in one column, without those that are missing."""

    def __init__(self, number: int, name: str, role: str, sample: Sequence[Row]) -> None:
        # From 0.
        self.number = number
        self.name = name
        # The name by which the vocabulary knows what the column holds.
        self.role = role
        cells = (get_cell(row, number) for row in sample)
        self.cells = [cell for cell in cells if not is_missing(cell)]
        self.texts = [to_text(cell) for cell in self.cells]

    @property
    def option_number(self) -> str:
        """The number by which an option names this column, from 1."""
        return str(self.number + 1)

    @cached_property
    def is_number(self) -> bool:
        """Whether all cells are numbers or times."""
        return bool(self.cells) and all(parse_time(cell) is not None for cell in self.cells)

    @cached_property
    def whole_numbers(self) -> list[float]:
        """The numbers in the cells if all are whole, else none."""
        if all(map(WHOLE.fullmatch, self.texts)):
            return [float(text) for text in self.texts]
        return []

    @property
    def may_be_label(self) -> bool:
        """Whether the cells look like classes, and the name is none of another kind of column."""
        if not self.cells or self.role == "" or self.role in vocabulary.PATHS:
            return False
        if vocabulary.NO_LABEL.search(self.role):
            return False
        if any(isinstance(cell, bool) or not isinstance(cell, (str, int)) for cell in self.cells):
            return False
        num_different = len(set(self.texts))
        if num_different == len(self.texts) and len(self.texts) >= MIN_REPEATING:
            return False
        # Fractions are measured, and classes are counted.
        return bool(self.whole_numbers) or not self.is_number
