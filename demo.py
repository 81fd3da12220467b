"""Pre-train a small model in minutes, on a CPU, and look at what it has learned.

    python demo.py                       on synthetic videos, whose motion is known
    python demo.py VIDEOS [OPTION ...]   on yours; OPTIONs are those of make_shards.py

Makes shards, pre-trains with configs/demo.yaml, writes pictures of reconstructions, and measures
how closely the sampler follows motion. A fifth of your videos is held out; if all have a label, the
model is compared with features made by hand. Each step is a command, which is printed. Run the same
command again to resume.
"""

import argparse
from pathlib import Path

from adamae.common.arguments import ArgumentParser
from adamae.common.commands import command_line, log_next, run_step
from adamae.common.errors import parse_early, run_command
from adamae.common.locations import local_path
from adamae.common.logging import log

CONFIG = Path(__file__).resolve().parent / "configs/demo.yaml"


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this command, and VIDEOS with the options of make_shards.py."""
    parser = ArgumentParser(
        __doc__, usage="%(prog)s [VIDEOS [OPTION ...]] [--output DIR]", allow_abbrev=False
    )
    parser.add_argument(
        "--output", type=local_path, metavar="DIR", help="default: demo/own, or demo/synthetic"
    )
    return parser.parse_known_args(arguments)


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS, WORDS = parse_early(parse_arguments)

from adamae.pipeline.shards.read_format import read_dataset_info
from adamae.shard_tools.default_split import add_split
from adamae.shard_tools.make_shards import parse_arguments as parse_shard_arguments


def main(options: argparse.Namespace, words: list[str]) -> None:
    """Run the demo on the videos that `words` begin with, or on synthetic ones without any."""
    folder = options.output or Path("demo", "own" if words else "synthetic")
    if words:
        demonstrate_own(words, folder)
    else:
        demonstrate_synthetic(folder)
    log(f"pictures: {folder}/figures; report: {folder}/run/report.html")
    page = folder / "comparison/compare.html"
    if page.is_file():
        log(f"page: {page}")


def demonstrate_synthetic(folder: Path) -> None:
    """Train on 96 synthetic videos, and look at 16 that are made with another seed."""
    unseen = folder / "unseen"
    make_videos(folder / "videos", num_videos=96, seed=0)
    make_videos(unseen, num_videos=16, seed=1)
    shards = folder / "shards"
    run_step("shards", folder / "videos", shards, "--frame-stride", 2)
    pretrain(folder, f"data.shards={shards}")
    show(folder, unseen)
    log_next(command_line("demo", "VIDEOS"))


def make_videos(folder: Path, num_videos: int, seed: int) -> None:
    """Make synthetic videos, unless they are complete."""
    done = folder / ".done"
    if not done.exists():
        size = ("--size", 64, "--num-frames", 64)
        number = ("--num-videos", num_videos, "--seed", seed)
        run_step("shard_tools.synthetic_videos", folder, *number, *size)
        done.touch()


def demonstrate_own(words: list[str], folder: Path) -> None:
    """Train on four fifths of the user's videos, and look at the others."""
    shards = folder / "shards"
    # Half of the videos may be of other kinds: this is a first look. What the user says comes
    # later, and wins.
    arguments = ["--frame-stride", "2", "--max-rejects", "0.5", *words, str(shards)]
    options = parse_shard_arguments(arguments)
    run_step("shards", *add_split(arguments, options))
    train = shards / "train"
    validation = shards / "validation"
    settings = [f"data.shards={train}", f"evaluation.shards={validation}"]
    if options.fps:
        settings += [f"data.fps={options.fps:g}", "data.frame_stride=null"]
    else:
        settings.append(f"data.frame_stride={options.frame_stride}")
    pretrain(folder, *settings)
    show(folder, validation)
    if read_dataset_info(train).has_one_label:
        run_step("compare", shards, "--models", folder / "run", "--output", folder / "comparison")


def pretrain(folder: Path, *settings: str) -> None:
    run_step("train", "--config", CONFIG, f"run={folder}/run", *settings)


def show(folder: Path, unseen: Path) -> None:
    """Write pictures of what the model reconstructs of unseen videos, and measure its sampler."""
    run_step("visualize", folder / "run", unseen, "--output", folder / "figures")
    run_step("benchmarks.motion_report", folder / "run", unseen, "--output", folder)


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS, WORDS), resumable=True)
