"""What the benchmarks' command lines share. Imports nothing heavy: memory_vs_ratio.py answers --help at once."""

import argparse
from collections.abc import Callable
from pathlib import Path

from common import arguments


class ArgumentParser(arguments.ArgumentParser):
    """A command's parser with the options of benchmarks."""

    def __init__(self, doc: str | None, output: str = "benchmark_results/<gpu> or .../cpu") -> None:
        """output: the default of --output."""
        super().__init__(doc)
        self.add_argument("--output", type=Path, help=f"default: {output}")

    def add_videos(self) -> None:
        """Add the arguments of the benchmarks that make shards of videos first."""
        self.add_argument("videos", type=Path, help="folder of videos")
        self.add_argument(
            "--encodes", nargs="+", default=["h264", "mjpeg"], help="of make_shards.py; h264-size: its --tune size"
        )
        self.add_argument("--batch-size", type=at_least(1), help="clips; default: 64 on a GPU, a few on a CPU")
        self.add_argument("--work", type=Path, help="folder that keeps the shards")


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argument type: a whole number of at least `minimum`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"it is {text}, give a whole number of at least {minimum}")
        return int(text)

    return convert
