"""Make shards of your videos, hold some out, and compare encoders on them.

    python start.py VIDEOS [--models MODEL ...] [OPTION ...]

VIDEOS and OPTIONs are those of make_shards.py. Unless an OPTION divides the videos, a fifth is held
out, by whole folders where each class folder has several. The page shows each MODEL (a run, a
folder, hf://user/name) beside an untrained encoder and what needs none. Each step is a command,
which is printed. Run the same command again to resume, or with more models to add them.
"""

import argparse
from pathlib import Path

from adamae.common.arguments import ArgumentParser
from adamae.common.commands import PUBLISHED, command_line, log_next, run_step
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.locations import local_path
from adamae.common.logging import log


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this command, and VIDEOS with the options of make_shards.py."""
    parser = ArgumentParser(
        __doc__,
        usage="%(prog)s VIDEOS [--models MODEL ...] [--output DIR] [OPTION ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        action="extend",
        default=[],
        metavar="MODEL",
        help="encoders to compare",
    )
    parser.add_argument(
        "--output", type=local_path, metavar="DIR", help="default: start/<name of VIDEOS>"
    )
    options, words = parser.parse_known_args(arguments)
    if not words:
        raise InputError(f"which videos? Give a folder or a list: {parser.prog} VIDEOS --models …")
    return options, words


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS, WORDS = parse_early(parse_arguments)

from adamae.pipeline.shards.read_format import read_dataset_info
from adamae.shard_tools.default_split import add_split
from adamae.shard_tools.make_shards import parse_arguments as parse_shard_arguments


def main(options: argparse.Namespace, words: list[str]) -> None:
    # The folder of the shards comes last, and its name follows from the videos'.
    videos = Path(parse_shard_arguments([*words, "shards"]).input)
    output = options.output or Path("start", videos.stem)
    shards = output / "shards"
    check_models(options.models)
    arguments = [*words, str(shards)]
    run_step("shards", *add_split(arguments, parse_shard_arguments(arguments)))
    if read_dataset_info(shards / "train").has_one_label:
        models = ["--models", *options.models] if options.models else []
        run_step("compare", shards, *models, "--output", output / "comparison")
        return
    log("no accuracy can be compared: the videos have no labels, or several each")
    model = options.models[0] if options.models else PUBLISHED
    log_next(command_line("features", shards, output / "features", "--model", model))


def check_models(models: list[str]) -> None:
    """Raise InputError if a model cannot be opened, before hours of making shards."""
    if not models:
        return
    # PyTorch takes seconds, and shards are made without it.
    from adamae.model.encoders.open_encoder import open_encoder
    from adamae.training.remote_run import local_run

    for model in models:
        open_encoder(local_run(model))


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS, WORDS), resumable=True)
