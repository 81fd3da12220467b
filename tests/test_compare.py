"""Comparing encoders: the same numbers as elsewhere, resumed, and sentences for what cannot be."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from made_videos import broken_copy, encode, store, write_shards

from adamae.common.errors import InputError
from adamae.compare import main, parse_arguments
from adamae.evaluate import evaluate
from adamae.evaluate import parse_arguments as parse_evaluation
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.shard_tools.make_shards import main as make_shards
from adamae.training.comparison.candidates import choose_default_fps
from adamae.training.comparison.entries import Comparison, Entry
from adamae.training.comparison.splits import open_splits
from adamae.training.comparison.text import PUBLISHED_MODELS, draw_conclusions
from adamae.training.measures import Videos

SHAPE = ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8)
FAST = ["--measures", "knn", "linear"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 12 training and 8 validation videos of two classes, four frames each.

    All videos of a class begin at the same gray, so that their mean color tells them apart.
    """
    folder = tmp_path_factory.mktemp("compare") / "shards"
    for name, num_videos in (("train", 12), ("validation", 8)):
        videos = []
        fields = []
        for index in range(num_videos):
            data = encode(4, first=10 * (index % 2), options={"crf": str(10 + index)})
            videos.append((f"{name}{index}", data))
            fields.append({"group": f"{name} person {index // 3}"})
        write_shards(folder / name, videos, classes=2, fields=fields)
    return folder


