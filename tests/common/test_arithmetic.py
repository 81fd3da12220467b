"""Quotients and multiples that are rounded up."""

from adamae.common.arithmetic import ceil_div, round_up


def test_rounding_up() -> None:
    assert [ceil_div(number, 3) for number in (0, 1, 3, 4, 7)] == [0, 1, 1, 2, 3]
    assert [round_up(number, 8) for number in (0, 1, 8, 10)] == [0, 8, 8, 16]
    assert ceil_div(2**60 + 1, 2) == 2**59 + 1, "exact beyond the integers that a float can hold"
