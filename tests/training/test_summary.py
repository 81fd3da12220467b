"""The results of a run in words."""

import pytest

from adamae.common import commands
from adamae.common.logging import format_duration
from adamae.training.config import parse
from adamae.training.summary import (
    advise_on_run,
    describe_end,
    describe_scores,
    interpret_scores,
)

KNN = {
    "reconstruction_loss": 0.96,
    "knn_top1": 0.651,
    "knn_error": 0.06,
    "knn_neighbors": 20,
    "majority_top1": 0.508,
    "num_videos": 63,
}
KNN_TEXT = "held-out loss 0.960, k-NN 0.651 ± 0.060"
CLASSES = {
    "top1": 0.5,
    "top1_error": 0.015,
    "top5": 0.75,
    "top5_error": 0.013,
    "majority_top1": 0.4,
    "num_videos": 1100,
    "knn_top1": 0.45,
    "knn_error": 0.016,
    "knn_neighbors": 9,
}


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (
            KNN,
            f"{KNN_TEXT} (± standard error; k = 20, one clip; most common class 0.508), 63 videos",
        ),
        ({"reconstruction_loss": 0.5, "num_videos": 9}, "held-out loss 0.500, 9 videos"),
        (
            KNN | {"pixel_top1": 0.6, "difference_top1": 0.55},
            f"{KNN_TEXT} (± standard error; k = 20, one clip; most common class 0.508,"
            " 1-NN of pixels 0.600, frame differences 0.550), 63",
        ),
        (
            CLASSES,
            "top-1 0.500 ± 0.015, top-5 0.750 ± 0.013, k-NN 0.450 ± 0.016 (± standard error; k = 9",
        ),
        (
            KNN | {"rankme": 18.26},
            f"{KNN_TEXT} (± standard error; k = 20, one clip; most common class 0.508), RankMe"
            " 18.3, 63 videos",
        ),
        (
            {"mAP": 0.31, "chance_mAP": 0.08, "num_videos": 40},
            "mAP 0.310 (chance 0.080), 40 videos",
        ),
    ],
)
def test_scores_in_words(metrics: dict[str, float], text: str) -> None:
    assert describe_scores(metrics).startswith(text)


def test_a_score_that_says_nothing_is_said() -> None:
    model = parse(["data.shards=s"]).model
    # 0.651 is 2.4 standard errors above 0.508.
    assert interpret_scores(KNN, model) == []
    (knn,) = interpret_scores(KNN | {"knn_top1": 0.6})
    assert knn.startswith(
        "WARNING: k-NN 0.600 ± 0.060 is not clearly above always predicting the most common class"
        " (0.508"
    )
    (pixels,) = interpret_scores(KNN | {"pixel_top1": 0.635})
    baseline = "the class of the video with the nearest mean gray thumbnail"
    assert f"not clearly above {baseline} (0.635)" in pixels
    (loss,) = interpret_scores(KNN | {"reconstruction_loss": 0.985}, model)
    assert "the mean of each patch (1), so hardly anything has been learned" in loss
    (rank,) = interpret_scores(KNN | {"rankme": 1.3})
    assert "RankMe is 1.3: the features of all videos are nearly alike" in rank
    other = parse(["data.shards=s", "model.normalize_target=false"]).model
    assert interpret_scores(KNN | {"reconstruction_loss": 1.2}, other) == []


def test_a_run_ends_with_its_best_step_and_what_to_do_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "called_as", "adamae train")
    rows = [{"step": 10, "loss": 1.0}]
    for step, top1 in ((100, 0.62), (200, 0.62), (300, 0.5)):
        rows.append(
            {
                "step": step,
                "evaluation/top1": top1,
                "evaluation/top1_error": 0.061,
                "evaluation/majority_top1": 0.4,
                "evaluation/num_videos": 63,
            }
        )
    config = parse(
        ["data.shards=s", "evaluation.shards=mine/validation", "run=runs/x", "task=finetune"]
    )
    result, end = describe_end(rows, config, 0, 300, 336.0)
    assert result == (
        "finished in 5.6 min; best step 100: top-1 0.620 ± 0.061 (± standard error;"
        " most common class 0.400), 63 videos"
    )
    assert end == "report: runs/x/report.html"
    assert advise_on_run(config) == "adamae evaluate runs/x mine/validation"
    result, end = describe_end(rows, config, 300, 300, 1.0)
    longer = "adamae train run=runs/x-longer init_from=runs/x init_keep=optimizer steps=600"
    before = f"runs/x was finished before, after 300 steps; train longer: {longer}; best step 100:"
    assert result.startswith(before)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no evaluation.shards"),
        (["evaluation.shards=s", "evaluation.every=null"], "evaluation.every=null"),
    ],
)
def test_why_a_run_was_not_evaluated(arguments: list[str], reason: str) -> None:
    config = parse(["data.shards=s", "run=runs/x", *arguments])
    assert describe_end([], config, 0, 10, 1.0)[0] == (
        f"finished in 1 s; not evaluated while it trained ({reason})"
    )


def test_the_next_command_names_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "called_as", "adamae train")
    config = parse(["data.shards=[my shards,more]", "run=runs/x"])
    features = "adamae features 'my shards' runs/x/features --model runs/x"
    assert advise_on_run(config) == features
    halves = ["data.shards=m/train", "evaluation.shards=m/validation"]
    assert advise_on_run(parse([*halves, "run=runs/x"])) == "adamae compare m --models runs/x"
    config = parse(["data.shards=s", "evaluation.shards=held out", "run=runs/x"])
    assert advise_on_run(config).startswith("adamae features 'held out' ")
    config = parse(["data.shards=s", "run=runs/x", "task=finetune"])
    assert advise_on_run(config) == "adamae export export runs/x runs/x/export"


def test_durations_are_in_natural_units() -> None:
    seconds = (0.4, 119, 336, 7100, 7300, 86400 * 31, 86400 * 64)
    assert [format_duration(value) for value in seconds] == [
        "0 s",
        "119 s",
        "5.6 min",
        "118 min",
        "2.0 h",
        "31 days",
        "64 days",
    ]
