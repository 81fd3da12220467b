"""Read the numbers that synthetic videos carry."""

import numpy as np

from shard_tools.synthetic_videos import GRID, GRID_FRACTION, check_bits


def read_frame_number(frame: np.ndarray) -> int:
    """Read the number drawn into `frame`, uint8 [H, W, 3]; raise ValueError if none is readable."""
    height, width = frame.shape[:2]
    code = 0
    for i in range(GRID * GRID):
        row, column = divmod(i, GRID)
        y, x = (row + 0.5) * height / GRID_FRACTION, (column + 0.5) * width / GRID_FRACTION
        code |= int(frame[round(y - 1) : round(y + 1), round(x - 1) : round(x + 1)].mean() > 127) << i
    number = code >> 4
    if code & 15 != check_bits(number):
        raise ValueError("no frame number is readable in the top left corner")
    return number
