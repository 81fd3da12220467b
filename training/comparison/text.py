"""Say what a comparison has found: the table, what it means, and the next command."""

from collections.abc import Sequence
from pathlib import Path

from adamae.common.commands import PUBLISHED, command_line
from adamae.common.logging import format_count, printable
from adamae.training.comparison.candidates import UNTRAINED
from adamae.training.comparison.entries import Comparison, Entry
from adamae.training.uncertainty import Estimate

# What a row may be measured by, in the order of the columns. Rows without features have one of the
# last two, which stands in the first column.
TITLES = {
    "knn": "k-NN",
    "linear": "linear",
    "attentive": "attentive",
    "nearest": "1-NN",
    "constant": "constant",
}
COLUMNS = ("knn", "linear", "attentive")
MAX_NAME = 24
# Differences of so many standard errors are clear.
CLEAR = 2
# What is tried next, the fastest first.
PUBLISHED_MODELS = (PUBLISHED, "hf://facebook/dinov2-base", "hf://facebook/vjepa2-vitl-fpc64-256")
# With fewer, the bootstrap's standard errors are too small by a tenth and more.
MIN_GROUPS = 6
# Fine-tuning all weights on fewer training videos was not better than a classifier of features.
MIN_FINETUNED = 200


def describe_table(comparison: Comparison) -> list[str]:
    """Return the lines of the table, of up to 100 characters."""
    splits = comparison.splits
    lines = [
        f"{format_count(len(splits.validation.samples), 'validation video')} in"
        f" {format_count(comparison.num_groups, 'group')},"
        f" {format_count(len(splits.training.samples), 'training video')},"
        f" {len(splits.classes)} classes; k = {comparison.num_neighbors}, all windows"
    ]
    if splits.training.num_left_out or splits.validation.num_left_out:
        lines.append(
            f"left out, as they cannot be read: {splits.training.num_left_out} training and"
            f" {splits.validation.num_left_out} validation videos"
        )
    titles = "".join(f"{TITLES[measure]:>15}" for measure in COLUMNS)
    lines.append(f"{'accuracy':{MAX_NAME}}{titles}{'gain':>15}{'frames/s':>9}{'GiB':>6}")
    lines += [describe_row(comparison, entry) for entry in comparison.entries]
    lines.append(
        f"gain: of a row's best column over {comparison.baseline.name}, the best without an encoder"
    )
    lines.append("±: standard error over groups; of the gain, of differences by video")
    return lines


def describe_row(comparison: Comparison, entry: Entry) -> str:
    """Return a row of the table, with its accuracies, its gain and its cost."""
    cells = []
    for measure in COLUMNS:
        cell = str(comparison.estimate(entry, measure)) if measure in entry.predicted else ""
        cells.append(f"{cell:>15}")
    if entry.name == "chance":
        cells[0] = f"{comparison.chance:15.3f}"
    for measure in ("nearest", "constant"):
        if measure in entry.predicted:
            cells[0] = f"{comparison.estimate(entry, measure)!s:>15}"
    gain = ""
    cost = ""
    if entry.speed is not None:
        gain = format_gain(comparison.subtract(entry, comparison.baseline))
        cost = f"{entry.speed.frames_per_second:9,.0f}{entry.speed.gib:6.1f}"
    return f"{shorten(entry.name):{MAX_NAME}}{''.join(cells)}{gain:>15}{cost}".rstrip()


def shorten(name: str) -> str:
    """Return the end of a name that is too long for the table, as runs differ at their ends."""
    name = printable(name)
    if len(name) <= MAX_NAME - 1:
        return name
    return "…" + name[2 - MAX_NAME :]


def format_gain(gain: Estimate) -> str:
    return f"{gain.value:+.3f} ± {gain.error:.3f}"


def is_clear(difference: Estimate) -> bool:
    """Return whether a difference is above 0 by more than CLEAR standard errors."""
    return difference.value > CLEAR * difference.error


def draw_conclusions(comparison: Comparison, arguments: Sequence[str]) -> list[str]:
    """Return what the comparison means, in sentences, and the next command.

    arguments: of the command that has compared; a next comparison takes them, too.
    """
    sentences = [describe_cue(comparison), *warn_of_few_groups(comparison)]
    baseline = comparison.baseline
    best = comparison.find_best("published", "own")
    if best is None:
        sentences.append("No model was compared: name some with --models.")
        return [*sentences, f"next: {suggest_published(comparison, arguments)}"]
    sentences.append(describe_gain(comparison, best, baseline))
    own = comparison.find_best("own")
    published = comparison.find_best("published")
    for entry in (own, published):
        if entry is not None:
            sentences += compare_untrained(comparison, entry)
    if own is not None and published is not None:
        sentences.append(compare_own(comparison, own, published))
    return [*sentences, *suggest_next(comparison, arguments)]


