"""What can be done to a file: pure functions (content, rng) -> content, and to a folder: (root, rng) -> None.

A file that an edit cannot take apart, often because an earlier one has damaged it, is left as it is.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random

FileEdit = Callable[[bytes, Random], bytes]
FolderEdit = Callable[[Path, Random], None]
