"""Turn videos into shards made for training.

    python shard_tools/make_shards.py INPUT OUTPUT

INPUT: a folder (sub-folders are classes), a list (`path label` lines, CSV, TSV, Something-Something's or Kinetics'
annotations, - for stdin), tars of raw videos, or a URL. Every video ends up in a shard or, with a reason, in
OUTPUT/rejected.jsonl. Interrupted, the same command goes on where it stopped; with new videos in INPUT, it adds shards.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from tqdm import tqdm

from errors import InputError, run_command
from shard_tools.build import Build, read_rejects
from shard_tools.codecs import CODECS
from shard_tools.inputs import Item, is_url, read_inputs, read_label_map
from shard_tools.settings import COPY, PURPOSES, Settings
from shard_tools.work import Outcome, work
from shard_tools.workers import Pool


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="folder, list, tar, URL, or - for a list on stdin")
    parser.add_argument("output", type=Path, help="folder of the dataset")
    what = parser.add_argument_group("what to read")
    what.add_argument("--root", help="folder in which a list's paths start (default: the list's own)")
    what.add_argument("--label-map", type=Path, help="class names by id: one a line, or JSON")
    what.add_argument("--unlabelled", action="store_true", help="sub-folders and list columns are no labels")
    what.add_argument("--retry-rejects", action="store_true", help="try again what an earlier run rejected")
    how = parser.add_argument_group("how to store it")
    how.add_argument("--for", dest="purpose", choices=PURPOSES, default="pretrain", help="sets the defaults below")
    how.add_argument("--encode", choices=[*CODECS, COPY], help="codec, or copy to keep the bytes (default h264)")
    how.add_argument("--frame-stride", type=int, metavar="N", help="store every N-th frame (default 4)")
    how.add_argument("--fps", type=float, help="instead: per video, the stride that comes nearest to this rate")
    how.add_argument("--short-side", type=int, metavar="PIXELS", help="scale larger videos down to it (default 256)")
    how.add_argument("--gop", type=int, metavar="N", help="a key frame every N frames (default 8)")
    how.add_argument("--quality", type=int, help="crf or quantiser, lower is better (default: 23 for h264)")
    how.add_argument("--preset", help="effort of h264 and hevc (default veryfast)")
    how.add_argument("--max-seconds", type=float, help="split longer videos into samples of this length")
    how.add_argument("--check", choices=["full", "key-frames"], help="how much of a copied video to decode")
    where = parser.add_argument_group("where to put it")
    where.add_argument("--seed", type=int, help="of the shuffle over all shards (default 0)")
    where.add_argument("--samples-per-shard", type=int, metavar="N", help="at most (default 256)")
    where.add_argument("--shard-mb", type=float, help="instead: megabytes of source video in a shard")
    where.add_argument("--min-shards", type=int, metavar="N", help="at least: ranks times workers")
    run = parser.add_argument_group("how to run")
    run.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    run.add_argument("--timeout", type=float, default=900, help="seconds for one video (default 900)")
    run.add_argument("--max-rejects", type=float, default=0.1, help="share of rejects that is no error (default 0.1)")
    return parser.parse_args(arguments)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The purpose's settings with the given options over them."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    chosen = PURPOSES[arguments.purpose] | {name: value for name, value in given.items() if value is not None}
    return Settings(**chosen)


def refuse_overlap(inputs: str, output: Path) -> None:
    """Raises InputError where output and input would mix, or output is no folder."""
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file: give a folder for the shards")
    folder = Path(inputs)
    if not is_url(inputs) and folder.is_dir() and output.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{output} lies inside the input {folder}: give a folder outside of it")


class Bar:
    """Progress bar in videos, with frames per second and rejects beside it."""

    def __init__(self, total: int):
        # Into a file, a line every half minute is enough.
        interval = 0.1 if sys.stderr.isatty() else 30
        self.bar = tqdm(total=total, unit="video", mininterval=interval, dynamic_ncols=True)
        self.num_frames = 0
        self.num_rejected = 0

    def __call__(self, outcome: Outcome) -> None:
        self.num_frames += sum(sample.num_frames for sample, _ in outcome.samples)
        self.num_rejected += outcome.reason is not None
        self.bar.set_postfix(frames=self.num_frames, rejected=self.num_rejected, refresh=False)
        self.bar.update()


def make_dataset(arguments: argparse.Namespace, settings: Settings, items: list[Item], classes: list[str]) -> int:
    """Make or complete the dataset; returns the exit code."""
    build = Build(arguments.output, settings)
    with build.locked():
        plan = build.unfinished()
        while plan := plan or build.new_plan(items, classes, arguments.retry_rejects):
            bar = Bar(plan.num_items)
            build.run(plan, items, Pool(work, arguments.workers, arguments.timeout), bar)
            bar.bar.close()
            build.finish(plan, arguments.retry_rejects)
            plan, arguments.retry_rejects = None, False
    return conclude(build, arguments.max_rejects)


def conclude(build: Build, max_rejects: float) -> int:
    """Say what came of it; returns the exit code."""
    rejects = read_rejects(build.folder)
    for source, reason in list(rejects.items())[:10]:
        print(f"rejected {source}: {reason}", file=sys.stderr)
    if build.done is None:
        raise InputError(f"not one of {len(rejects)} videos can be used: {build.folder}/rejected.jsonl says why")
    info = build.done
    print(
        f"{info.num_samples} samples, {info.num_frames} frames, {info.num_bytes / 1e6:.1f} MB in {len(info.shards)} "
        f"shards, {len(rejects)} rejected: {build.folder}"
    )
    num_inputs = len(rejects) + info.num_samples
    if len(rejects) > max_rejects * num_inputs:
        print(f"error: {len(rejects)} rejects are more than --max-rejects {max_rejects} allows", file=sys.stderr)
        return 3
    return 0


def main() -> int:
    arguments = parse_arguments()
    settings = settings_of(arguments)
    if arguments.workers < 1 or arguments.timeout <= 0:
        raise InputError("--workers must be at least 1 and --timeout above 0")
    refuse_overlap(arguments.input, arguments.output)
    classes = read_label_map(arguments.label_map) if arguments.label_map else []
    items = read_inputs(arguments.input, arguments.root, arguments.unlabelled)
    return make_dataset(arguments, settings, items, classes)


if __name__ == "__main__":
    run_command(main)