def describe_cue(comparison: Comparison) -> str:
    """Return whether motion or appearance decides, by what needs no encoder."""
    motion = comparison.find_entry("frame differences")
    scenes = [comparison.find_entry(name) for name in ("1-NN of pixels", "mean color")]
    scenes = [scene for scene in scenes if scene.predicted]

    def rate(entry: Entry) -> float:
        return comparison.estimate(entry, comparison.find_best_measure(entry)).value

    scene = max(scenes, key=rate)
    majority = comparison.find_entry("most common class")
    if not motion.predicted:
        return f"{scene.name} reaches {rate(scene):.3f} without an encoder."
    reached = (
        f"frame differences reach {rate(motion):.3f}, {scene.name} {rate(scene):.3f}, and the most"
        f" common class {rate(majority):.3f}"
    )
    if is_clear(comparison.subtract(motion, scene)):
        return f"Motion decides here: {reached}."
    if is_clear(comparison.subtract(scene, motion)):
        return f"Appearance decides here: {reached}."
    gains = [comparison.subtract(entry, majority) for entry in (motion, scene)]
    if any(is_clear(gain) for gain in gains):
        return f"Neither motion nor appearance is clearly ahead here: {reached}."
    return f"What needs no encoder says little about these classes: {reached}."


def warn_of_few_groups(comparison: Comparison) -> list[str]:
    """Return a sentence if so few groups are held out that errors over them are uncertain."""
    num_groups = comparison.num_groups
    if num_groups >= MIN_GROUPS:
        return []
    groups = "one group" if num_groups == 1 else f"{num_groups} groups"
    return [
        f"All validation videos are of {groups}: accuracies on others may be quite different."
        " Hold out more groups."
    ]


def describe_gain(comparison: Comparison, best: Entry, baseline: Entry) -> str:
    """Return whether the best encoder is worth its cost."""
    gain = comparison.subtract(best, baseline)
    measure = TITLES[comparison.find_best_measure(best)]
    name = f"{printable(best.name)} ({measure})"
    if is_clear(gain):
        return f"{name} is ahead of {baseline.name} by {gain}: use its features."
    if is_clear(Estimate(-gain.value, gain.error)):
        return (
            f"No encoder reaches {baseline.name}: the best one, {name}, is behind by"
            f" {Estimate(-gain.value, gain.error)}."
        )
    return (
        f"No encoder is clearly ahead of {baseline.name}: the best one, {name}, gains"
        f" {format_gain(gain)}."
    )


def compare_untrained(comparison: Comparison, entry: Entry) -> list[str]:
    """Return a sentence if an encoder is not ahead of random weights."""
    gain = comparison.subtract(entry, comparison.find_entry(UNTRAINED))
    behind = Estimate(-gain.value, gain.error)
    name = printable(entry.name)
    if is_clear(behind):
        return [
            f"An untrained encoder is ahead of {name} by {behind}: what {name} was trained on does"
            " not help with these classes."
        ]
    if not is_clear(gain):
        return [
            f"{name} is not clearly ahead of an untrained encoder ({format_gain(gain)}): its"
            " training has not taught it these classes."
        ]
    return []


def compare_own(comparison: Comparison, own: Entry, published: Entry) -> str:
    """Return whether pre-training has paid beside published weights."""
    lead = comparison.subtract(published, own)
    behind = Estimate(-lead.value, lead.error)
    name = printable(own.name)
    other = printable(published.name)
    if is_clear(lead):
        num_videos = f"{len(comparison.splits.training.samples):,}"
        return (
            f"The published encoder {other} is ahead of {name} by {lead}: use its features;"
            f" pre-training does not reach it (there are {num_videos} training videos)."
        )
    if is_clear(behind):
        return f"Pre-training on your videos pays: {name} is ahead of {other} by {behind}."
    return f"{name} and {other} are not clearly different ({format_gain(behind)})."


def suggest_published(comparison: Comparison, arguments: Sequence[str]) -> str:
    """Return the command that also compares published weights; "" if all of them are compared."""
    compared = {entry.model for entry in comparison.entries}
    for model in PUBLISHED_MODELS:
        if model not in compared:
            return command_line("compare", *arguments, "--models", model)
    return ""


def suggest_next(comparison: Comparison, arguments: Sequence[str]) -> list[str]:
    """Return the command that a user would run next, after what it cannot do for them."""
    training = comparison.splits.training
    best = comparison.find_best("published", "own")
    assert best is not None
    if is_clear(comparison.subtract(best, comparison.baseline)):
        folder = Path("features") / Path(best.model).name
        features = command_line("features", training.location, folder, "--model", best.model)
        return [f"next: {features}"]
    own = comparison.find_best("own")
    published = suggest_published(comparison, arguments)
    if comparison.find_best("published") is None:
        return [f"next: {published}"]
    if own is None or len(training.samples) < MIN_FINETUNED:
        # With few labels, more of them tell more than another classifier.
        advice = "Label more videos, and make shards of all of them"
        if not published:
            return [f"{advice}."]
        return [f"{advice}, or compare another encoder.", f"next: {published}"]
    finetune = command_line(
        "train",
        "--config",
        "configs/finetune_small.yaml",
        f"init_from={own.model}",
        "run=runs/tuned",
        f"data.shards={training.location}",
        f"evaluation.shards={comparison.splits.validation.location}",
    )
    return [f"next: {finetune}"]
