"""Measures of features, checked by hand and by scikit-learn."""

from pathlib import Path

import numpy as np
import pytest
import torch
from made_videos import encode, write_shards
from sklearn.linear_model import RidgeClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from adamae.common.errors import InputError
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.frozen_classifiers import (
    ATTENTIVE_PENALTIES,
    RIDGE_PENALTIES,
    AttentiveWeights,
    RidgePath,
    compute_logits,
    fit_attentive,
    fit_linear,
    minimize_loss,
    split_folds,
)
from adamae.training.measures import (
    KNN_TEMPERATURE,
    NO_CLASS,
    Videos,
    average_colors,
    average_differences,
    choose_neighbors,
    find_allowed,
    find_majority,
    identify_videos,
    make_thumbnails,
    predict_by_nearest,
    predict_by_neighbors,
)
from adamae.training.uncertainty import estimate_accuracy, estimate_difference


def make_videos(features: torch.Tensor, labels: torch.Tensor, first: int = 0) -> Videos:
    """Return videos that share nothing, numbered from `first`."""
    identities = torch.arange(first, first + 3 * len(labels)).view(-1, 3)
    return Videos(features, labels, identities)


def make_clusters(num_videos: int, num_features: int = 100) -> Videos:
    """Return videos of three classes, whose features have the class in three of them."""
    labels = torch.arange(num_videos) % 3
    noise = torch.randn(num_videos, num_features)
    return make_videos(noise + 20 * torch.eye(3, num_features)[labels], labels)


def test_neighbors_vote_as_in_scikit_learn() -> None:
    references = make_videos(torch.randn(60, 8) + 5, torch.arange(60) % 4)
    queries = make_videos(torch.randn(30, 8) + 5, torch.arange(30) % 4, first=1000)
    center = references.features.mean(dim=0)

    def weigh(distances: np.ndarray) -> np.ndarray:
        return np.exp((1 - distances) / KNN_TEMPERATURE)

    peer = KNeighborsClassifier(7, metric="cosine", weights=weigh)
    peer.fit((references.features - center).numpy(), references.labels.numpy())
    expected = peer.predict((queries.features - center).numpy())
    assert predict_by_neighbors(queries, references, 7).tolist() == expected.tolist()
    # The deviation over the windows of a video with a single one is 0, and changes nothing.
    wide_queries = queries._replace(features=torch.nn.functional.pad(queries.features, (0, 8)))
    wide = references._replace(features=torch.nn.functional.pad(references.features, (0, 8)))
    assert predict_by_neighbors(wide_queries, wide, 7).tolist() == expected.tolist()


def test_neighbors_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    references = make_videos(torch.randn(40, 4), torch.arange(40) % 4)
    queries = make_videos(torch.randn(30, 4), torch.arange(30) % 4, first=20)
    predicted = predict_by_neighbors(queries, references, 5)
    nearest = predict_by_nearest(queries, references)
    monkeypatch.setattr("adamae.training.measures.MAX_SIMILARITIES", 100)
    assert torch.equal(predict_by_neighbors(queries, references, 5), predicted)
    assert torch.equal(predict_by_nearest(queries, references), nearest)


def test_videos_that_share_something_are_no_neighbors() -> None:
    features = torch.tensor([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.0]])
    references = make_videos(features, torch.tensor([0, 0, 1]))
    # The first query shares its group with both of its class, the second its source with all.
    identities = torch.tensor([[90, 91, 2], [92, 1, 93]])
    references.identities[1, 2] = 2
    references.identities[:, 1] = 1
    identities[0, 1] = 94
    queries = Videos(features[:2], torch.tensor([0, 0]), identities)
    assert find_allowed(identities, references.identities).tolist() == [
        [False, False, True],
        [False] * 3,
    ]
    assert predict_by_neighbors(queries, references, 2).tolist() == [1, NO_CLASS]
    assert predict_by_nearest(queries, references).tolist() == [1, NO_CLASS]


def test_groups_are_fields_or_else_sources(tmp_path: Path) -> None:
    videos = [(name, encode(4, first=5 * i)) for i, name in enumerate("abcd")]
    fields = [{"group": "x"}, {"group": "x"}, {"group": "y"}, {}]
    folder = write_shards(tmp_path / "references", videos, classes=2, fields=fields)
    references = ShardDataset.open(folder)
    videos = [videos[0], ("e", encode(4, first=50))]
    folder = write_shards(tmp_path / "queries", videos, classes=2, fields=[{"group": "y"}, {}])
    queries = ShardDataset.open(folder)
    identities, reference_identities = identify_videos(
        [queries.samples, references.samples], "group"
    )
    allowed = find_allowed(identities, reference_identities)
    assert allowed.tolist() == [[False, True, False, True], [True] * 4]
    groups = reference_identities[:, 2].tolist()
    assert groups[0] == groups[1]
    assert len(set(groups)) == 3


def test_k_is_at_most_the_smallest_class() -> None:
    assert choose_neighbors(torch.tensor([0] * 30 + [2] * 7)) == 7
    assert choose_neighbors(torch.arange(2).repeat(50)) == 20
    assert choose_neighbors(torch.tensor([0, 1]), 2) == 2
    with pytest.raises(InputError, match="--neighbors 3 is more than the 2 training videos"):
        choose_neighbors(torch.tensor([0, 1]), 3)
    assert find_majority(torch.tensor([0, 1, 1, 2])) == 1


