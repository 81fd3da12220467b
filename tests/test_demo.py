"""The demo is a series of commands, on synthetic videos or on the user's, and so is start."""

from pathlib import Path

import pytest

from adamae import demo, start
from adamae.common.errors import InputError
from adamae.shard_tools.make_shards import main as make_shards
from adamae.training.config import parse

Step = tuple[str, list[str]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Step]:
    """Return the list in which steps are recorded: only shards of videos that exist are made."""
    recorded: list[Step] = []

    def record(step: str, *arguments: object) -> None:
        words = [str(word) for word in arguments]
        recorded.append((step, words))
        if "synthetic_videos" in step:
            Path(words[0]).mkdir(parents=True)
        elif step == "shards" and "--hold-out" in words:
            assert make_shards(words) == 0

    monkeypatch.setattr(demo, "run_step", record)
    monkeypatch.setattr(start, "run_step", record)
    monkeypatch.chdir(tmp_path)
    return recorded


def run_demo(*arguments: str) -> None:
    demo.main(*demo.parse_arguments(list(arguments)))


def read_training(steps: list[Step]) -> list[str]:
    """Return the words of the training, which must be a configuration of train.py."""
    (words,) = [words for step, words in steps if step == "train"]
    parse(words)
    return words


def test_synthetic_videos_are_made_once(steps: list[Step]) -> None:
    run_demo()
    names = [step for step, _ in steps]
    assert names == [
        "shard_tools.synthetic_videos",
        "shard_tools.synthetic_videos",
        "shards",
        "train",
        "visualize",
        "benchmarks.motion_report",
    ]
    assert "data.shards=demo/synthetic/shards" in read_training(steps)
    run_demo()
    assert [step for step, _ in steps].count("shard_tools.synthetic_videos") == 2


def test_a_model_of_ones_own_videos_is_compared_on_those_held_out(
    steps: list[Step], synthetic_videos: Path
) -> None:
    run_demo("--frame-stride", "1", str(synthetic_videos), "--output", "mine")
    words = read_training(steps)
    assert words[2:] == [
        "run=mine/run",
        "data.shards=mine/shards/train",
        "evaluation.shards=mine/shards/validation",
        "data.frame_stride=1",
    ]
    step, words = steps[-1]
    assert step == "compare"
    assert words == ["mine/shards", "--models", "mine/run", "--output", "mine/comparison"]


def test_shards_by_time_are_trained_on_by_time(steps: list[Step], synthetic_videos: Path) -> None:
    run_demo(str(synthetic_videos), "--fps", "15", "--unlabeled")
    assert "data.fps=15" in read_training(steps)
    assert steps[-1][0] == "benchmarks.motion_report", "nothing to compare without labels"


def run_start(*arguments: str) -> None:
    start.main(*start.parse_arguments(list(arguments)))


def test_start_compares_encoders_on_the_videos_that_it_holds_out(
    steps: list[Step], synthetic_videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "check_models", lambda models: None)
    run_start(str(synthetic_videos), "--label", "folder:1", "--models", "a", "hf://b/c")
    (_, _), (step, words) = steps
    assert step == "compare"
    folder = f"start/{synthetic_videos.name}"
    models = ["--models", "a", "hf://b/c"]
    assert words == [f"{folder}/shards", *models, "--output", f"{folder}/comparison"]
    run_start(str(synthetic_videos), "--output", "mine")
    assert steps[-1] == ("compare", ["mine/shards", "--output", "mine/comparison"])


def test_start_opens_models_before_it_makes_shards(
    steps: list[Step], synthetic_videos: Path
) -> None:
    with pytest.raises(InputError, match="nowhere does not exist"):
        run_start(str(synthetic_videos), "--label", "folder:1", "--models", "nowhere")
    assert not steps


def test_start_says_what_videos_without_labels_are_good_for(
    steps: list[Step],
    synthetic_videos: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "check_models", lambda models: None)
    run_start(str(synthetic_videos), "--unlabeled", "--output", "mine", "--models", "a")
    assert [step for step, _ in steps] == ["shards"]
    assert "mine/shards mine/features --model a" in capsys.readouterr().err
    with pytest.raises(InputError, match="which videos"):
        start.parse_arguments(["--models", "a"])
