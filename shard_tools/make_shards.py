"""Create a dataset of shards from videos.

    python shard_tools/make_shards.py INPUT OUTPUT

INPUT: a folder (sub-folders are classes), a list of any published form (lines, CSV, TSV, JSON, JSON lines, Parquet; -
for stdin; 'lists/*.txt' for several), tars of raw videos, or a URL. --dry-run says how it is understood. Every video
ends up in a shard or, with a reason, in OUTPUT/rejected.jsonl. Run the same command again to resume an interrupted run,
or to add new videos of INPUT.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from itertools import combinations
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between, parse_part
from adamae.common.cpus import count_cpus
from adamae.common.errors import InputError, run_command
from adamae.common.logging import log, printable
from adamae.common.progress import progress_bar
from adamae.pipeline.reading.storage import is_remote
from adamae.pipeline.shards.format import REJECTED_FILE, SKIPPED_FILE
from adamae.shard_tools.build import Build, list_sources, read_rejects
from adamae.shard_tools.inputs import (
    ItemStore,
    LabelMap,
    ListOptions,
    Skipped,
    assign_class_ids,
    read_inputs,
    read_label_map,
)
from adamae.shard_tools.inputs.folders import GROUPS
from adamae.shard_tools.plan import MAX_PROBED, warn_of_short_videos
from adamae.shard_tools.settings import COPY, ENCODING, PURPOSES, Settings
from adamae.shard_tools.splits import parse_group_by, warn_of_shared
from adamae.shard_tools.temp_table import explain_full_disk
from adamae.shard_tools.work import process_job
from adamae.shard_tools.workers import ENGINES

VALIDATION = "validation"  # the split that --hold-out makes beside "train"
NUM_SHOWN = 10  # rejects that are printed
MAX_TIMEOUT_S = 1e9  # of a timer


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("input", help="folder, list, tar, URL, or - for a list on stdin")
    parser.add_argument("output", help="folder for the dataset")
    what = parser.add_argument_group("what to read")
    what.add_argument(
        "--root", help="folder that a list's paths are relative to (default: the list's own)"
    )
    what.add_argument(
        "--suffix", default="", help="what a list's paths lack at their end, such as .mp4"
    )
    what.add_argument(
        "--path-column",
        metavar="COLUMN",
        help="of a list: its name in the header, or its number from 1",
    )
    what.add_argument(
        "--label-column", metavar="COLUMN", help="likewise; folder: that of each file, list or not"
    )
    what.add_argument(
        "--label", metavar="NAME", help="of all videos of INPUT, if neither list nor folders say it"
    )
    what.add_argument(
        "--start-column", metavar="COLUMN", help="of segments (seconds, hh:mm:ss, frames), or none"
    )
    what.add_argument("--end-column", metavar="COLUMN", help="of segments, or their length")
    what.add_argument(
        "--subset", metavar="NAME", help="of an input with several: train, val, test, …; or all"
    )
    what.add_argument(
        "--label-map",
        type=Path,
        help="class names: lines, with numbers or codes or without; CSV; JSON",
    )
    what.add_argument(
        "--split",
        action="append",
        default=[],
        type=_split,
        metavar="NAME=LIST",
        help="create OUTPUT/NAME from this list or folder, with paths relative to INPUT; once per split",
    )
    what.add_argument(
        "--hold-out",
        type=float,
        metavar="SHARE",
        help="create OUTPUT/train and OUTPUT/validation, with this share of each class, such as 0.2",
    )
    what.add_argument(
        "--group-by",
        metavar="HOW",
        help="hold out whole groups (recordings, persons): folder:2 of paths, column:NAME, name:REGEX",
    )
    what.add_argument(
        "--unlabeled", action="store_true", help="ignore sub-folders and list columns as labels"
    )
    how = parser.add_argument_group("how to store it")
    how.add_argument(
        "--for",
        dest="purpose",
        choices=PURPOSES,
        default="pretrain",
        help="preset of the options below",
    )
    for option in fields(Settings):
        how.add_argument(f"--{option.name.replace('_', '-')}", default=None, **option.metadata)
    run = parser.add_argument_group("how to run")
    run.add_argument(
        "--workers",
        type=between(1),
        default=count_cpus(),
        help="worker processes (default: one per core)",
    )
    seconds, fraction = between(0.001, MAX_TIMEOUT_S, float), between(0, 1, float)
    run.add_argument(
        "--timeout",
        type=seconds,
        default=900,
        help="seconds for a video without progress (default 900)",
    )
    run.add_argument(
        "--max-rejects",
        type=fraction,
        default=0.1,
        help="tolerated fraction of rejects (default 0.1)",
    )
    run.add_argument(
        "--engine", choices=ENGINES, default="processes", help="ray: on the cluster at $RAY_ADDRESS"
    )
    run.add_argument(
        "--part", type=parse_part, default=(1, 1), metavar="I/N", help="job I of an array of N jobs"
    )
    run.add_argument("--dry-run", action="store_true", help="only say how INPUT is understood")
    return parser.parse_args(arguments)


def _split(text: str) -> tuple[str, str]:
    name, separator, where = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text} is not like train=train.csv")
    return name, where


def choose_settings(arguments: argparse.Namespace) -> Settings:
    """Return the preset's settings, overridden by the given options."""
    names = (field.name for field in fields(Settings))
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.encode == COPY and (useless := [name for name in ENCODING if name in given]):
        raise InputError(
            f"--encode copy keeps every byte: it cannot go with --{useless[0].replace('_', '-')}"
        )
    purpose = dict(PURPOSES[arguments.purpose])
    if arguments.encode not in (None, "h264"):
        purpose.pop("quality", None)  # it is meant on x264's scale
    return Settings(**(purpose | given))