def compare(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run the command; return what it has printed."""
    main(parse_arguments([*map(str, arguments)]))
    return capsys.readouterr().out


def read_results(output: Path) -> dict[str, Any]:
    return json.loads((output / "compare.json").read_text())


def find_row(output: Path, name: str) -> dict[str, Any]:
    return next(row for row in read_results(output)["rows"] if row["name"] == name)


def test_the_table_the_page_and_the_numbers(
    shards: Path, write_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(AdaMAE(SHAPE), frame_stride=1)
    output = tmp_path / "out"
    printed = compare(capsys, shards, "--models", run, "--output", output, "--labels", 2)
    table, _, conclusions = printed.partition("\n\n")
    assert max(map(len, table.splitlines())) <= 100
    for name in ("chance", "1-NN of pixels", "mean color", "frame differences", "untrained"):
        assert re.search(rf"^{name}.* [01]\.\d\d\d", table, re.M), name
    assert "8 validation videos in 3 groups, 12 training videos, 2 classes; k = 6" in table
    assert re.search("mean color reaches|decides here|is clearly ahead here", conclusions)
    results = read_results(output)
    assert results["left_out"] == [0, 0]
    assert find_row(output, "mean color")["linear_top1"] == 1
    row = find_row(output, str(run))
    assert row["kind"] == "own"
    assert {"knn_top1", "linear_top1", "attentive_top1", "attentive_penalty"} < row.keys()
    assert row["frames_per_second"] > 0
    assert len(row["linear_top1_by_labels"]["2"]) == 5
    per_class = results["per_class"][f"{run}: linear"]
    assert [of_class["videos"] for of_class in per_class.values()] == [4, 4]
    per_group = results["per_group"][f"{run}: linear"]
    assert [of_group["videos"] for of_group in per_group.values()] == [3, 3, 2]
    # What the numbers say, the lines of videos say.
    with (output / "predictions.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    num_right = sum(line["label"] == line[f"{run}: linear"] for line in lines)
    assert num_right == round(8 * row["linear_top1"])
    page = (output / "compare.html").read_text()
    assert page.count("data:image/jpeg") == 8 * 6
    assert "<script" not in page
    # Fewer measures take the same features.
    times = list_times(output)
    compare(capsys, shards, "--models", run, "--output", output, "--measures", "knn")
    assert list_times(output) == times
    assert find_row(output, str(run))["knn_top1"] == row["knn_top1"]


def test_k_nn_is_that_of_evaluate_for_videos_of_one_window(
    shards: Path, write_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(AdaMAE(SHAPE), frame_stride=1)
    compare(capsys, shards, "--models", run, "--output", tmp_path / "out", *FAST)
    arguments = [str(run), str(shards / "validation"), "--knn", str(shards / "train")]
    arguments += ["--output", str(tmp_path / "knn"), "data.num_workers=1", "precision=fp32"]
    evaluate(parse_evaluation(arguments))
    by_clip = json.loads((tmp_path / "knn/results.json").read_text())
    by_video = find_row(tmp_path / "out", str(run))
    assert by_clip["knn_top1"] == by_video["knn_top1"]
    assert by_clip["knn_error"] == by_video["knn_error"]
    assert by_clip["knn_neighbors"] == read_results(tmp_path / "out")["neighbors"]


def list_times(folder: Path) -> dict[Path, int]:
    """Return when each file of features was written."""
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}


# Slow: five comparisons.
@pytest.mark.slow
def test_features_are_used_again_and_models_are_added(
    shards: Path, write_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(AdaMAE(SHAPE), frame_stride=1)
    options = ["--output", tmp_path / "out", *FAST]
    compare(capsys, shards, *options)
    first = list_times(tmp_path / "out")
    compare(capsys, shards, "--models", run, *options)
    second = list_times(tmp_path / "out")
    assert second.items() > first.items()
    row = find_row(tmp_path / "out", str(run))
    compare(capsys, shards, "--models", run, *options)
    assert list_times(tmp_path / "out") == second
    assert find_row(tmp_path / "out", str(run)) == row
    with pytest.raises(InputError, match="made with other settings"):
        compare(capsys, shards, "--models", run, "--fps", "2", *options)
    assert find_row(tmp_path / "out", str(run)) == row
    # What is missing is made again.
    lost = next(iter(second))
    lost.unlink()
    compare(capsys, shards, "--models", run, *options)
    assert list_times(tmp_path / "out").keys() == second.keys()
    assert find_row(tmp_path / "out", str(run)) == row


# Slow: it imports transformers.
@pytest.mark.slow
def test_an_image_model_has_a_row_with_differences(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    model = tmp_path / "dinov2"
    transformers.Dinov2Model(config).save_pretrained(model)
    settings = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    transformers.BitImageProcessor(**settings).save_pretrained(model)
    output = tmp_path / "out"
    printed = compare(capsys, shards, "--models", model, "--output", output, "--frame-stride", 1)
    assert find_row(output, str(model))["kind"] == "published"
    with_differences = find_row(output, f"{model} + differences")
    assert {"knn_top1", "linear_top1"} < with_differences.keys()
    assert "attentive_top1" not in with_differences
    assert "dinov2 + differences" in printed


def test_videos_that_cannot_be_read_are_left_out_of_all_rows(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "validation"):
        # The stored codec has no slack: what is flipped cannot be decoded.
        broken_copy(shards / name, tmp_path / "broken" / name, {f"{name}2"}, start=0.1)
    printed = compare(capsys, tmp_path / "broken", "--output", tmp_path / "out", *FAST)
    assert "left out, as they cannot be read: 1 training and 1 validation videos" in printed
    assert read_results(tmp_path / "out")["left_out"] == [1, 1]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("", ["--neighbors", "13"], "--neighbors 13 is more than the 12 training videos: lower it"),
        ("", ["--labels", "3", "7"], "--labels 7 is more than the 6 training videos of the small"),
        ("", ["--models", "a", "b", "a"], "--models names a twice"),
        ("", ["--models", "nowhere"], "nowhere does not exist"),
        ("multi-label", [], "several labels or none, and only videos with one label are compared"),
        ("one class", [], "has videos of 1 class: add videos of another one"),
        ("untrained class", [], "no training video is of 'class 1', but 3 of the validation vid"),
        ("unlabeled", [], "has no labels"),
        ("no split", [], r"has no train/ and validation/ of shards: `.* --hold-out 0.2`, then"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    shards: Path, tmp_path: Path, change: str, options: list[str], message: str
) -> None:
    source = shards
    videos = [("a", store("h264", 4)), ("b", store("h264", 4, first=3))]
    if change:
        source = tmp_path / "shards"
        (source / "validation").parent.mkdir()
        (source / "validation").symlink_to(shards / "validation")
    if change == "multi-label":
        write_shards(source / "train", videos, classes=2, labels=[(0, 1), (1,)])
    elif change == "one class":
        write_shards(source / "train", videos, classes=1)
        (source / "validation").unlink()
        write_shards(source / "validation", videos, classes=1)
    elif change == "untrained class":
        videos = [(name, data) for name, data in zip("abcd", [videos[0][1]] * 4, strict=True)]
        labels = [(0,), (2,), (0,), (2,)]
        write_shards(source / "train", videos, labels=labels, classes=3)
        (source / "validation").unlink()
        write_shards(source / "validation", videos, labels=[(1,), (0,), (1,), (1,)], classes=3)
    elif change == "unlabeled":
        write_shards(source / "train", videos)
    output = tmp_path / "out"
    with pytest.raises(InputError, match=message) as raised:
        main(parse_arguments([str(source), "--output", str(output), *options]))
    assert "\n" not in str(raised.value)
    assert not (output / "compare.json").exists()


def test_an_untrained_encoder_takes_the_channels_of_the_videos(
    write_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(8):
        folder = tmp_path / "in" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{number}.npy", np.full((6, 32, 32, 5), 30 * number, np.uint8))
    shards = tmp_path / "shards"
    assert make_shards([str(tmp_path / "in"), str(shards), "--hold-out", "0.5"]) == 0
    output = tmp_path / "out"
    compare(capsys, shards, "--output", output, "--measures", "knn", "--fps", 8)
    assert find_row(output, "untrained encoder")["knn_top1"] >= 0
    # Other encoders are refused before any video is encoded.
    run = write_run(AdaMAE(SHAPE), frame_stride=1)
    with pytest.raises(InputError, match=r"takes 3 channels, and the videos of .* have 5: leave"):
        compare(capsys, shards, "--models", run, "--output", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def make_comparison(shards: Path, rights: dict[str, int]) -> Comparison:
    """Return a comparison of rows that are right for so many of 100 videos, the first ones."""
    labels = torch.arange(100) % 2
    identities = torch.arange(300).view(100, 3)
    videos = Videos(torch.empty(100, 0), labels, identities)
    comparison = Comparison(open_splits(str(shards)), "group", videos, videos, 5)
    kinds: dict[str, Any] = {"runs/mine": "own", "hf://they/video": "published"}
    kinds["untrained encoder"] = "untrained"
    kinds |= dict.fromkeys(PUBLISHED_MODELS, "published")
    for name, num_right in rights.items():
        predicted = np.where(np.arange(100) < num_right, labels, 1 - labels)
        kind = kinds.get(name, "without an encoder")
        comparison.entries.append(Entry(name, kind, {"knn": predicted}, model=name))
    return comparison


ARGUMENTS = ["shards", "--output", "out"]
BASELINES = {"most common class": 50, "1-NN of pixels": 52, "mean color": 45}
HIGH = BASELINES | {"frame differences": 70, "untrained encoder": 65}


@pytest.mark.parametrize(
    ("rights", "sentences"),
    [
        (
            HIGH | {"runs/mine": 66, "hf://they/video": 92},
            [
                "Motion decides here: frame differences reach 0.700, 1-NN of pixels 0.520",
                "hf://they/video (k-NN) is ahead of frame differences by 0.220 ± 0.0",
                "runs/mine is not clearly ahead of an untrained encoder (+0.010 ±",
                "The published encoder hf://they/video is ahead of runs/mine by 0.260",
                "next: python .*extract_features.py .*/train features/video --model hf://they/vid",
            ],
        ),
        (
            HIGH | {"runs/mine": 95, "hf://they/video": 80},
            [
                "runs/mine (k-NN) is ahead of frame differences by 0.250",
                "Pre-training on your videos pays: runs/mine is ahead of hf://they/video by 0.150",
                "next: python .*extract_features.py .* --model runs/mine",
            ],
        ),
        (
            HIGH | {"runs/mine": 71},
            [
                "No encoder is clearly ahead of frame differences: the best one, runs/mine (k-NN)",
                # The page of before, with one more model.
                "next: python .*compare.py shards --output out --models hf://MCG-NJU/videomae-base",
            ],
        ),
        (
            BASELINES | {"1-NN of pixels": 56, "frame differences": 53, "untrained encoder": 50},
            ["Neither motion nor appearance is clearly ahead here: frame differences reach 0.530"],
        ),
        (
            BASELINES | {"frame differences": 51, "untrained encoder": 50, "hf://they/video": 30},
            [
                "What needs no encoder says little about these classes",
                "An untrained encoder is ahead of hf://they/video by 0.200 ±",
                "No encoder reaches 1-NN of pixels: the best one, hf://they/video (k-NN), is behin",
                "Label more videos, and make shards of all of them, or compare another encoder.",
                "next: python .*compare.py shards --output out --models hf://",
            ],
        ),
    ],
)
def test_what_it_means_is_said(shards: Path, rights: dict[str, int], sentences: list[str]) -> None:
    text = "\n".join(draw_conclusions(make_comparison(shards, rights), ARGUMENTS))
    for sentence in sentences:
        pattern = sentence if sentence.startswith("next") else re.escape(sentence)
        assert re.search(pattern, text), sentence


def test_models_that_were_compared_are_not_suggested(shards: Path) -> None:
    """`next` names each published encoder once, and no command when none is left."""
    rights = HIGH | dict.fromkeys(PUBLISHED_MODELS[:1], 70)
    text = draw_conclusions(make_comparison(shards, rights), ARGUMENTS)
    assert text[-1].endswith(f"--models {PUBLISHED_MODELS[1]}")
    # What it names can be given to the command as it stands.
    options = parse_arguments([*ARGUMENTS, "--models", "a", "--models", "b"])
    assert options.models == ["a", "b"]
    rights |= dict.fromkeys(PUBLISHED_MODELS, 70)
    text = draw_conclusions(make_comparison(shards, rights), ARGUMENTS)
    assert text[-1] == "Label more videos, and make shards of all of them."


@pytest.mark.parametrize(("stored", "expected"), [(25, 8), (6.25, 6.25), (1, 4)])
def test_frames_made_by_hand_are_not_repeated(
    tmp_path: Path, stored: float, expected: float
) -> None:
    """Shards that are thinned to fewer than 8 frames per second have their own rate."""
    for name in ("train", "validation"):
        videos = [(f"{name}{index}", encode(4)) for index in range(2)]
        write_shards(tmp_path / name, videos, classes=2, fps=[stored] * 2)
    assert choose_default_fps(open_splits(str(tmp_path))) == expected


@pytest.mark.parametrize(("num_groups", "expected"), [(1, "one group"), (5, "5 groups"), (6, "")])
def test_few_groups_are_said_to_be_few(shards: Path, num_groups: int, expected: str) -> None:
    comparison = make_comparison(shards, HIGH | {"runs/mine": 90})
    comparison.queries.identities[:, 2] = torch.arange(100) % num_groups
    text = "\n".join(draw_conclusions(comparison, ARGUMENTS))
    assert (f"All validation videos are of {expected}:" in text) == bool(expected)
