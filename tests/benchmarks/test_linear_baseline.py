"""Hand-made features and ridge regression."""

from pathlib import Path

import numpy as np
import pytest
import torch
from made_videos import encode, write_shards

from adamae.benchmarks.linear_baseline import classify, describe, describe_videos, ridge_predict
from adamae.common.errors import InputError


def test_ridge_regression_is_that_of_the_least_left_out_error() -> None:
    """With more features (100) than videos (60), regression without a penalty fits any labels."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    centers = 20 * torch.eye(3, 100)
    points = torch.randn(90, 100, generator=random) + centers[labels]

    predicted = ridge_predict(points[:60], labels[:60], points[60:])
    assert (predicted == labels[60:]).float().mean() > 0.9
    # Labels without a relation to the points cannot be learned.
    shuffled = labels[torch.randperm(60, generator=random)]
    predicted = ridge_predict(points[:60], shuffled, points[60:])
    assert (predicted == labels[60:]).float().mean() < 0.7


def test_features_are_of_color_and_of_change() -> None:
    frames = np.zeros((3, 64, 64, 3), np.uint8)
    # The first cell lights up in the middle frame: twice a change of 80, so 80 per frame.
    frames[1, :8, :8] = 80
    color, difference = describe(frames)
    assert color.nonzero()[0].tolist() == [0, 1, 2]
    assert difference[0] == pytest.approx(np.log(81))
    _, difference_of_one_frame = describe(frames[:1])
    assert not difference_of_one_frame.any()


def test_a_class_without_training_videos_is_one_sentence(tmp_path: Path) -> None:
    videos = [("a", encode(6)), ("b", encode(6, first=3))]
    both_shards = write_shards(tmp_path / "both", videos, classes=2)
    one_shards = write_shards(tmp_path / "one", videos[:1], classes=2)
    both = describe_videos(str(both_shards))["mean color"]
    one = describe_videos(str(one_shards))["mean color"]
    assert classify(both, both)["linear_top1"] == 1
    message = "no training video is of 'class 1', but a validation video is"
    with pytest.raises(InputError, match=message):
        classify(one, both)