def require_consistent(arguments: argparse.Namespace) -> None:
    """Raise InputError where options contradict each other, or input and output would mix."""
    inputs, output, share = arguments.input, arguments.output, arguments.hold_out
    splits = [name for name, _ in arguments.split]
    is_folder = is_remote(inputs) or Path(inputs).is_dir()
    is_inside = (
        not is_remote(inputs)
        and is_folder
        and Path(output).resolve().is_relative_to(Path(inputs).resolve())
    )
    wrong_share = share is not None and (splits or inputs == "-" or not 0 < share < 1)
    has_labels = arguments.label_column or arguments.unlabeled
    copy = f"`aws s3 sync FOLDER {output}` or `rclone copy`"
    mistakes = {
        "--split names must differ": len(set(splits)) < len(splits),
        "--hold-out is a share between 0 and 1 of a folder or a list, without --split": wrong_share,
        "--group-by says what --hold-out keeps together: give both": arguments.group_by
        and share is None,
        "--label is for videos without labels: remove it, or --label-column and --unlabeled": (
            arguments.label is not None and has_labels
        ),
        "--root is for the paths of a list: remove it where INPUT is no list": arguments.root
        and (splits or is_folder),
        f"{output} is a URL: make the shards in a folder, then copy it with {copy}": is_remote(
            output
        ),
        f"{output} is a file: give a folder for the shards": Path(output).exists()
        and not Path(output).is_dir(),
        f"{output} lies inside the input {inputs}: give a folder outside of it": is_inside,
    }
    for sentence, is_made in mistakes.items():
        if is_made:
            raise InputError(sentence)


def make_list_options(arguments: argparse.Namespace, split: str) -> ListOptions:
    """Return what the arguments say about a list; one of --split takes the rows of its own subset."""
    columns = {
        role: getattr(arguments, f"{role}_column") for role in ("path", "label", "start", "end")
    }
    subset = arguments.subset or split
    return ListOptions(
        root=arguments.input if split else arguments.root,
        suffix=arguments.suffix,
        **columns,
        subset=GROUPS.get(subset, subset) or None,
        is_split=bool(split and not arguments.subset),
        unlabeled=arguments.unlabeled or arguments.label is not None,
        constant_label=arguments.label,
        has_label_map=arguments.label_map is not None,
    )


def read_splits(
    arguments: argparse.Namespace, settings: Settings, label_map: LabelMap | None, names: list[str]
) -> dict[str, ItemStore]:
    """Read the input of each split, say how it is understood, and what is wrong with it."""
    group_of = parse_group_by(arguments.group_by) if arguments.group_by else None
    known: dict[str, bool] = {}  # whether an earlier run holds a file out
    for name in names if arguments.hold_out else ():
        known |= dict.fromkeys(list_sources(Path(arguments.output, name)), name == VALIDATION)
    lists, splits = dict(arguments.split), {}
    for name in names:
        where = lists.get(name, arguments.input)
        options = make_list_options(arguments, name if lists else "")
        inputs = splits[name] = read_inputs(where, options)
        if arguments.hold_out:
            inputs.hold_out(arguments.hold_out, name == VALIDATION, group_of, known)
            if not len(inputs):
                raise InputError(
                    f"--hold-out leaves no video for {name}: give more videos, or a smaller share"
                )
        if label_map and not arguments.unlabeled:
            inputs.apply_label_map(label_map)
        inputs.require_distinct_labels()
        for note in (*inputs.notes, inputs.describe()):
            log(note)
        inputs.require_usable(arguments.max_rejects, where)
        warn_of_short_videos(inputs.sample(MAX_PROBED), settings)
    return splits


