"""Integer arithmetic that is easily misread where it is written out."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient rounded up: 7 clips in batches of 3 are 3 batches."""
    # Python's integer division rounds towards minus infinity, and is exact where a division of
    # floats is not.
    return -(-dividend // divisor)


def round_up(number: int, multiple: int) -> int:
    """Round up to a multiple of `multiple`: 10 bytes in words of 8 take 16."""
    return ceil_div(number, multiple) * multiple
