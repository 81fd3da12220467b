"""Turn videos into shards made for training.

    python shard_tools/make_shards.py INPUT OUTPUT

INPUT: a folder (sub-folders are classes), a list (`path label` lines, CSV, TSV, Something-Something's or Kinetics'
annotations, - for stdin), tars of raw videos, or a URL. Every video ends up in a shard or, with a reason, in
OUTPUT/rejected.jsonl. Interrupted, the same command goes on where it stopped; with new videos in INPUT, it adds shards.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.errors import InputError, run_command
from common.logging import log, printable
from common.progress import progress_bar
from pipeline.shards.format import REJECTED_FILE, is_described, read_dataset_info
from shard_tools.build import Build, read_rejects
from shard_tools.encoding.codecs import CODECS
from shard_tools.estimate import estimate
from shard_tools.inputs import Inputs, Skipped, assign_class_ids, is_url, read_inputs, read_label_map
from shard_tools.output import LocalOutput, RemoteOutput
from shard_tools.report import write_contact_sheet
from shard_tools.settings import CHECKS, COPY, ENCODING, PRESETS, PURPOSES, Settings
from shard_tools.work import Job, Outcome, process_job
from shard_tools.workers import ENGINES, count_cpus


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="folder, list, tar, URL, or - for a list on stdin")
    parser.add_argument("output", type=_output, help="folder of the dataset, or its URL in a store (s3://, gs://, …)")
    what = parser.add_argument_group("what to read")
    what.add_argument("--root", help="folder in which a list's paths start (default: the list's own)")
    what.add_argument("--label-map", type=Path, help="class names by id: one a line, or JSON")
    what.add_argument(
        "--split",
        action=Splits,
        metavar="NAME=LIST",
        help="make OUTPUT/NAME from this list or folder, whose paths start in INPUT; again for every split",
    )
    what.add_argument("--unlabelled", action="store_true", help="sub-folders and list columns are no labels")
    what.add_argument("--retry-rejects", action="store_true", help="try again what an earlier run rejected")
    how = parser.add_argument_group("how to store it")
    how.add_argument("--for", dest="purpose", choices=PURPOSES, default="pretrain", help="sets the defaults below")
    how.add_argument("--encode", choices=[*CODECS, COPY], help="codec, or copy to keep the bytes (default h264)")
    how.add_argument("--frame-stride", type=int, metavar="N", help="store every N-th frame (default 4)")
    how.add_argument("--fps", type=float, help="instead: per video, the stride that comes nearest to this rate")
    how.add_argument("--short-side", type=int, metavar="PIXELS", help="of the shorter side, at most (default 256)")
    how.add_argument("--gop", type=int, metavar="N", help="a key frame every N frames (default 8)")
    how.add_argument("--quality", type=int, help="crf or quantiser, lower is better (default: 23 for h264)")
    how.add_argument("--preset", choices=PRESETS, help="effort of h264 and hevc (default veryfast)")
    how.add_argument("--max-seconds", type=float, help="split longer videos into samples of this length")
    how.add_argument("--check", choices=CHECKS, help="of copied videos, decode a sample or all (default sample)")
    where = parser.add_argument_group("where to put it")
    where.add_argument("--seed", type=int, help="of the shuffle over all shards (default 0)")
    where.add_argument("--samples-per-shard", type=int, metavar="N", help="at most (default 256)")
    where.add_argument("--shard-mb", type=float, help="instead: megabytes of source video in a shard")
    where.add_argument("--min-shards", type=int, metavar="N", help="at least: ranks times workers")
    run = parser.add_argument_group("how to run")
    run.add_argument("--workers", type=int, default=count_cpus(), help="default: one a core")
    run.add_argument("--timeout", type=float, default=900, help="seconds for one video (default 900)")
    run.add_argument("--max-rejects", type=float, default=0.1, help="share of rejects that is no error (default 0.1)")
    run.add_argument("--engine", choices=ENGINES, default="processes", help="ray: on the cluster at $RAY_ADDRESS")
    run.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="of a job array: only every N-th shard")
    run.add_argument(
        "--staging", type=Path, metavar="FOLDER", help="where shards are made that go to a URL (default: your cache)"
    )
    run.add_argument("--estimate", action="store_true", help="try a few videos, say how long and how large, and stop")
    run.add_argument(
        "--contact-sheet", action="store_true", help="write OUTPUT/contact_sheet.png, a look at the samples"
    )
    return parser.parse_args(arguments)


class Splits(argparse.Action):
    """Collects NAME=LIST options into a dictionary."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: Any) -> None:
        name, separator, where = value.partition("=")
        if not separator or not name.isidentifier():
            parser.error(f"--split {value} is not like train=train.csv")
        splits = getattr(namespace, self.dest) or {}
        if name in splits:
            parser.error(f"--split {name} is given twice")
        setattr(namespace, self.dest, splits | {name: where})


