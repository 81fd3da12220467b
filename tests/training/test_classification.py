"""Classification: fine-tuning and probes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from made_videos import encode, write_shards
from runs import is_same, load_weights, read_rows
from safetensors.torch import load_file

from adamae.common.errors import InputError
from adamae.evaluate import evaluate, parse_arguments
from adamae.model.classifier import Probe, VideoClassifier
from adamae.model.config import ModelConfig
from adamae.model.weights.find_weights import find_file
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.pretrained import make_metadata, save
from adamae.model.weights.tensor_files import read_state_dict
from adamae.pipeline.loader import Batch
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.train import train
from adamae.training import distributed
from adamae.training.config import TrainConfig, parse
from adamae.training.distributed import Distributed
from adamae.training.optimizer import make_optimizer, update
from adamae.training.tasks import classification
from adamae.training.tasks.classification import Classification

SHAPE = ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75)
# The loss is plain cross-entropy, and a pass has no random numbers.
PLAIN = [
    "finetune.mixup=0",
    "finetune.cutmix=0",
    "finetune.label_smoothing=0",
    "finetune.drop_path=0",
]
METRICS = ("top1", "nll", "pixel_top1", "majority_top1")
EVALUATED = tuple(f"evaluation/{name}" for name in METRICS)
MakeConfig = Callable[..., TrainConfig]


@pytest.fixture
def config(arguments: list[str]) -> MakeConfig:
    """Return a function that makes the configuration of a tiny run from overrides."""
    return lambda *overrides: parse([*arguments, "task=finetune", "data.flip=false", *overrides])


@pytest.fixture
def pretrained(tiny_run: Path) -> Path:
    """Return the file of pre-trained weights."""
    return find_file(tiny_run)


def make_task(config: TrainConfig) -> Classification:
    task = Classification(config, ShardDataset.open(config.data.shards), Distributed("cpu"))
    task.init_weights(config.init_from)
    return task


def make_batch() -> Batch:
    """Make four clips of noise, which two classes have in turns."""
    generator = torch.Generator().manual_seed(0)
    clip = torch.randint(0, 256, (4, 4, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return Batch(clip, torch.tensor([0, 1, 0, 1]), ["a", "b", "c", "d"], [0, 1, 2, 3])


def read_metrics(config: TrainConfig) -> list[tuple[int, str, float]]:
    """Read (step, name, value) of the metrics that do not depend on time, in order."""
    metrics = []
    for row in read_rows(Path(config.run)):
        names = row.keys() & {"loss", "accuracy", "lr", *EVALUATED}
        metrics.extend((row["step"], name, row[name]) for name in names)
    return sorted(metrics)


@pytest.mark.parametrize("kind", ["finetune", "attentive_probe"])
def test_a_resumed_run_ends_with_the_same_weights_and_evaluations(
    config: MakeConfig, synthetic_shards: Path, kind: str
) -> None:
    """It makes each evaluation once, also one before which it was stopped.

    The best weights are kept with all that an evaluation needs. Those of the run are the average.
    """
    run_config = config(
        f"task={kind}",
        "finetune.ema_decay=0.5",
        "evaluation.every=3",
        f"evaluation.shards={synthetic_shards}",
    )
    train(run_config)
    run = Path(run_config.run)
    whole = [load_weights(run, name=name) for name in ("model", "average")]
    metrics = read_metrics(run_config)
    evaluated = [(step, name) for step, name, _ in metrics if name in EVALUATED]
    assert evaluated == list(product((3, 6), sorted(EVALUATED)))
    train(run_config)
    assert read_metrics(run_config) == metrics, "done twice"
    for stopped_at in (6, 3):
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        lines = [
            line
            for line in lines
            if json.loads(line)["step"] < stopped_at or "evaluation" not in line
        ]
        (run / "metrics.jsonl").write_text("".join(lines))
        if stopped_at == 3:
            shutil.rmtree(run / "checkpoints/step-00000006")
        train(run_config)
        assert read_metrics(run_config) == metrics
    for before, name in zip(whole, ("model", "average"), strict=True):
        assert is_same(load_weights(run, name=name), before)
    assert not is_same(*whole)
    last = run / "checkpoints/step-00000006"
    assert find_file(run) == find_file(last) == last / "average.safetensors"
    metadata = read_state_dict(run / "checkpoints/best/model.safetensors")[1]
    scores = json.loads(metadata["scores"])
    # Of equal accuracies, the first is kept.
    accuracies = [(top1, -step) for step, name, top1 in metrics if name == "evaluation/top1"]
    assert (scores["top1"], -scores["step"]) == max(accuracies)
    assert json.loads(metadata["classes"]) == ["left", "right"]
    assert ModelConfig(**json.loads(metadata["model_config"])) == run_config.model


def test_it_starts_from_the_pretrained_encoder(config: MakeConfig, pretrained: Path) -> None:
    source = load_file(pretrained)
    model = make_task(config(f"init_from={pretrained}")).model
    for name, value in model.state_dict().items():
        if name.startswith(("tokenizer.", "encoder.")):
            assert torch.equal(value, source[name]), name
    # Xavier's bound, scaled down to 0.001 as in BEiT.
    assert model.head.weight.abs().max() <= 0.001 * (6 / (96 + 2)) ** 0.5


@pytest.mark.parametrize("kind", ["linear_probe", "attentive_probe"])
def test_a_probe_learns_and_its_encoder_does_not(
    config: MakeConfig, pretrained: Path, kind: str
) -> None:
    task = make_task(config(f"task={kind}", f"init_from={pretrained}", *PLAIN))
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    optimizer = make_optimizer(task.parameter_groups(), task.config.optimizer)
    assert {group["lr_scale"] for group in optimizer.param_groups} == {1.0}
    losses = []
    for _ in range(20):
        loss, _ = task.loss(task.model.train(), make_batch())
        loss.backward()
        update(optimizer, 1e-2, None)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not task.model.encoder.training
    for name, value in task.model.state_dict().items():
        is_frozen = name.startswith(("tokenizer.", "encoder."))
        assert torch.equal(value, before[name]) == is_frozen, name


def test_a_linear_probe_sees_the_mean_of_the_pretrained_features(pretrained: Path) -> None:
    probe = Probe(SHAPE, 2, "linear")
    probe.load_encoder(load_file(pretrained))
    clip = make_batch().clip
    tokens = load_encoder(pretrained).encode(clip).tokens
    # BatchNorm without statistics divides by the root of 1 + eps.
    normalized = tokens.mean(1) / (1 + 1e-6) ** 0.5
    torch.testing.assert_close(probe.eval()(clip), probe.head(normalized))


def test_learning_rates_fall_by_layer(config: MakeConfig) -> None:
    task = make_task(config("finetune.layer_decay=0.5", "finetune.drop_path=0.3"))
    model = task.model
    optimizer = make_optimizer(task.parameter_groups(), task.config.optimizer)
    group_of = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            group_of[parameter] = group
    assert len(group_of) == len(list(model.parameters()))
    scales = {
        "head.weight": 1,
        "norm.bias": 1,
        "encoder.blocks.2.mlp.fc1.weight": 0.5,
        "encoder.blocks.1.attn.q_bias": 0.25,
        "encoder.blocks.0.norm1.weight": 0.125,
        "tokenizer.projection.weight": 0.0625,
    }
    for name, scale in scales.items():
        assert group_of[model.get_parameter(name)]["lr_scale"] == scale, name
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    update(optimizer, 1e-3, None)
    assert group_of[model.head.weight]["lr"] == 1e-3
    assert group_of[model.tokenizer.projection.weight]["lr"] == pytest.approx(6.25e-5)


def test_the_average_follows_the_weights(config: MakeConfig) -> None:
    task = make_task(config("finetune.ema_decay=0.9"))
    before = task.model.head.weight.detach().clone()
    with torch.no_grad():
        task.model.head.weight += 1
    task.after_update()
    torch.testing.assert_close(task.modules["average"].head.weight, before + 0.1)


def test_mixing_depends_on_seed_and_position_only(config: MakeConfig) -> None:
    task = make_task(config("finetune.mixup=0.8", "finetune.cutmix=1"))
    batch = make_batch()
    assert task.clip_multiple == 2, "pairs stay together"
    assert make_task(config(*PLAIN)).clip_multiple == 1
    mixed = [task.mix(batch.clip, batch.labels, position) for position in range(40)]
    clips = [clip for clip, _ in mixed]
    targets = [target for _, target in mixed]
    torch.manual_seed(1)
    again, target = task.mix(batch.clip, batch.labels, 7)
    assert torch.equal(clips[7], again)
    assert torch.equal(targets[7], target)
    assert not torch.equal(clips[7], clips[8])
    other = make_task(config("seed=1")).mix(batch.clip, batch.labels, 7)[0]
    assert not torch.equal(clips[7], other)
    assert all(clip.dtype == torch.uint8 for clip in clips)
    torch.testing.assert_close(torch.stack(targets).sum(-1), torch.ones(40, 4))


def test_mixed_clips_and_targets_have_the_same_weights(config: MakeConfig) -> None:
    clips = torch.zeros(4, 4, 32, 32, 3, dtype=torch.uint8)
    clips[2:] = 200
    labels = torch.tensor([0, 0, 1, 1])
    mixup = make_task(config("finetune.mixup=0.8", "finetune.cutmix=0"))
    mixed, target = mixup.mix(clips, labels, 3)
    for clip, weights in zip(mixed, target, strict=True):
        # Mixed pixels are rounded to integers.
        assert clip.float().mean().item() == pytest.approx(200 * weights[1].item(), abs=0.51)
    cutmix = make_task(config("finetune.mixup=0", "finetune.cutmix=1"))
    mixed, target = cutmix.mix(clips, labels, 4)
    for clip, weights in zip(mixed, target, strict=True):
        assert clip.float().mean().item() == pytest.approx(200 * weights[1].item(), abs=0.01)
        assert (clip == clip[:1]).all(), "the box moves"


def test_the_loss_is_smoothed_as_asked_for(config: MakeConfig) -> None:
    task = make_task(config(*PLAIN, "finetune.label_smoothing=0.2"))
    batch = make_batch()
    log_probs = task.model.eval()(batch.clip).log_softmax(dim=1)
    targets = torch.full((4, 2), 0.1).scatter_(1, batch.labels[:, None], 0.9)
    expected = -(targets * log_probs).sum(dim=1).mean()
    torch.testing.assert_close(task.loss(task.model, batch)[0], expected)


def test_all_ranks_have_everybodys_statistics(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification, "mean_over_ranks", lambda values: values.fill_(7))
    task = make_task(config("task=linear_probe", "finetune.ema_decay=0.9"))
    task.after_update()
    norm = task.model.norm
    assert (torch.cat((norm.running_mean, norm.running_var)) == 7).all()
    torch.testing.assert_close(task.average.module.norm.running_mean, torch.full((96,), 0.7))
    assert distributed.mean_over_ranks(torch.ones(2)).tolist() == [1, 1]


def test_what_does_not_fit_is_said_in_one_sentence(config: MakeConfig, tmp_path: Path) -> None:
    def check_message(sentence: str, *overrides: str) -> None:
        with pytest.raises(InputError, match=sentence) as raised:
            make_task(config(*overrides))
        assert "\n" not in str(raised.value)

    check_message("batch_size is 3", "batch_size=3")
    check_message("does not exist", "init_from=/nowhere")
    classifier = tmp_path / "classifier.safetensors"
    save(classifier, VideoClassifier(SHAPE, 2).state_dict(), make_metadata(SHAPE))
    check_message(
        "these weights are a classifier's", f"init_from={classifier}", "task=linear_probe"
    )
    unlabeled = write_shards(tmp_path / "none", [("a", encode(4))])
    check_message("none .*no labels", f"data.shards={unlabeled}")
    check_message("none .*no labels", f"evaluation.shards={unlabeled}")
    videos = [("a", encode(4)), ("b", encode(4))]
    alike = write_shards(tmp_path / "alike", videos, classes=2, labels=[(1,), (1,)])
    check_message(
        "all videos of .*alike are of the class 'class 1': .*two classes", f"data.shards={alike}"
    )


@pytest.fixture(scope="module")
def multi_label_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write eight gray videos of two classes: bright ones, and those that are not dark."""
    levels = (0, 1, 5, 6, 11, 12, 17, 18)
    labels = [(), (), (1,), (1,), (1,), (1,), (0, 1), (0, 1)]
    videos = [(f"v{level}", encode(4, first=level)) for level in levels]
    folder = tmp_path_factory.mktemp("multi") / "shards"
    return write_shards(folder, videos, classes=2, labels=labels)