def test_thumbnails_are_mean_and_gray() -> None:
    """Colors, noise and the order of frames have no effect on them."""
    # The left half of every other clip is bright.
    clips = torch.randint(0, 100, (4, 3, 32, 48, 3), dtype=torch.uint8)
    clips[1::2, :, :, :24] += 100
    thumbnails = make_thumbnails(clips)
    assert thumbnails.shape == (4, 256)
    torch.testing.assert_close(thumbnails.mean(dim=1), clips.float().mean(dim=(1, 2, 3, 4)))
    assert torch.equal(thumbnails, make_thumbnails(clips.flip(1, 4)))
    distances = torch.cdist(thumbnails, thumbnails)
    assert distances[0, 2] < distances[0, 1]


def test_features_are_of_color_and_of_change() -> None:
    frames = torch.zeros(1, 3, 64, 64, 3, dtype=torch.uint8)
    # The first cell lights up in the middle frame: twice a change of 80, so 80 per frame.
    frames[0, 1, :8, :8, 0] = 80
    color = average_colors(frames)[0]
    assert color.nonzero().tolist() == [[0]]
    assert color[0] == pytest.approx(80 / 3)
    difference = average_differences(frames)[0]
    assert difference.nonzero().tolist() == [[0]]
    # Of one channel of three.
    assert difference[0] == pytest.approx(np.log1p(80 / 3))
    assert not average_differences(frames[:, 1:2]).any()


@pytest.mark.parametrize("kind", ["linear", "attentive"])
def test_classifiers_learn_what_is_there_and_nothing_else(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more features (100) than videos (60), a fit without a penalty has any labels."""
    # Enough for so few tokens, in a quarter of the time.
    monkeypatch.setattr("adamae.training.frozen_classifiers.MAX_STEPS", 8)
    videos = make_clusters(90)
    shuffled = videos._replace(labels=videos.labels[torch.randperm(90)])
    accuracies = []
    for labeled in (videos, shuffled):
        training = labeled.select(slice(60))
        queries = labeled.select(slice(60, None))
        if kind == "linear":
            fitted = fit_linear(queries, training)
            assert fitted.penalty in RIDGE_PENALTIES
        else:
            # Four tokens, of which one has the features.
            tokens = torch.randn(90, 4, 96)
            tokens[:, 2] = labeled.features[:, :96]
            fitted = fit_attentive(queries, tokens[60:], training, tokens[:60])
            assert fitted.penalty in ATTENTIVE_PENALTIES
        accuracies.append((fitted.predicted == queries.labels).float().mean())
    assert accuracies[0] > 0.9
    assert accuracies[1] < 0.7


def test_few_tokens_are_fitted_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def compute(tokens: torch.Tensor, weights: AttentiveWeights) -> torch.Tensor:
        threads.add(torch.get_num_threads())
        return compute_logits(tokens, weights)

    monkeypatch.setattr("adamae.training.frozen_classifiers.compute_logits", compute)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        labels = torch.arange(6) % 2
        zeros = AttentiveWeights(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2))
        minimize_loss(torch.randn(6, 3, 4), labels, zeros, 0.1)
        assert threads == {1}
        monkeypatch.setattr("adamae.training.frozen_classifiers.NUMBERS_PER_THREAD", 24)
        minimize_loss(torch.randn(6, 3, 4), labels, zeros, 0.1)
        assert threads == {1, 3}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(num_threads)


def test_ridge_regression_is_that_of_scikit_learn() -> None:
    """Also with a feature that never changes, and with more features than videos."""
    for num_features in (30, 100):
        videos = make_clusters(90, num_features)
        videos.features.mul_(0.2)[:, -1] = 7
        training = videos.select(slice(60))
        path = RidgePath(training, 3)
        for penalty in (1.0, 100.0, 1e4):
            peer = make_pipeline(StandardScaler(), RidgeClassifier(penalty))
            peer.fit(training.features.numpy(), training.labels.numpy())
            expected = peer.predict(videos.features.numpy())
            assert path.predict(videos.features, penalty).tolist() == expected.tolist()


def test_no_group_is_in_two_folds() -> None:
    videos = make_clusters(40)
    videos.identities[:, 2] = torch.arange(40) // 5
    folds = split_folds(videos, 4)
    assert len(folds) == 4
    groups = videos.groups.numpy()
    for learned, validated in folds:
        assert not set(groups[learned]) & set(groups[validated])
    videos.identities[:, 2] = 7
    assert split_folds(videos, 4) == []
    # A penalty is needed all the same.
    assert (fit_linear(videos, videos).predicted == videos.labels).all()


def test_errors_are_over_groups() -> None:
    random = np.random.default_rng(1)
    is_right = random.random(400) < 0.7
    independent = estimate_accuracy(is_right, np.arange(400))
    assert independent.value == pytest.approx(is_right.mean())
    assert independent.error == pytest.approx((0.7 * 0.3 / 400) ** 0.5, rel=0.1)
    # Four copies of each of 100 videos say as much as these.
    copied = estimate_accuracy(np.repeat(is_right[:100], 4), np.repeat(np.arange(100), 4))
    assert copied.error == pytest.approx((0.7 * 0.3 / 100) ** 0.5, rel=0.15)
    # Eleven right videos of eleven are no certainty.
    assert estimate_accuracy(np.ones(11, bool), np.arange(11)).error > 0.05


def test_differences_are_paired() -> None:
    random = np.random.default_rng(1)
    is_right = random.random(400) < 0.5
    better = is_right | (random.random(400) < 0.1)
    gain = estimate_difference(better, is_right, np.arange(400))
    assert gain.value == pytest.approx(better.mean() - is_right.mean())
    assert gain.error < 0.5 * estimate_accuracy(is_right, np.arange(400)).error
    # A single group says nothing about others.
    assert estimate_difference(better, is_right, np.zeros(400, int)).error > gain.error
