"""Which masking pre-trains best? Pre-train, probe and fine-tune every strategy, ratio and seed, with equal compute.

    python benchmarks/masking_quality.py --preset cpu
    python benchmarks/masking_quality.py --preset gpu --shards shards/train --validation shards/validation
    python benchmarks/masking_quality.py --preset cpu_clips --shards shards/train --validation shards/validation

Each point is pre-trained on the same number of clips (`--equal seconds`: for the time that the first point takes). Then
an attentive probe and a fine-tuning run with the labels of --shards are judged on --validation by evaluate.py, with
their last weights and the preset's views of a video. `scratch` is fine-tuned without pre-training. Without --shards,
labeled videos whose class shows in motion alone are synthesized (shard_tools/synthetic_motion.py). Errors of
moving and of still tokens are taken under random masks, the same for all models. Started again, the command goes on
with the points that are not done; what stands in the tables in --output is not made again, and with other strategies,
ratios or seeds it is added to. Points run side by side on the GPUs there are. `section.key=value` is given to all runs.
The presets are in benchmarks/masking_quality.yaml.

A strategy is a masking, perhaps with settings of the model: `adaptive`, `adaptive:sampling_sharpness=6`,
`adaptive:sampling_sharpness=6,sharpness_ramp=24000`. With --label-sets, every pre-trained model is probed and
fine-tuned with several sets of --labels videos; differences to --baseline are taken in pairs of the same seed and set.
"""

import argparse
from pathlib import Path

import common.openmp  # noqa: F401

from benchmarks.harness import results_folder, write_results
from benchmarks.masking_study import PRESETS, SCRATCH, Study
from benchmarks.reports.masking_tables import NOTES, added, plot, summarise
from common.atomic_io import atomic_write
from common.devices import choose_device
from common.errors import InputError, run_command


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    device = choose_device()
    folder = options.output or results_folder(device) / "masking_quality"
    study = Study(options, folder, device)
    rows = added(study.earlier, study.run_all())
    write_results(folder, "points", rows, study.about, NOTES)
    write_results(folder, "masking_quality", summarise(rows, options.baseline), study.about, NOTES)
    with atomic_write(folder / "masking_quality.png") as aside:
        plot(rows, options.baseline, options.equal).savefig(aside, format="png", dpi=130, bbox_inches="tight")
    print(f"wrote {folder}/masking_quality.json and .png, and all points in points.csv")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--shards", help="labelled shards to train on (default: drawn ones)")
    parser.add_argument("--validation", help="labelled shards to judge on")
    parser.add_argument("--strategies", nargs="+", help=f"MASKING[:key=value,...] or {SCRATCH}")
    parser.add_argument("--ratios", nargs="+", type=float)
    parser.add_argument("--baseline", default="random", help="strategy that the others are compared with (random)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--pretrain-steps", type=int, help="optimizer steps of pre-training (default: the preset's)")
    parser.add_argument("--labels", type=int, help="videos with labels to learn from (default: the preset's, or all)")
    parser.add_argument("--label-sets", type=int, default=1, help="how many such sets each model learns from")
    parser.add_argument(
        "--drawn", nargs="+", default=[], metavar="OPTION=VALUE",
        help="of shard_tools/synthetic_motion.py, such as num-frames=32 distractors=3 object-size=0.4",
    )  # fmt: skip
    parser.add_argument("--equal", choices=["clips", "seconds"], default="clips", help="what all points get alike")
    parser.add_argument("--num-videos", type=int, default=3200, help="drawn for training (default 3200)")
    parser.add_argument("--parallel", type=int, default=1, help="points at a time where there is no GPU")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<gpu or cpu>/masking_quality")
    options = parser.parse_args(arguments)
    if bool(options.shards) != bool(options.validation):
        raise InputError("give --shards and --validation together, or neither for drawn videos")
    if options.shards is None and "drawn" not in PRESETS[options.preset]:
        raise InputError(f"--preset {options.preset} draws no videos: give --shards and --validation")
    options.drawn = [f"--{option}" for option in options.drawn]
    if options.drawn and options.shards is not None:
        raise InputError("--drawn is for videos that are drawn: leave it out, or --shards")
    for name in ("parallel", "num_videos", "label_sets", "labels", "pretrain_steps"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}: give a whole number of at least 1")
    if options.label_sets > 1 and options.shards is not None and options.labels is None:
        raise InputError("--label-sets needs --labels: all labels of --shards are one set")
    return options


if __name__ == "__main__":
    run_command(main, resumable=True)