def _output(text: str) -> str:
    if text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} can only be read: give a folder, or a URL such as s3://bucket/name")
    return text


def _part(text: str) -> tuple[int, int]:
    part, _, total = text.partition("/")
    if not (part.isdecimal() and total.isdecimal() and 1 <= int(part) <= int(total)):
        raise argparse.ArgumentTypeError(f"{text} is not like 1/4, 2/4, 3/4 or 4/4")
    return int(part), int(total)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The purpose's settings with the given options over them."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    if arguments.encode == COPY:
        for name in ENCODING:
            if given[name] is not None:
                raise InputError(f"--encode copy keeps every byte: it cannot go with --{name.replace('_', '-')}")
    purpose = dict(PURPOSES[arguments.purpose])
    if arguments.encode not in (None, "h264"):
        purpose.pop("quality", None)  # it is meant on x264's scale
    return Settings(**(purpose | {name: value for name, value in given.items() if value is not None}))


def refuse_overlap(inputs: str, place: str) -> None:
    """Raises InputError where output and input would mix, or output is no folder."""
    if is_url(place):
        if f"{place}/".startswith(f"{inputs.rstrip('/')}/"):
            raise InputError(f"{place} lies inside the input {inputs}: give a URL outside of it")
        return
    output = Path(place)
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file: give a folder for the shards")
    folder = Path(inputs)
    if not is_url(inputs) and folder.is_dir() and output.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{output} lies inside the input {folder}: give a folder outside of it")


class Bar:
    """Progress bar in videos, with frames per second and rejects beside it."""

    def __init__(self, total: int):
        self.bar = progress_bar(unit="video", total=total)
        self.num_frames = 0
        self.num_rejected = 0

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def count(self, outcome: Outcome) -> None:
        self.num_frames += sum(sample.num_frames for sample, _ in outcome.samples)
        self.num_rejected += outcome.reason is not None
        self.bar.set_postfix(frames=self.num_frames, rejected=self.num_rejected, refresh=False)
        self.bar.update()


def refuse_with_url(arguments: argparse.Namespace) -> None:
    """Raises InputError where an option cannot go with the output that it is given with."""
    if not is_url(arguments.output):
        if arguments.staging is not None:
            raise InputError("--staging is where shards are made that go to a URL: OUTPUT is a folder, leave it out")
        return
    if arguments.contact_sheet:
        raise InputError("--contact-sheet looks into shards on this machine, and these go to a URL: leave it out")
    if arguments.staging is None and (arguments.part[1] > 1 or arguments.engine == "ray"):
        raise InputError("machines that make a dataset together need a --staging folder that all of them see")


def destination_of(place: str, name: str, staging: Path | None) -> LocalOutput:
    """Of the dataset `name` at a place; of the one there is, if it has no name."""
    if is_url(place):
        return RemoteOutput(f"{place.rstrip('/')}/{name}", staging)
    return LocalOutput(Path(place) / name)


def common_classes(splits: dict[str, Inputs], destinations: dict[str, LocalOutput]) -> list[str]:
    """All splits count their classes alike, and as they did when they were made."""
    folders = [there.folder for there in destinations.values() if is_described(there.folder)]
    known = max((read_dataset_info(folder).classes for folder in folders), key=len, default=[])
    return assign_class_ids(set().union(*(found.labels() for found in splits.values())), known)