def test_several_labels_per_video_are_learned_and_evaluated(
    config: MakeConfig, multi_label_shards: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    run_config = config(
        f"data.shards={multi_label_shards}",
        f"evaluation.shards={multi_label_shards}",
        "data.frame_stride=1",
        "steps=40",
        "evaluation.every=20",
        "log_every=20",
        "checkpoint_every=40",
        "batch_size=8",
        "optimizer.base_lr=0.03",
        "data.class_balance=1",
        "finetune.cutmix=0",
        "finetune.mixup=0.2",
    )
    train(run_config)
    evaluated = [row for row in read_rows(Path(run_config.run)) if "evaluation/mAP" in row]
    assert evaluated[-1]["evaluation/mAP"] == 1
    assert evaluated[-1]["evaluation/bce"] < 0.5
    assert "evaluation/knn_top1" not in evaluated[-1]
    output = ["--output", str(tmp_path / "out")]
    evaluate(parse_arguments([run_config.run, str(multi_label_shards), *output]))
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["mAP"] == max(row["evaluation/mAP"] for row in evaluated)
    assert results["per_class"] == {
        "class 0": {"videos": 2, "AP": pytest.approx(1)},
        "class 1": {"videos": 6, "AP": pytest.approx(1)},
    }
    videos = [("a", encode(4)), ("b", encode(4, first=18))]
    single = write_shards(tmp_path / "single", videos, classes=2)
    # A video with one label may be evaluated as one that has several.
    evaluate(parse_arguments([run_config.run, str(single), *output]))
    message = "have several labels or none, and the classifier was trained to choose one"
    with pytest.raises(InputError, match=message):
        make_task(config(f"data.shards={single}", f"evaluation.shards={multi_label_shards}"))


def test_each_class_is_decided_by_itself(config: MakeConfig, multi_label_shards: Path) -> None:
    shards = f"data.shards={multi_label_shards}"
    task = make_task(config(shards, *PLAIN, "finetune.label_smoothing=0.2"))
    labels = torch.tensor([[1, 1], [0, 0], [1, 0], [0, 1]], dtype=torch.uint8)
    batch = replace(make_batch(), labels=labels)
    p = task.model.eval()(batch.clip).sigmoid()
    target = batch.labels * 0.8 + 0.1
    expected = -(target * p.log() + (1 - target) * (1 - p).log()).mean()
    torch.testing.assert_close(task.loss(task.model, batch)[0], expected)
    mixing = make_task(config(shards, "finetune.mixup=0.8", "finetune.cutmix=0"))
    target = mixing.mix(batch.clip, labels, 3)[1]
    weight = target[0, 0].item()
    torch.testing.assert_close(target, labels * weight + labels.flip(0) * (1 - weight))
    assert 0 < weight < 1