def make_dataset(
    build: Build, arguments: argparse.Namespace, inputs: ItemStore, classes: list[str]
) -> int:
    """Create, resume or extend one dataset; return the exit code."""
    run_jobs = partial(
        ENGINES[arguments.engine],
        process_job,
        num_workers=arguments.workers,
        timeout=arguments.timeout,
    )
    with build.lock():
        inputs.skipped.write(build.folder / SKIPPED_FILE)
        # When an interrupted run is complete, what has come into the input since then is next.
        while plan := build.plan(inputs, classes):
            with progress_bar(unit="sample", total=sum(map(len, build.list_pending(plan)))) as bar:
                rejected = 0
                for item in build.run(plan, inputs, run_jobs):
                    if item.problem is not None:
                        rejected += 1
                    bar.set_postfix(rejected=rejected, refresh=False)
                    bar.update()
            if (other := build.finish(plan)) is not None:
                done = "part {} of {} is done".format(*arguments.part)
                what = f"part {other + 1} is not; the last part to finish completes {printable(build.folder)}"
                log(f"{done}, {what}")
                return 0
            if not build.info.shards:
                break
        return conclude(build, arguments.max_rejects, inputs.skipped)


def conclude(build: Build, max_rejects: float, skipped: Skipped) -> int:
    """Print the results; return the exit code."""
    rejects = read_rejects(build.folder)
    for source, reason in list(rejects.items())[:NUM_SHOWN]:
        log(f"rejected {printable(source)}: {reason}", sys.stderr)
    if len(rejects) > NUM_SHOWN:
        log(f"and {len(rejects) - NUM_SHOWN} more in {build.folder / REJECTED_FILE}", sys.stderr)
    skipped.log()
    info = build.info
    if not info.shards:
        raise InputError(
            f"none of {len(rejects)} videos can be used: see {build.folder / REJECTED_FILE}"
        )
    for what, groups in (
        ("names", info.report.get("duplicates")),
        ("labels", info.report.get("conflicts")),
    ):
        if groups:
            found = "1 file appears" if len(groups) == 1 else f"{len(groups)} files appear"
            names = ", ".join(map(printable, groups[0][:3]))
            log(f"{found} under several {what}; all were kept (the first: {names})", sys.stderr)
    log(
        f"{info.num_samples} samples, {info.num_frames} frames, {info.num_bytes / 1e6:.1f} MB in {len(info.shards)}"
        f" shards, {len(rejects)} rejected, {skipped.total} skipped: {build.folder}"
    )
    total = len(rejects) + info.num_samples
    if len(rejects) > max_rejects * total:
        share = f"{len(rejects)} of {total} videos rejected ({len(rejects) / total:.0%})"
        log(f"error: {share}, limit is {max_rejects:.0%}", sys.stderr)
        return 3
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    settings = choose_settings(parsed)  # a contradiction is said before anything is read
    require_consistent(parsed)
    label_map = read_label_map(parsed.label_map) if parsed.label_map else None
    classes = label_map.names if label_map else []
    names = ["train", VALIDATION] if parsed.hold_out else [name for name, _ in parsed.split] or [""]
    part, num_parts = parsed.part
    builds = {
        name: Build(Path(parsed.output, name), settings, (part - 1, num_parts)) for name in names
    }
    with explain_full_disk():
        splits = read_splits(parsed, settings, label_map, names)
        if parsed.dry_run:
            for inputs in splits.values():
                inputs.skipped.log()
            return 0
        if "" not in splits and not classes:  # all splits have the same ones, which keep their ids
            known = max((build.info.classes for build in builds.values()), key=len)
            classes = assign_class_ids(
                set().union(*(inputs.labels() for inputs in splits.values())), known
            )
        code = max(make_dataset(builds[name], parsed, splits[name], classes) for name in names)
    for name, held_out in combinations(names, 2):
        if (
            builds[name].info.shards and builds[held_out].info.shards
        ):  # else another part will complete it
            warn_of_shared(name, builds[name].folder, held_out, builds[held_out].folder)
    if code == 0 and num_parts == 1:
        log(f"next: python doctor.py {printable(builds.get('train', builds[names[0]]).folder)}")
    return code


if __name__ == "__main__":
    run_command(main, resumable=True)
