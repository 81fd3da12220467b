"""Where the fuzzer's modules, and those of other rooms' tests that it builds on, are found."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "shard_tools"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
