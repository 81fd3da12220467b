"""Create a dataset of shards from videos.

    python shard_tools/make_shards.py INPUT OUTPUT

INPUT: a folder (sub-folders are classes), a list in any published form (lines, CSV, TSV, JSON, JSON
lines, Parquet; - for stdin; 'lists/*.txt' for several), tars of raw videos, or a URL. --dry-run
prints how it is understood. Every video ends up in a shard or, with a reason, in
OUTPUT/rejected.jsonl. Re-run the same command to resume an interrupted run, or to add new videos of
INPUT.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields

from adamae.common.arguments import ArgumentParser, between, parse_part
from adamae.common.cpus import count_cpus
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.locations import is_remote, local_path
from adamae.shard_tools.settings import COPY, ENCODING, PURPOSES, Settings
from adamae.shard_tools.workers import ENGINES

# Much longer times overflow the timer of a job (signal.setitimer).
MAX_TIMEOUT_S = 1e9


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("input", help="folder, list, tar, URL, or - for a list on stdin")
    parser.add_argument("output", help="folder for the dataset")
    _add_input_options(parser.add_argument_group("what to read"))
    _add_split_options(parser.add_argument_group("how to divide it"))
    _add_settings(parser.add_argument_group("how to store it"))
    _add_run_options(parser.add_argument_group("how to run"))
    return parser.parse_args(arguments)


def _add_input_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--root",
        help="folder that the paths of a list are relative to (default: the list's own folder)",
    )
    group.add_argument(
        "--suffix", default="", help="suffix to append to the paths of a list, such as .mp4"
    )
    group.add_argument(
        "--columns",
        metavar="ROLE=COLUMN,…",
        help="what the columns of a list hold, such as path=file,label=class,start=t0:ms,end=t1:ms,"
        "rest=fields (docs/shards.md)",
    )
    group.add_argument(
        "--format", metavar="NAME", help="published format of a list that has other columns, too"
    )
    group.add_argument(
        "--label",
        metavar="HOW",
        help="folder:1: the label is the first folder of each path, folder:2 the second, …; other"
        " text is the label of all videos",
    )
    group.add_argument(
        "--subset",
        metavar="NAME",
        help="subset to read of an input with several: train, val, test, …; or all",
    )
    group.add_argument(
        "--label-map",
        type=local_path,
        help="file of class names: lines with or without numbers or codes, CSV or JSON",
    )
    group.add_argument("--unlabeled", action="store_true", help="store no labels")


def _add_split_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--split",
        action="append",
        default=[],
        type=_parse_split,
        metavar="NAME=LIST",
        help="create OUTPUT/NAME from this list or folder, with paths relative to INPUT; repeat for"
        " each split",
    )
    group.add_argument(
        "--hold-out",
        type=float,
        metavar="FRACTION",
        help="create OUTPUT/train and OUTPUT/validation, which gets this fraction of each class,"
        " such as 0.2",
    )
    group.add_argument(
        "--group-by",
        metavar="HOW",
        help="hold out whole groups (recordings, persons): folder:2 of paths, column:NAME or"
        " name:REGEX",
    )


def _add_settings(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--for",
        dest="purpose",
        choices=PURPOSES,
        default="pretrain",
        help="preset of the options below",
    )
    for option in fields(Settings):
        group.add_argument(f"--{option.name.replace('_', '-')}", default=None, **option.metadata)


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers",
        type=between(1),
        default=count_cpus(),
        help="worker processes (default: one per core)",
    )
    group.add_argument(
        "--timeout",
        type=between(0.001, MAX_TIMEOUT_S, float),
        default=900,
        help="maximum seconds without progress per video (default 900)",
    )
    group.add_argument(
        "--max-rejects",
        type=between(0, 1, float),
        default=0.1,
        help="maximum fraction of rejected videos (default 0.1)",
    )
    group.add_argument(
        "--engine",
        choices=ENGINES,
        default="processes",
        help="processes of this node, or ray: the cluster at $RAY_ADDRESS (default processes)",
    )
    group.add_argument(
        "--part",
        type=parse_part,
        default=(1, 1),
        metavar="I/N",
        help="run as job I of an array of N jobs",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print how INPUT is understood and stop"
    )


def _parse_split(text: str) -> tuple[str, str]:
    name, separator, source = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text} is not like train=train.csv")
    return name, source


# Mistakes and --help are answered here, before the imports that take a second.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import re
import sys
from functools import partial
from itertools import combinations, islice
from pathlib import Path

from adamae.common.commands import PUBLISHED, command_line, log_next
from adamae.common.logging import format_count, log, printable
from adamae.common.progress import progress_bar
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
from adamae.shard_tools.inputs.class_folders import GROUPS
from adamae.shard_tools.inputs.reading import Reading
from adamae.shard_tools.plan import warn_of_headers
from adamae.shard_tools.splits import parse_group_by, warn_of_shared
from adamae.shard_tools.temp_table import explain_full_disk
from adamae.shard_tools.work import process_job
from adamae.shard_tools.write import write_splits_card

# The split that --hold-out makes beside "train".
VALIDATION = "validation"
# Rejects that are printed; all are in rejected.jsonl.
NUM_PRINTED = 10


def choose_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of the preset, overridden by the options.

    Raise InputError if an option has no effect on copies.
    """
    options = {}
    for field in fields(Settings):
        value = getattr(arguments, field.name)
        if value is not None:
            options[field.name] = value
    if arguments.encode == COPY:
        for name in ENCODING:
            if name in options:
                raise InputError(
                    f"--encode copy keeps every byte: it cannot go with --{name.replace('_', '-')}"
                )
    preset = dict(PURPOSES[arguments.purpose])
    if arguments.encode not in (None, "h264"):
        # The preset's quality is on the scale of x264.
        preset.pop("quality", None)
    return Settings(**(preset | options))


