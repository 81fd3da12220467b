"""Evaluating a classifier: every video once, the same at any number of ranks, no failure hidden."""

import csv
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import numpy as np
import pytest
import torch
from made_videos import broken_copy
from PIL import Image
from processes import free_port
from safetensors.torch import save_file
from tiny import TINY

from adamae.common.errors import InputError
from adamae.evaluate import (
    describe_groups,
    evaluate,
    list_predictions,
    make_results,
    parse_arguments,
    score_groups,
)
from adamae.model.adamae import AdaMAE
from adamae.model.classifier import VideoClassifier
from adamae.model.config import ModelConfig
from adamae.model.weights import pretrained
from adamae.model.weights.external_layouts import to_external
from adamae.model.weights.pretrained import load
from adamae.pipeline.config import DataConfig
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.plan import EvaluationPlan
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.train import train
from adamae.training.config import TrainConfig, parse
from adamae.training.distributed import Distributed
from adamae.training.evaluation import Evaluator, Predictions, average_precision
from adamae.training.logger import read_rows
from adamae.training.summary import interpret_scores

ROOT = Path(__file__).parents[1]
ALONE = Distributed("cpu")
SHAPE = ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8)
VIEWS = ["--clips", "2", "--crops", "3", "--batch-size", "6"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, synthetic_shards: Path) -> Path:
    """Fine-tune a model for a few steps, so that not all videos look the same to it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = [
        "task=finetune",
        f"data.shards={synthetic_shards}",
        f"run={folder}",
        "batch_size=8",
        "checkpoint_every=100",
        "data.flip=false",
        "optimizer.base_lr=0.1",
        "finetune.mixup=0",
        "finetune.cutmix=0",
        f"evaluation.shards={synthetic_shards}",
        "evaluation.every=100",
    ]
    train(parse([*TINY, *settings]))
    return folder


def results_of(output: Path, *arguments: object) -> dict[str, Any]:
    evaluate(parse_arguments([*map(str, arguments), "--output", str(output)]))
    return json.loads((output / "results.json").read_text())


def test_a_run_is_evaluated_as_during_training_and_so_is_its_export(
    run_folder: Path, synthetic_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = results_of(tmp_path, run_folder, synthetic_shards)
    stderr = capsys.readouterr().err
    bias = "16 of these 16 videos: accuracy is optimistically biased"
    assert f"the run was trained on {bias}" in stderr
    assert f"best weights were selected on {bias}" in stderr
    warning = "is not clearly above always predicting the most common class (0.500)"
    assert stderr.count(warning) == (1 if results["top1"] < 0.7 else 0)
    assert results["majority_top1"] == 0.5
    rows = read_rows(run_folder / "metrics.jsonl")
    (validated,) = (row for row in rows if "evaluation/top1" in row)
    assert results["num_videos"] == 16
    for name in ("top1", "nll"):
        assert results[name] == validated[f"evaluation/{name}"]
    assert sum(map(sum, results["confusion"])) == 16
    assert Image.open(tmp_path / "confusion.png").width > 300
    with (tmp_path / "predictions.csv").open(newline="") as file:
        predictions = list(csv.DictReader(file))
    sources = {sample.source for sample in ShardDataset.open(synthetic_shards).samples}
    assert {row["source"] for row in predictions} == sources
    for row in predictions:
        assert row["source"].startswith(row["label"])
        assert 0.5 <= float(row["probability"]) <= 1
    num_correct = sum(row["label"] == row["predicted"] for row in predictions)
    assert num_correct == round(16 * results["top1"])

    exported = tmp_path / "huggingface.safetensors"
    save_file(to_external(load(run_folder / "checkpoints" / "best").state, "huggingface"), exported)
    config = ("--config", run_folder / "config.yaml")
    of_export = results_of(tmp_path / "of_export", exported, synthetic_shards, *config)
    # Baselines compare with the training videos, which an export does not name.
    assert 0 <= results.pop("pixel_top1") <= 1
    assert 0 <= results.pop("difference_top1") <= 1
    assert results.pop("knn_videos") == 16
    assert results.pop("knn_neighbors") == 8
    assert {**of_export, "checkpoint": results["checkpoint"]} == results
    assert "optimistically biased" not in capsys.readouterr().err


def test_accuracies_per_group_are_of_the_videos_that_have_one() -> None:
    groups = ("b", "b", "a", None)
    samples = [SimpleNamespace(fields={"person": group} if group else {}) for group in groups]
    dataset: Any = SimpleNamespace(samples=samples)
    # Classes 0, 1, 1 and 1 are predicted.
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.4, 0.6]])
    labels = torch.tensor([0, 0, 1, 0])
    predictions = Predictions(probabilities, labels, torch.arange(4))
    expected = {"a": {"videos": 1, "top1": 1.0}, "b": {"videos": 2, "top1": 0.5}}
    assert score_groups(predictions, dataset, "person") == {"per_group": expected}
    assert describe_groups(expected) == "2 groups: top-1 0.500 (b) to 1.000 (a)"
    assert score_groups(predictions, dataset, "group") == {}


def test_neighbors_by_weights_without_a_run(
    synthetic_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "model.safetensors"
    pretrained.save(weights, AdaMAE(SHAPE).state_dict(), pretrained.make_metadata(SHAPE))
    sampled = ["data.frame_stride=2", "data.num_workers=1"]
    knn = ["--knn", synthetic_shards]
    results = results_of(tmp_path / "default", weights, synthetic_shards, *knn, *sampled)
    assert results["num_videos"] == 16
    assert results["knn_neighbors"] == 8, "both classes have eight videos"
    assert {"knn_top1", "pixel_top1", "difference_top1", "majority_top1"} < results.keys()
    knn += ["--neighbors", 3]
    results = results_of(tmp_path / "three", weights, synthetic_shards, *knn, *sampled)
    assert results["knn_neighbors"] == 3
    baselines = r"most common class 0\.500, 1-NN of pixels 0\.\d+, frame differences \d\.\d+"
    line = (
        rf"k-NN 0\.\d+ ± 0\.1\d\d \(± standard error; k = 3, one clip; {baselines}\), 16 videos\n"
    )
    assert re.search(line, capsys.readouterr().out)


# Slow: two processes import torch and encode 96 views.
@pytest.mark.slow
def test_two_processes_write_the_results_of_one(
    run_folder: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    together = tmp_path / "together"
    command = [
        sys.executable,
        ROOT / "evaluate.py",
        run_folder,
        synthetic_shards,
        *VIEWS,
        "--output",
        together,
    ]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    output = [tmp_path / "output of 0", tmp_path / "output of 1"]
    processes = []
    for rank in (0, 1):
        environment = {**os.environ, **group, "RANK": str(rank)}
        process = forked.start(command, output[rank], tmp_path / "errors", environment)
        processes.append(process)
    assert [forked.wait(process, 240) for process in processes] == [0, 0]
    assert output[0].read_text().startswith("top-1")
    assert not output[1].read_text()

    alone = results_of(tmp_path / "alone", run_folder, synthetic_shards, *VIEWS)
    assert json.loads((together / "results.json").read_text()) == alone
    assert (alone["clips"], alone["crops"]) == (2, 3)


def test_probabilities_are_averaged_over_all_views_of_each_video(synthetic_shards: Path) -> None:
    dataset = ShardDataset.open(synthetic_shards)
    data = DataConfig(str(synthetic_shards), frame_stride=2, num_workers=1)
    config = TrainConfig(data, model=SHAPE, batch_size=8, precision="fp32")
    model = VideoClassifier(SHAPE, 2)
    # The views of a video differ visibly only for a confident classifier.
    with torch.no_grad():
        model.head.weight.mul_(1000)
    predictions = Evaluator(config, dataset, ALONE).predict(model, False, 2, 3)
    assert model.training
    assert predictions.labels.tolist() == [sample.label for sample in dataset.samples]
    plan = EvaluationPlan(
        dataset, data, num_frames=4, image_size=32, batch_size=3, num_temporal=2, num_spatial=3
    )
    with ClipLoader(dataset, plan, ALONE.device, data, None) as loader, torch.no_grad():
        one_by_one = [model.eval()(batch.clip).softmax(-1) for batch in loader.batches(0)]
    by_hand = torch.cat(one_by_one).view(16, 6, 2)
    assert by_hand.std(dim=1).max() > 1e-3, "the views do not differ"
    torch.testing.assert_close(predictions.probabilities, by_hand.mean(1))


def test_metrics_of_four_videos_worked_by_hand() -> None:
    probabilities = torch.tensor([[0.9, 0.1, 0], [0.3, 0.6, 0.1], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8]])
    predictions = Predictions(probabilities, torch.tensor([0, 0, 2, 2]), torch.arange(4))
    scores = predictions.scores()
    assert scores["top1"] == 0.5
    assert "top5" not in scores, "of five classes or fewer, all would be right"
    nll = -torch.tensor([0.9, 0.3, 0.2, 0.8]).log().mean().item()
    assert scores["nll"] == pytest.approx(nll)
    samples = []
    for key, label in (("a", 0), ("b", 0), ("c", 2), ("d", 2)):
        samples.append(SimpleNamespace(key=key, source=f"{key}.mp4", labels=[label]))
    dataset: Any = SimpleNamespace(info=SimpleNamespace(classes=["x", "y", "z"]), samples=samples)
    rows = list_predictions(predictions, dataset)
    # The most confident mistakes come first.
    assert [key for key, *_ in rows] == ["b", "c", "a", "d"]
    assert rows[0] == ("b", "b.mp4", "x", "y", 0.6)
    results = make_results(predictions, dataset, parse_arguments(["run", "shards"]))
    assert results["majority_top1"] == 0.5
    assert results["confusion"] == [[1, 1, 0], [0, 0, 0], [1, 0, 1]]
    assert results["per_class"]["x"] == {"videos": 2, "top1": 0.5}
    assert results["per_class"]["y"] == {"videos": 0, "top1": None}
    always_the_first = Predictions(torch.eye(7)[[0] * 28], torch.arange(28) % 7, torch.arange(28))
    assert interpret_scores(always_the_first.scores()), "1/7 is not above 1/7, also when rounded"
    seven = torch.tensor([0.3, 0.2, 0.15, 0.12, 0.11, 0.07, 0.05]).expand(2, 7)
    assert Predictions(seven, torch.tensor([4, 5]), torch.arange(2)).scores()["top5"] == 0.5


def test_average_precision_of_a_few_videos_worked_by_hand() -> None:
    # Videos of the class are the first and the third by score.
    scores = np.array([0.6, 0.9, 0.7, 0.8])
    is_true = np.array([False, True, True, False])
    assert average_precision(scores, is_true) == pytest.approx((1 + 2 / 3) / 2)
    # Of equal scores, both videos count.
    scores = np.array([0.5, 0.5, 0.1])
    is_true = np.array([True, False, True])
    assert average_precision(scores, is_true) == pytest.approx((0.5 + 2 / 3) / 2)
    probabilities = torch.tensor([[0.9, 0.2, 0.5], [0.3, 0.6, 0.5]])
    labels = torch.tensor([[0, 0, 0], [1, 1, 0]], dtype=torch.uint8)
    predictions = Predictions(probabilities, labels, torch.arange(2))
    assert predictions.average_precisions() == [0.5, 1.0, None]
    results = predictions.scores()
    assert results["mAP"] == 0.75
    assert results["chance_mAP"] == 0.5
    of_truth = [0.1, 0.8, 0.5, 0.3, 0.6, 0.5]
    assert results["bce"] == pytest.approx(-np.log(of_truth).mean())


def test_a_video_that_does_not_decode_is_named_and_nothing_is_written(
    run_folder: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    key = ShardDataset.open(synthetic_shards).samples[5].key
    broken_copy(synthetic_shards, tmp_path / "broken", {key})
    with pytest.raises(InputError, match=key):
        results_of(tmp_path / "results", run_folder, tmp_path / "broken")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ("run", {"classes": ["left", "right", "up"]}, "has 2 classes and .* has 3"),
        ("run", {"classes": []}, "has no labels"),
        ("run", {"shards": [], "num_samples": 0}, "holds no video"),
        (
            "file with names",
            {"classes": ["right", "left"]},
            "class 0 is 'left' for the classifier and 'right' in",
        ),
        ("file without names", {"classes": ["left", "right", "up"]}, "has 2 classes and"),
    ],
)
def test_other_classes_no_labels_and_an_empty_split_are_one_sentence(
    run_folder: Path,
    synthetic_shards: Path,
    tmp_path: Path,
    source: str,
    change: dict[str, Any],
    message: str,
) -> None:
    checkpoint = run_folder
    config = ("--config", run_folder / "config.yaml")
    if source != "run":
        newest = run_folder / "checkpoints/step-00000006/model.safetensors"
        checkpoint = shutil.copy(newest, tmp_path)
        if source == "file without names":
            save_file(load(checkpoint).state, checkpoint)
        results = results_of(tmp_path / "fine", checkpoint, synthetic_shards, *config)
        assert results["num_videos"] == 16
    description = shutil.copytree(synthetic_shards, tmp_path / "other") / "dataset.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | change))
    with pytest.raises(InputError, match=message) as raised:
        results_of(tmp_path / "results", checkpoint, tmp_path / "other", *config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run", r"the following arguments are required: shards; `.*--help` lists every option"),
        ("run shards --neighbors 3", "name the training videos with --knn SHARDS"),
        ("run shards --batchsize 2", "there is no option --batchsize: did you mean --batch-size"),
        ("run shards --clips two", "--clips: invalid number value: 'two'"),
        ("run shards model.num_frames=8", "model.num_frames changes nothing in an evaluation"),
        ("run shards --knn shards --clips 2", "leave out --clips"),
    ],
)
def test_mistakes_in_the_command_are_one_sentence(arguments: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_arguments(arguments.split())


def test_a_classifier_that_says_nan_and_weights_without_a_head_are_refused(
    run_folder: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    config = ("--config", run_folder / "config.yaml")
    state = load(run_folder).state
    # These weights are finite, but no sum of them is.
    huge = torch.full_like(state["head.weight"], 3e38)
    save_file(state | {"head.weight": huge}, file)
    with pytest.raises(InputError, match="outputs are not finite"):
        results_of(tmp_path / "out", file, synthetic_shards, *config)
    save_file({name: value for name, value in state.items() if not name.startswith("head.")}, file)
    with pytest.raises(InputError, match="no classification head"):
        results_of(tmp_path / "out", file, synthetic_shards, *config)
    assert not (tmp_path / "out").exists()
