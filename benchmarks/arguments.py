"""What the benchmarks' command lines share."""

from adamae.common import arguments
from adamae.common.locations import local_path


class ArgumentParser(arguments.ArgumentParser):
    """The parser of a benchmark's command line; every benchmark has --output."""

    def __init__(self, doc: str | None, output: str = "benchmark_results/<gpu> or .../cpu") -> None:
        """Take the text of --help, and the default of --output that it names."""
        super().__init__(doc)
        self.add_argument("--output", type=local_path, help=f"default: {output}")

    def add_videos(self, encodes: list[str]) -> None:
        """Add the arguments of benchmarks that make shards of videos first.

        encodes: the default of --encodes.
        """
        self.add_argument("videos", type=local_path, help="folder of videos")
        self.add_argument(
            "--encodes",
            nargs="+",
            default=encodes,
            help="of make_shards.py; h264-size: its --tune size",
        )
        # ViT-Base trains on 0.8 clips/s on 2 CPU cores: 64 clips would take more than a minute
        # there.
        self.add_argument(
            "--batch-size",
            type=arguments.between(1),
            help="clips; default: 64 on a GPU, a few on a CPU",
        )
        # The second run of a benchmark finds the shards of the first one and encodes nothing.
        self.add_argument("--work", type=local_path, help="folder that keeps the shards")