def require_consistent(arguments: argparse.Namespace) -> None:
    """Raise InputError where options contradict each other, or input and output would mix."""
    _require_consistent_options(arguments)
    inputs = arguments.input
    output = arguments.output
    if is_remote(output):
        copy = f"`aws s3 sync FOLDER {output}` or `rclone copy`"
        raise InputError(
            f"{output} is a URL: make the shards in a folder, then copy it with {copy}"
        )
    if Path(output).exists() and not Path(output).is_dir():
        raise InputError(f"{output} is a file: give a folder for the shards")
    # The shards of a first run would be input of a second one.
    is_folder = not is_remote(inputs) and Path(inputs).is_dir()
    if is_folder and Path(output).resolve().is_relative_to(Path(inputs).resolve()):
        raise InputError(f"{output} lies inside the input {inputs}: give a folder outside of it")


def _require_consistent_options(arguments: argparse.Namespace) -> None:
    fraction = arguments.hold_out
    splits = [name for name, _ in arguments.split]
    if len(set(splits)) < len(splits):
        raise InputError("--split names must differ")
    if fraction is not None and (splits or arguments.input == "-" or not 0 < fraction < 1):
        raise InputError(
            "--hold-out is a fraction between 0 and 1 of a folder or a list, without --split"
        )
    if arguments.group_by and fraction is None:
        raise InputError("--group-by says what --hold-out keeps together: give both")
    if arguments.label is not None and arguments.unlabeled:
        raise InputError("--label says what all labels are: remove it, or --unlabeled")
    if arguments.columns is not None:
        has_label = "label" in Reading.parse(arguments.columns).columns
        if has_label and (arguments.label is not None or arguments.unlabeled):
            raise InputError("--columns has a label: remove it, or --label and --unlabeled")
        if arguments.format is not None:
            raise InputError("--format says what the columns hold: remove it, or --columns")
    if arguments.label is not None and re.fullmatch(r"folder(:|:0+|:.*\D.*)?", arguments.label):
        raise InputError(
            f"--label is {arguments.label}: give folder:1 (the first folder of each path), folder:2"
            " or the like"
        )
    is_folder = is_remote(arguments.input) or Path(arguments.input).is_dir()
    if arguments.root and (splits or is_folder):
        raise InputError("--root is for the paths of a list: remove it where INPUT is no list")