def make_dataset(
    destination: LocalOutput, arguments: argparse.Namespace, inputs: Inputs, classes: list[str], skipped: Skipped
) -> int:
    """Make or complete one dataset; returns the exit code."""
    part, num_parts = arguments.part
    build = Build(destination.folder, settings_of(arguments), (part - 1, num_parts), destination)
    retry_rejects = arguments.retry_rejects

    def run_jobs(jobs: Iterator[Job]) -> Iterator[tuple[Job, Any]]:
        return ENGINES[arguments.engine](process_job, jobs, arguments.workers, arguments.timeout)

    with destination:
        with build.locked():
            plan = build.plan(inputs, classes, retry_rejects)
            while plan is not None:
                with Bar(build.num_missing(plan)) as bar:
                    build.run(plan, inputs, run_jobs, bar.count)
                late = build.finish(plan)
                if late is not None:
                    said = f"part {part} of {num_parts} is done, part {late + 1} is not"
                    log(f"{said}; the part that ends last completes {printable(destination.place_of())}")
                    return 0
                if build.done is None:
                    break
                # An interrupted run is complete now; what has come into the input since then is next.
                plan = build.plan(inputs, classes, retry_rejects and not plan.retries)
        return conclude(build, arguments, skipped)


def say_skipped(skipped: Skipped) -> None:
    for line in skipped.lines():
        log(line, sys.stderr)


def conclude(build: Build, arguments: argparse.Namespace, skipped: Skipped) -> int:
    """Say what came of it; returns the exit code."""
    rejects = read_rejects(build.folder)
    reasons = build.destination.place_of(REJECTED_FILE)
    for source, reason in list(rejects.items())[:10]:
        log(f"rejected {printable(source)}: {reason}", sys.stderr)
    if len(rejects) > 10:
        log(f"and {len(rejects) - 10} more in {reasons}", sys.stderr)
    say_skipped(skipped)
    info = build.done
    if info is None:
        raise InputError(f"not one of {len(rejects)} videos can be used: {reasons} says why")
    if arguments.contact_sheet:
        write_contact_sheet(build.folder, info)
    log(
        f"{info.num_samples} samples, {info.num_frames} frames, {info.num_bytes / 1e6:.1f} MB in {len(info.shards)} "
        f"shards, {len(rejects)} rejected, {skipped.total} skipped: {build.destination.place_of()}"
    )
    allowed = arguments.max_rejects * (len(rejects) + info.report.get("num_sources", info.num_samples))
    if len(rejects) > allowed:
        log(f"error: {len(rejects)} rejects are more than --max-rejects {arguments.max_rejects}", sys.stderr)
        return 3
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    settings = settings_of(parsed)
    if parsed.workers < 1 or parsed.timeout <= 0 or not 0 <= parsed.max_rejects <= 1:
        raise InputError("--workers must be at least 1, --timeout above 0 and --max-rejects between 0 and 1")
    refuse_overlap(parsed.input, parsed.output)
    refuse_with_url(parsed)
    classes = read_label_map(parsed.label_map) if parsed.label_map else []
    if parsed.root and (parsed.split or Path(parsed.input).is_dir() or is_url(parsed.input)):
        raise InputError("--root says where the paths of a list start: leave it out where INPUT is none")
    inputs = parsed.split or {"": parsed.input}
    root = parsed.input if parsed.split else parsed.root
    skipped = {name: Skipped() for name in inputs}
    with ExitStack() as stack:
        splits = {
            name: stack.enter_context(read_inputs(where, root, parsed.unlabelled, skipped[name]))
            for name, where in inputs.items()
        }
        if parsed.estimate:
            for passed_over in skipped.values():
                say_skipped(passed_over)
            estimate(list(splits.values()), settings, parsed.workers)
            return 0
        destinations = {name: destination_of(parsed.output, name, parsed.staging) for name in splits}
        if parsed.split and not classes:
            classes = common_classes(splits, destinations)
        return max(
            make_dataset(destinations[name], parsed, found, classes, skipped[name]) for name, found in splits.items()
        )


if __name__ == "__main__":
    run_command(main, resumable=True)
