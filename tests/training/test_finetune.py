"""Learning classes: the second objective of the loop."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_videos import as_version_1
from safetensors.torch import load_file

from common.errors import InputError
from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.config import ModelConfig
from model.probe import Probe
from model.weights.layouts import to_adamae, to_huggingface
from model.weights.pretrained import find_file, make_metadata, read_state_dict, save
from pipeline.loader import Batch
from pipeline.shards.dataset import ShardDataset
from train import train
from training import checkpoint
from training.config import OptimizerConfig, TrainConfig, parse
from training.distributed import Distributed
from training.logger import Logger
from training.optimizer import make_optimizer, update
from training.tasks.classification import Classification

ALONE = Distributed(0, 1, torch.device("cpu"))
TINY = [
    "model.size=tiny", "model.num_frames=4", "model.image_size=32", "model.patch_size=8", "model.mask_ratio=0.75",
    "data.frame_stride=2", "data.flip=false", "data.num_threads=1", "batch_size=4", "steps=6", "precision=fp32",
    "optimizer.base_lr=0.06", "optimizer.warmup_epochs=0", "device=cpu", "log_every=1", "evaluation.every=null",
]  # fmt: skip
PLAIN = ["finetune.mixup=0", "finetune.cutmix=0", "finetune.label_smoothing=0", "finetune.drop_path=0"]


@pytest.fixture
def config(synthetic_shards, tmp_path):
    """Makes a TrainConfig of a tiny run with overrides."""

    def make(*overrides: str) -> TrainConfig:
        return parse([*TINY, "task=finetune", f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}", *overrides])

    return make


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    """Weights of a tiny AdaMAE."""
    torch.manual_seed(1)
    shape = ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75)
    file = tmp_path_factory.mktemp("weights") / "pretrained.safetensors"
    save(file, AdaMAE(shape).state_dict(), make_metadata(shape))
    return file


def classification(config: TrainConfig) -> Classification:
    return Classification(config, ShardDataset.open(config.data.shards), ALONE)


def some_batch(first: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(first)
    clip = torch.randint(0, 256, (4, 4, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return Batch(clip, torch.tensor([0, 1, 0, 1]), ["a", "b", "c", "d"], list(range(first, first + 4)))


def test_a_small_dataset_is_learnt(config):
    made = config(*PLAIN, "steps=60", "batch_size=16", "optimizer.base_lr=0.03", "log_every=20", "data.crop=multiscale")
    train(made)
    lines = [json.loads(line) for line in (Path(made.run) / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.3
    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"]  # the mean of the last 20 steps, and of the first
    assert lines[-1]["accuracy"] > 0.9


@pytest.mark.parametrize("objective", ["finetune", "attentive_probe"])
def test_a_resumed_run_ends_with_the_same_weights(config, synthetic_shards, objective):
    overrides = (
        f"task={objective}", "finetune.ema_decay=0.5", "checkpoint_every=3", "evaluation.every=3",
        f"evaluation.shards={synthetic_shards}",
    )  # fmt: skip
    made = config(*overrides)
    train(made)
    last = Path(made.run) / "checkpoints" / "step-00000006"
    files = ("model.safetensors", "average.safetensors")
    whole = [load_file(last / file) for file in files]
    log = (Path(made.run) / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(last)
    train(made)
    for before, file in zip(whole, files, strict=True):
        after = load_file(last / file)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(whole[0][name], whole[1][name]) for name in whole[0])
    again = [json.loads(line) for line in (Path(made.run) / "metrics.jsonl").read_text().splitlines()]
    for one, other in zip(log, again, strict=True):
        for key in ("step", "loss", "accuracy", "evaluation/top1", "evaluation/nll"):
            assert json.loads(one).get(key) == other.get(key)


def test_it_starts_from_the_pretrained_encoder(config, pretrained):
    theirs = load_file(pretrained)
    model = classification(config(f"finetune.checkpoint={pretrained}")).model
    for name, value in model.state_dict().items():
        if name.startswith(("tokenizer.", "encoder.")):
            assert torch.equal(value, theirs[name]), name
    scratch = classification(config()).model
    assert not torch.equal(scratch.tokenizer.projection.weight, theirs["tokenizer.projection.weight"])


@pytest.mark.parametrize("layout", [to_huggingface, to_adamae])
def test_it_starts_from_other_peoples_files(config, pretrained, layout, tmp_path):
    ours = load_file(pretrained)
    torch.save({"model": layout(ours)}, tmp_path / "theirs.pth")
    model = classification(config(f"finetune.checkpoint={tmp_path / 'theirs.pth'}")).model
    for name, value in model.state_dict().items():
        if name.startswith(("tokenizer.", "encoder.")):
            assert torch.equal(value, ours[name]), name


@pytest.mark.parametrize("objective", ["linear_probe", "attentive_probe"])
def test_a_probe_learns_and_its_encoder_does_not(config, pretrained, objective):
    made = classification(config(f"task={objective}", f"finetune.checkpoint={pretrained}", *PLAIN))
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    optimizer = made.optimizer()
    losses = []
    for _ in range(20):
        loss, _ = made(made.model.train(), some_batch())
        loss.backward()
        update(optimizer, 1e-2, None)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not made.model.encoder.training
    for name, value in made.model.state_dict().items():
        frozen = name.startswith(("tokenizer.", "encoder."))
        assert torch.equal(value, before[name]) == frozen, name


def test_a_linear_probe_sees_the_mean_of_the_pretrained_features(pretrained):
    shape = ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75)
    probe = Probe(shape, 2, "linear")
    probe.load_encoder(load_file(pretrained))
    adamae = AdaMAE(shape)
    adamae.load_state_dict(load_file(pretrained))
    clip = some_batch().clip
    tokens = adamae.eval().encoder(adamae.tokenizer(clip) + adamae.encoder.positions)
    torch.testing.assert_close(probe.eval()(clip), probe.head(tokens.mean(1) / (1 + 1e-6) ** 0.5))


def test_learning_rates_fall_by_layer_and_biases_do_not_decay():
    model = VideoClassifier(ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8), 2)
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.05), layer_decay=0.5)
    of = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert len(of) == len(list(model.parameters()))
    scales = {"head.weight": 1, "norm.bias": 1, "encoder.blocks.2.mlp.fc1.weight": 0.5,
              "encoder.blocks.1.attn.q_bias": 0.25, "encoder.blocks.0.norm1.weight": 0.125,
              "tokenizer.projection.weight": 0.0625}  # fmt: skip
    for name, scale in scales.items():
        assert of[model.get_parameter(name)]["lr_scale"] == scale, name
    for name, p in model.named_parameters():
        assert of[p]["weight_decay"] == (0.05 if p.ndim > 1 else 0), name
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    update(optimizer, 1e-3, None)
    assert of[model.head.weight]["lr"] == 1e-3
    assert of[model.tokenizer.projection.weight]["lr"] == pytest.approx(6.25e-5)


def test_the_average_follows_the_weights(config):
    made = classification(config("finetune.ema_decay=0.9"))
    weight = made.model.head.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight += 1
    made.after_update()
    torch.testing.assert_close(made.modules["average"].head.weight, before + 0.1)


def test_of_averaged_weights_the_average_is_what_a_run_stands_for(config, tmp_path):
    made = classification(config("finetune.ema_decay=0.9"))
    with torch.no_grad():
        made.model.head.weight += 1
    made.after_update()
    folder = tmp_path / "run" / "checkpoints"
    contents = checkpoint.Contents(made.modules, made.optimizer(), made.about)
    checkpoint.save(folder, checkpoint.TrainState(3, 4, "these"), contents.state())
    for path in (tmp_path / "run", *checkpoint.existing(folder)):
        weights = read_state_dict(find_file(path))[0]
        assert torch.equal(weights["head.weight"], made.modules["average"].head.weight)


def test_mixing_depends_on_seed_and_position_only(config):
    made = classification(config("finetune.mixup=0.8", "finetune.cutmix=1"))
    torch.manual_seed(0)
    clips, targets = zip(
        *(made._mixed(some_batch().clip, some_batch().labels, place) for place in range(40)), strict=True
    )
    torch.manual_seed(1)
    again, target = made._mixed(some_batch().clip, some_batch().labels, 7)
    assert torch.equal(clips[7], again)
    assert torch.equal(targets[7], target)
    assert not torch.equal(clips[7], clips[8])
    other = classification(config("seed=1"))._mixed(some_batch().clip, some_batch().labels, 7)[0]
    assert not torch.equal(clips[7], other)
    assert all(clip.dtype == torch.uint8 for clip in clips)
    torch.testing.assert_close(torch.stack(targets).sum(-1), torch.ones(40, 4))


def test_mixed_clips_and_targets_have_the_same_weights(config):
    made = classification(config("finetune.mixup=0.8", "finetune.cutmix=0"))
    dark, bright = (torch.full((2, 4, 32, 32, 3), level, dtype=torch.uint8) for level in (0, 200))
    clip, target = made._mixed(torch.cat((dark, bright)), torch.tensor([0, 0, 1, 1]), 3)
    for one, weights in zip(clip, target, strict=True):
        assert one.float().mean().item() == pytest.approx(200 * weights[1].item(), abs=0.51)
    made = classification(config("finetune.mixup=0", "finetune.cutmix=1"))
    clip, target = made._mixed(torch.cat((dark, bright)), torch.tensor([0, 0, 1, 1]), 4)
    for one, weights in zip(clip, target, strict=True):
        assert one.float().mean().item() == pytest.approx(200 * weights[1].item(), abs=0.01)
        assert (one == one[:1]).all(), "the box moves"


def test_the_best_weights_are_kept_with_all_that_an_evaluation_needs(config, synthetic_shards):
    made = classification(config(f"evaluation.shards={synthetic_shards}"))
    file = Path(made.config.run) / "checkpoints" / "best" / "model.safetensors"
    for step, top1, kept in ((1, 0.5, 1), (2, 0.75, 2), (3, 0.6, 2), (4, 0.75, 2)):
        made._keep_if_best(made.model, step, {"top1": top1})
        said = read_state_dict(file)[1]
        assert json.loads(said["scores"])["step"] == kept
    assert json.loads(said["classes"]) == ["left", "right"]
    assert ModelConfig(**json.loads(said["model_config"])) == made.config.model


def test_the_two_halves_of_a_batch_give_the_loss_of_the_whole(config):
    made = classification(config(*PLAIN))
    whole, _ = made(made.model.eval(), some_batch())
    batch = some_batch()
    halves = [replace(batch, clip=batch.clip[i : i + 2], labels=batch.labels[i : i + 2]) for i in (0, 2)]
    parts = [made(made.model.eval(), half)[0] for half in halves]
    torch.testing.assert_close(sum(parts) / 2, whole)


def test_what_does_not_fit_is_said_in_one_sentence(config, pretrained, synthetic_shards, tmp_path):
    def says(sentence: str, *overrides: str) -> None:
        with pytest.raises(InputError, match=sentence) as raised:
            classification(config(*overrides))
        assert "\n" not in str(raised.value)

    says("batch_size is 3", "batch_size=3")
    says(
        "encoder_width 96 instead of 384, encoder_depth 3 instead of 12, encoder_heads 4 instead of 6, patch_size 8"
        " instead of 16: leave out what asks for these, or give model.encoder_width=96",
        f"finetune.checkpoint={pretrained}", "model.size=small", "model.patch_size=16",
    )  # fmt: skip
    says("does not exist", "finetune.checkpoint=/nowhere")
    classifier = tmp_path / "classifier.safetensors"
    shape = config().model
    save(classifier, VideoClassifier(shape, 2).state_dict(), make_metadata(shape))
    says("a classifier's weights", f"finetune.checkpoint={classifier}", "task=linear_probe")
    says("finetune.mixup is -1", "finetune.mixup=-1.0")
    says("finetune.layer_decay is 0", "finetune.layer_decay=0")
    says("finetune.ema_decay is 2", "finetune.ema_decay=2")

    relabelled(synthetic_shards, tmp_path / "other", classes=["left", "right", "up"])
    says("has 2 classes and .*other has 3", f"evaluation.shards={tmp_path / 'other'}")
    relabelled(synthetic_shards, tmp_path / "swapped", classes=["right", "left"])
    says("class 0 is 'left' .* and 'right' in", f"evaluation.shards={tmp_path / 'swapped'}")
    relabelled(synthetic_shards, tmp_path / "none", classes=[])
    says("none has no labels", f"data.shards={tmp_path / 'none'}")
    relabelled(synthetic_shards, tmp_path / "some", classes=["left", "right"], label=None)
    says("has no label", f"data.shards={tmp_path / 'some'}")


def relabelled(shards: Path, copy: Path, classes: list[str], label: int | None = 0) -> None:
    """The same shards with other class names, and with `label` for the first sample."""
    as_version_1(Path(shutil.copytree(shards, copy)))  # whose tables are lines
    info = json.loads((copy / "dataset.json").read_text())
    (copy / "dataset.json").write_text(json.dumps({**info, "classes": classes}))
    table = next(iter(sorted(copy.glob("*.samples.jsonl"))))
    first, *others = table.read_text().splitlines()
    table.write_text("\n".join([json.dumps({**json.loads(first), "label": label}), *others]) + "\n")


@pytest.mark.parametrize("name", ["ssv2_finetune", "k400_finetune", "probe"])
def test_the_recipes_can_be_read(name):
    recipe = parse(["--config", str(Path(__file__).parents[2] / f"configs/{name}.yaml"), "data.shards=here"])
    assert recipe.task == ("attentive_probe" if name == "probe" else "finetune")
    assert recipe.optimizer.beta2 == 0.999


def test_the_loss_is_smoothed_as_asked_for(config):
    made = classification(config(*PLAIN, "finetune.label_smoothing=0.2"))
    made.model.eval()
    log_probs = made.model(some_batch().clip).log_softmax(dim=1)
    targets = torch.full((4, 2), 0.1).scatter_(1, some_batch().labels[:, None], 0.9)
    torch.testing.assert_close(made(made.model, some_batch())[0], -(targets * log_probs).sum(dim=1).mean())


def test_layer_decay_and_drop_path_are_those_of_the_configuration(config):
    made = classification(config("finetune.layer_decay=0.5", "finetune.drop_path=0.3"))
    scales = {group["lr_scale"] for group in made.optimizer().param_groups}
    assert scales == {0.0625, 0.125, 0.25, 0.5, 1.0}
    assert made.model.encoder.blocks[-1].drop_path.drop_prob == pytest.approx(0.3)
    probe = classification(config("task=linear_probe", "finetune.layer_decay=0.5"))
    assert {group.get("lr_scale", 1.0) for group in probe.optimizer().param_groups} == {1.0}


@pytest.mark.parametrize("stopped_at", [3, 6])
def test_a_review_that_was_stopped_is_made_up_for(config, synthetic_shards, monkeypatch, stopped_at):
    overrides = ("checkpoint_every=100", "evaluation.every=3", f"evaluation.shards={synthetic_shards}")
    made = config(*overrides)
    train(made)
    whole = training_figures(made)
    assert [step for step, name in whole if name == "evaluation/top1"] == [3, 6]
    train(made)
    assert training_figures(made) == whole, "done twice"
    shutil.rmtree(made.run)

    judge = Classification.review

    def stop(self: Classification, step: int, metrics: Logger) -> None:
        if step == stopped_at:
            raise KeyboardInterrupt
        judge(self, step, metrics)

    monkeypatch.setattr(Classification, "review", stop)
    with pytest.raises(KeyboardInterrupt):
        train(made)
    monkeypatch.undo()
    train(made)
    assert training_figures(made) == whole


def training_figures(made: TrainConfig) -> dict[tuple[int, str], float]:
    """By step and name; raises if one is there twice."""
    figures: dict[tuple[int, str], float] = {}
    for line in (Path(made.run) / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name in ("loss", "accuracy", "lr", "evaluation/top1", "evaluation/nll"):
            if name in values:
                assert (values["step"], name) not in figures
                figures[values["step"], name] = values[name]
    return figures


def test_a_run_goes_on_without_the_weights_that_it_started_from(config, pretrained, tmp_path):
    theirs = shutil.copy(pretrained, tmp_path / "theirs.safetensors")
    made = config(f"finetune.checkpoint={theirs}", "checkpoint_every=3")
    train(made)
    last = Path(made.run) / "checkpoints" / "step-00000006"
    whole = load_file(last / "model.safetensors")
    shutil.rmtree(last)
    theirs.unlink()
    train(made)
    assert all(torch.equal(whole[name], value) for name, value in load_file(last / "model.safetensors").items())


def test_all_processes_have_everybodys_statistics(config, monkeypatch):
    monkeypatch.setattr("training.tasks.classification.mean_over_processes", lambda values: values.fill_(7))
    made = classification(config("task=linear_probe", "finetune.ema_decay=0.9"))
    made.after_update()
    assert (torch.cat((made.model.norm.running_mean, made.model.norm.running_var)) == 7).all()
    torch.testing.assert_close(made.average.module.norm.running_mean, torch.full((96,), 0.7))


def test_a_step_that_is_not_taken_leaves_no_statistics(config):
    made = classification(config("task=linear_probe"))
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    made(made.model, some_batch())
    assert not torch.equal(made.model.norm.running_mean, before["norm.running_mean"])
    made(made.model, some_batch(4))
    made.after_none()
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    made(made.model, some_batch())
    made.after_update()
    taken = made.model.norm.running_mean.clone()
    made.after_none()
    assert torch.equal(made.model.norm.running_mean, taken)


def test_pairs_that_are_mixed_stay_together(config):
    assert classification(config()).together == 2
    assert classification(config(*PLAIN)).together == 1


class Judged(Exception):  # noqa: N818
    """What `review` gave to `predict`."""


def test_the_averaged_weights_are_judged(config, synthetic_shards, monkeypatch):
    def stop(model: torch.nn.Module, *_: object) -> None:
        raise Judged(model)

    monkeypatch.setattr("training.tasks.classification.predict", stop)
    made = classification(config("finetune.ema_decay=0.9", f"evaluation.shards={synthetic_shards}"))
    with pytest.raises(Judged) as judged:
        made.review(1, metrics=None)
    assert judged.value.args == (made.average.module,)