def make_list_options(arguments: argparse.Namespace, split: str) -> ListOptions:
    """Return what the arguments say about a list.

    The list of a --split is read as the rows of its own subset, if it has any.
    """
    subset = arguments.subset or split
    label = arguments.label
    label_folder = None
    if label is not None and label.startswith("folder:"):
        label_folder = int(label.removeprefix("folder:"))
        label = None
    return ListOptions(
        root=arguments.input if split else arguments.root,
        suffix=arguments.suffix,
        columns=arguments.columns,
        format=arguments.format,
        takes_columns=True,
        subset=GROUPS.get(subset, subset) or None,
        is_split=bool(split and not arguments.subset),
        unlabeled=arguments.unlabeled or label is not None,
        constant_label=label,
        label_folder=label_folder,
        has_label_map=arguments.label_map is not None,
    )


def read_splits(
    arguments: argparse.Namespace, settings: Settings, label_map: LabelMap | None, names: list[str]
) -> dict[str, ItemStore]:
    """Read the input of each split, print how it is understood, and refuse or warn of faults."""
    group_of = parse_group_by(arguments.group_by) if arguments.group_by else None
    # True for the files that an earlier run has held out, False for those of its training split.
    earlier_sides: dict[str, bool] = {}
    if arguments.hold_out:
        for name in names:
            for source in list_sources(Path(arguments.output, name)):
                earlier_sides[source] = name == VALIDATION
    lists = dict(arguments.split)
    splits = {}
    for name in names:
        source = lists.get(name, arguments.input)
        inputs = read_inputs(source, make_list_options(arguments, name if lists else ""))
        splits[name] = inputs
        if group_of is None and inputs.has_groups:
            group_of = parse_group_by("column:group")
        if arguments.hold_out:
            inputs.hold_out(arguments.hold_out, name == VALIDATION, group_of, earlier_sides)
            if not len(inputs):
                raise InputError(
                    f"--hold-out leaves no video for {name}: give more videos, or a smaller"
                    " fraction"
                )
        if label_map and not arguments.unlabeled:
            inputs.apply_label_map(label_map)
        inputs.require_distinct_labels()
        for note in (*inputs.notes, inputs.describe()):
            log(note)
        inputs.require_usable(arguments.max_rejects, source)
        warn_of_headers(inputs, settings)
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
            num_pending = sum(len(video) for video in build.list_pending(plan))
            with progress_bar(unit="sample", total=num_pending) as bar:
                num_rejected = 0
                for item in build.run(plan, inputs, run_jobs):
                    if item.problem is not None:
                        num_rejected += 1
                    bar.set_postfix(rejected=num_rejected, refresh=False)
                    bar.update()
            pending_part = build.finish(plan)
            if pending_part is not None:
                part, num_parts = arguments.part
                log(
                    f"part {part} of {num_parts} is done, part {pending_part + 1} is not; the last"
                    f" part to finish completes {printable(build.folder)}"
                )
                return 0
            # Without any usable video, another plan would be the same.
            if not build.info.shards:
                break
        return conclude(build, arguments.max_rejects, inputs.skipped)


