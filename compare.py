"""Compare encoders on your labeled videos, and say what to do next.

    python compare.py SHARDS --models runs/mine hf://MCG-NJU/videomae-base

SHARDS is a folder of shards with train/ and validation/, as `make_shards.py --hold-out 0.2` writes
it. Every model classifies the videos of validation/ by those of train/: by their nearest
neighbors, by a linear classifier and by an attentive one. Beside it stands what needs no encoder
(the most common class, 1-NN of pixels, mean color, differences of frames), and an encoder that is
not trained. No encoder is trained here.

Features are kept below --output: the same command resumes one that was killed, and a further model
is added without encoding the others again. Writes compare.html, a page to look at, compare.json and
predictions.csv (a line per video) to --output. ± is the standard error over groups of videos
(--group), or else over source files.
"""

import argparse
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.locations import local_path

MEASURES = ("knn", "linear", "attentive")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("shards", metavar="SHARDS", help="folder (or URL) of shards with train/ and validation/")
    add(
        "--models",
        nargs="+",
        # Given again, it adds models: so does the command that is named next.
        action="extend",
        default=[],
        metavar="MODEL",
        help="runs, checkpoints, exports, other projects' folders or files, hf://user/name",
    )
    add(
        "--measures",
        nargs="+",
        choices=MEASURES,
        default=list(MEASURES),
        help="default: all; attentive takes the longest",
    )
    add(
        "--neighbors",
        type=between(1),
        metavar="K",
        help="of k-NN; default: 20, or the size of the smallest class",
    )
    add(
        "--labels",
        type=between(1),
        nargs="+",
        default=[],
        metavar="N",
        help="also a linear classifier of N training videos per class, five times each",
    )
    add("--group", default="group", metavar="FIELD", help="recording, person, … (default: group)")
    add(
        "--stride",
        type=between(1),
        metavar="N",
        help="sampled frames from window to window; default: a quarter of a window",
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--fps", type=between(1, kind=float), help="sampled frames per second, of all models"
    )
    rate.add_argument(
        "--frame-stride",
        type=between(1),
        metavar="N",
        help="source frames between sampled ones; default: of each model as it was trained",
    )
    add("--batch-size", type=between(1), default=8, metavar="B", help="windows (default 8)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    add(
        "--output",
        type=local_path,
        default=Path("comparison"),
        metavar="DIR",
        help="folder of the page and of all features (default: comparison)",
    )
    options = parser.parse_args(arguments)
    for model in options.models:
        if options.models.count(model) > 1:
            raise InputError(f"--models names {model} twice: leave out one")
    options.arguments = arguments
    options.measures = [measure for measure in MEASURES if measure in options.measures]
    return options


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

from adamae.common.devices import choose_device, explain_out_of_memory
from adamae.common.logging import log
from adamae.training.comparison.candidates import CompareOptions
from adamae.training.comparison.classify import compare
from adamae.training.comparison.page import write_page, write_predictions, write_results
from adamae.training.comparison.splits import open_splits
from adamae.training.comparison.text import describe_table, draw_conclusions
from adamae.training.extraction import ExtractionOptions


@explain_out_of_memory("lower --batch-size")
def main(options: argparse.Namespace) -> None:
    extraction = ExtractionOptions(
        stride=options.stride,
        frame_stride=options.frame_stride,
        fps=options.fps,
        batch_size=options.batch_size,
    )
    compare_options = CompareOptions(
        options.models,
        options.measures,
        options.output,
        extraction,
        choose_device(options.device),
        options.neighbors,
        options.labels,
        options.group,
    )
    comparison = compare(open_splits(options.shards), compare_options)
    table = describe_table(comparison)
    conclusions = draw_conclusions(comparison, options.arguments)
    write_predictions(comparison, options.output / "predictions.csv")
    write_results(comparison, conclusions, options.output / "compare.json")
    write_page(comparison, conclusions, options.output / "compare.html")
    for line in [*table, "", *conclusions]:
        log(line)
    log(f"page: {options.output}/compare.html")


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS), resumable=True)
