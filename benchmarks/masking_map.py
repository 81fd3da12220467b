"""Measure the gain of adaptive over random masking by object size and clutter.

    python benchmarks/masking_map.py --object-sizes 0.35 0.5 0.7 --distractors 0 2 4 --strategies random adaptive \\
        --ratios 0.9 [further options of benchmarks/masking_study.py] [--output FOLDER]

For every object size (of the largest, relative to the frame) and number of distractors (objects that move to and fro),
synthetic videos are generated and benchmarks/masking_study.py is run on them, in a sub-folder of its own. Re-running
the command resumes. Rows also hold what may explain a gain: how much harder moving tokens are to reconstruct than
static ones (error_ratio), and which fraction of the visible tokens moves.
"""

from itertools import product

import common.openmp  # noqa: F401

from benchmarks import masking_study
from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import Report, Row, print_table, results_folder
from common.devices import choose_device
from common.errors import InputError, run_command


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__, "benchmarks/results/<gpu or cpu>/masking_map")
    parser.add_argument("--object-sizes", nargs="+", type=float, default=[0.35, 0.5, 0.7])
    parser.add_argument("--distractors", nargs="+", type=at_least(0), default=[0, 2, 4])
    parser.add_argument(
        "--synthetic", nargs="+", default=[], metavar="OPTION=VALUE", help="more of synthetic_videos.py"
    )
    options, study = parser.parse_known_args(arguments)
    if not all(0 < size <= 1 for size in options.object_sizes):
        raise InputError("--object-sizes must be above 0 and at most 1")
    device = choose_device()
    folder = options.output or results_folder(device) / "masking_map"
    rows: list[Row] = []
    for size, distractors in product(options.object_sizes, options.distractors):
        synthetic = [*options.synthetic, f"object-size={size:g}", f"distractors={distractors}"]
        output = folder / f"size{size:g}-distractors{distractors}"
        given = masking_study.parse_arguments([*study, "--synthetic", *synthetic, "--output", str(output)])
        for row in masking_study.run_study(given):
            rows.append({"object_size": size, "distractors": distractors} | row)
            if "error_moving" in row:  # not from scratch
                rows[-1]["error_ratio"] = round(row["error_moving"] / row["error_static"], 4)
    Report("masking_map", folder, device, masking_study.NOTES).write(rows)
    print_table(rows)


if __name__ == "__main__":
    run_command(main, resumable=True)