def conclude(build: Build, max_rejects: float, skipped: Skipped) -> int:
    """Print the results; return the exit code."""
    rejects = read_rejects(build.folder)
    for source, reason in islice(rejects.items(), NUM_PRINTED):
        log(f"rejected {printable(source)}: {reason}", sys.stderr)
    if len(rejects) > NUM_PRINTED:
        log(f"and {len(rejects) - NUM_PRINTED} more in {build.folder / REJECTED_FILE}", sys.stderr)
    skipped.log()
    info = build.info
    if not info.shards:
        raise InputError(
            f"none of {len(rejects)} videos can be used: see {build.folder / REJECTED_FILE}"
        )
    _log_repeated_files("names", info.report.get("duplicates", []))
    _log_repeated_files("labels", info.report.get("conflicts", []))
    log(
        f"{format_count(info.num_samples, 'sample')}, {format_count(info.num_frames, 'frame')},"
        f" {info.num_bytes / 1e6:.1f} MB in {format_count(len(info.shards), 'shard')},"
        f" {len(rejects)} rejected, {skipped.total} skipped: {build.folder}"
    )
    total = len(rejects) + info.num_samples
    if len(rejects) > max_rejects * total:
        log(
            f"error: {len(rejects)} of {total} videos rejected ({len(rejects) / total:.0%}), limit"
            f" is {max_rejects:.0%}",
            sys.stderr,
        )
        return 3
    return 0


def _log_repeated_files(what: str, groups: list[list[str]]) -> None:
    """Report groups of names that have the same bytes, but differ in `what`."""
    if not groups:
        return
    files = "1 file appears" if len(groups) == 1 else f"{len(groups)} files appear"
    names = ", ".join(map(printable, groups[0][:3]))
    log(f"{files} under several {what}; all were kept (the first: {names})", sys.stderr)


def main(arguments: Sequence[str]) -> int:
    """Make shards as a command line says; return the exit code."""
    return make_shards(parse_arguments(arguments))


def make_shards(parsed: argparse.Namespace) -> int:
    # Contradictions are reported before anything is read.
    settings = choose_settings(parsed)
    require_consistent(parsed)
    label_map = None
    classes: list[str] = []
    if parsed.label_map:
        label_map = read_label_map(parsed.label_map)
        classes = label_map.names
    # Without splits, the dataset lies in OUTPUT itself.
    names = [name for name, _ in parsed.split] or [""]
    if parsed.hold_out:
        names = ["train", VALIDATION]
    part, num_parts = parsed.part
    builds = {}
    for name in names:
        builds[name] = Build(Path(parsed.output, name), settings, (part - 1, num_parts))
    with explain_full_disk():
        splits = read_splits(parsed, settings, label_map, names)
        if parsed.dry_run:
            for inputs in splits.values():
                inputs.skipped.log()
            return 0
        if "" not in splits and not classes:
            classes = _merge_classes(builds, splits)
        code = max(make_dataset(builds[name], parsed, splits[name], classes) for name in names)
        if "" not in splits:
            write_splits_card(Path(parsed.output), names)
    _warn_of_shared_videos(builds, parsed.group_by)
    if code == 0 and num_parts == 1:
        log_next(_advise(Path(parsed.output), builds))
    return code


def _advise(output: Path, builds: dict[str, Build]) -> str:
    """Return the command that uses the shards: a comparison of encoders, or features."""
    fps = next(iter(builds.values())).settings.fps
    # Shards of a lower rate lack the frames of an encoder's own stride.
    rate = ["--fps", f"{fps:g}"] if fps else []
    if {"train", VALIDATION} <= builds.keys() and builds["train"].info.has_one_label:
        return command_line("compare", output, "--models", PUBLISHED, *rate)
    features = output.with_name(f"{output.name}_features")
    return command_line("features", output, features, "--model", PUBLISHED, *rate)


def _merge_classes(builds: dict[str, Build], splits: dict[str, ItemStore]) -> list[str]:
    """Return the classes of all splits, which share ids; those of stored classes stay."""
    stored = max((build.info.classes for build in builds.values()), key=len)
    labels = set[str]()
    for inputs in splits.values():
        labels.update(inputs.labels())
    return assign_class_ids(labels, stored)


def _warn_of_shared_videos(builds: dict[str, Build], how: str | None) -> None:
    """Compare each pair of splits; one without shards will be completed by another part."""
    for name, held_out in combinations(builds, 2):
        if builds[name].info.shards and builds[held_out].info.shards:
            warn_of_shared(name, builds[name].folder, held_out, builds[held_out].folder, how)


if __name__ == "__main__":
    run_command(lambda: make_shards(OPTIONS), resumable=True)
