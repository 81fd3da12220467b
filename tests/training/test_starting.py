"""Runs that begin with what others have learnt: from weights, as a branch, in the shape of a checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, VideoMAEModel

import export
from common.errors import InputError
from figures.clips import read_clips
from model import features
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.weights.layouts import to_adamae
from model.weights.pretrained import make_metadata, run_config, save
from pipeline.loader import ClipLoader
from pipeline.planning.plan import TrainingPlan
from pipeline.shards.dataset import ShardDataset
from train import train
from training.config import TrainConfig
from training.starting import configured, find_checkpoint

TINY = [
    "model.size=tiny", "model.num_frames=4", "model.image_size=32", "model.patch_size=8", "model.mask_ratio=0.75",
    "data.frame_stride=2", "data.num_threads=1", "batch_size=4", "steps=6", "precision=fp32", "checkpoint_every=3",
    "optimizer.base_lr=0.06", "optimizer.warmup_epochs=0", "device=cpu", "log_every=1", "evaluation.every=null",
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory, synthetic_shards) -> Path:
    """Six steps, with checkpoints after three and six."""
    run = tmp_path_factory.mktemp("source") / "run"
    train(configured([*TINY, f"data.shards={synthetic_shards}", f"run={run}"]))
    return run


def trained(*arguments: str) -> TrainConfig:
    config = configured(list(arguments))
    train(config)
    return config


def weights(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / f"checkpoints/step-{step:08d}/model.safetensors")


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["reconstruction_loss"] for line in lines}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_branch_with_nothing_changed_ends_as_its_source(source, tmp_path, capsys):
    trained(f"branch={source}/checkpoints/step-3", f"run={tmp_path / 'run'}")
    assert same(weights(tmp_path / "run", 6), weights(source, 6))
    assert losses(tmp_path / "run") == {step: loss for step, loss in losses(source).items() if step > 3}
    assert "its optimizer; from its step 3" in capsys.readouterr().err


def test_a_branch_can_be_longer_and_be_started_again(source, tmp_path):
    run = tmp_path / "run"
    longer = [f"branch={source}", f"run={run}", "steps=9", "checkpoint_every=1", "keep_checkpoints=9"]
    config = trained(*longer)
    assert (config.steps, config.model.size, config.log_every) == (9, "tiny", 1)
    assert list(losses(run)) == [7, 8, 9]
    whole = weights(run, 9)
    for step in (8, 9):
        shutil.rmtree(run / f"checkpoints/step-{step:08d}")
    (source.parent / "gone").mkdir()
    moved = source.rename(source.parent / "gone" / "run")  # what it began as is needed no more
    try:
        trained(*longer)
    finally:
        moved.rename(source)
    assert same(weights(run, 9), whole)


def test_a_branch_with_other_steps_begins_at_the_first(source, tmp_path, capsys):
    run = tmp_path / "run"
    trained(f"branch={source}", f"run={run}", "batch_size=2", "steps=1", "optimizer.weight_decay=0.5", "device=cpu")
    said = capsys.readouterr().err
    assert "its optimizer; from the first step: its steps had 4 clips, not 2" in said
    assert list(losses(run)) == [1]
    state = torch.load(run / "checkpoints/step-00000001/optimizer.pt", weights_only=True)
    assert {int(of["step"]) for of in state["state"].values()} == {7}  # moments go on
    assert {group["weight_decay"] for group in state["param_groups"]} == {0, 0.5}  # settings are the new ones


def test_a_branch_of_another_shape_has_a_fresh_optimizer(source, tmp_path, capsys):
    trained(f"branch={source}", f"run={tmp_path / 'run'}", "model.image_size=48", "steps=7")
    said = capsys.readouterr().err
    assert "interpolated from 2×4×4 to 2×6×6 tokens; a fresh optimizer" in said
    assert list(losses(tmp_path / "run")) == [7]


def test_what_cannot_be_branched_is_one_sentence_and_leaves_nothing(source, tmp_path):
    def says(sentence: str, *arguments: str) -> None:
        with pytest.raises(InputError, match=sentence):
            trained(*arguments)
        assert not (tmp_path / "run").exists()

    new = f"run={tmp_path / 'run'}"
    says("holds no checkpoint to branch from: give a run folder", f"branch={tmp_path}", new)
    says("one of step-00000003, step-00000006", f"branch={source}/checkpoints/step-4", new)
    says("give its folder, run=FOLDER", f"branch={source}")
    says("is of task=pretrain: for finetune, give finetune.checkpoint=", f"branch={source}", new,
         "task=finetune")  # fmt: skip
    says("branch and model.init both say", f"branch={source}", new, "model.init=runs/x")
    says("has taken 6 steps, and this run has 6: give a larger steps=", f"branch={source}", new)


def test_a_damaged_checkpoint_is_not_branched_from(source, tmp_path):
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    file = find_checkpoint(str(copy)) / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=r"cannot be branched from \(optimizer\.pt has changed"):
        trained(f"branch={copy}", f"run={tmp_path / 'run'}", "steps=9")


def test_the_refusal_of_other_settings_names_the_ways_out(source, synthetic_shards):
    with pytest.raises(InputError, match=f"steps: 6 -> 9.*branch={source} .*model.init={source} "):
        trained(*TINY, f"data.shards={synthetic_shards}", f"run={source}", "steps=9")


def test_pretraining_starts_from_weights(source, synthetic_shards, tmp_path, capsys):
    """Its first loss is where the source run has come to, not where it began."""
    run = tmp_path / "run"
    trained(*TINY, f"data.shards={synthetic_shards}", f"run={run}", f"model.init={source}", "steps=1", "seed=1")
    assert f"weights of {source}: tokenizer, encoder's blocks" in capsys.readouterr().err
    before = losses(source)
    assert losses(run)[1] < (before[1] + before[6]) / 2


def test_the_first_loss_from_weights_is_the_source_runs_own(source, synthetic_shards, tmp_path):
    """Of the same clips under the same masks, what the source's last weights lose; far from what it began with."""
    run = tmp_path / "run"
    config = trained(*TINY, f"data.shards={synthetic_shards}", f"run={run}", f"model.init={source}", "steps=1")
    dataset = ShardDataset.open(synthetic_shards)
    plan = TrainingPlan(dataset, config.data, num_frames=4, image_size=32, seed=config.seed, batch_size=4)
    with ClipLoader(dataset, plan, torch.device("cpu"), config.data, None) as loader, torch.no_grad():
        clip = next(loader.batches(0)).clip
        theirs = AdaMAE.from_pretrained(source)(clip, config.seed, 0).reconstruction_loss.item()
    # Logits round otherwise where no gradient is asked for, so that a token may be drawn instead of its like.
    assert losses(run)[1] == pytest.approx(theirs, rel=1e-3)
    assert losses(source)[1] - theirs > 0.5 * (losses(source)[1] - losses(source)[6])


def labelled(shards: Path, run: Path, checkpoint: Path, *overrides: str) -> list[str]:
    """Nothing here says what the model is like."""
    return [f"data.shards={shards}", f"run={run}", "task=linear_probe", f"finetune.checkpoint={checkpoint}",
            "data.frame_stride=2", "data.num_threads=1", "batch_size=4", "steps=1", "precision=fp32", "device=cpu",
            *overrides]  # fmt: skip


def test_a_probe_has_the_shape_of_its_checkpoint(source, synthetic_shards, tmp_path):
    config = trained(*labelled(synthetic_shards, tmp_path / "run", source))
    assert config.model.dimensions == ModelConfig(size="tiny").dimensions
    assert (config.model.num_frames, config.model.image_size, config.model.patch_size) == (4, 32, 8)
    assert run_config(tmp_path / "run")["model"]["image_size"] == 32
    again = configured(labelled(synthetic_shards, tmp_path / "run", tmp_path / "gone"))
    assert again.model == config.model  # from its own folder, once it has begun


def test_clips_of_another_size_can_be_asked_for(source, synthetic_shards, tmp_path):
    asked = ["model.image_size=48", "model.num_frames=8"]
    config = configured(labelled(synthetic_shards, tmp_path / "run", source, *asked))
    assert (config.model.num_frames, config.model.image_size, config.model.patch_size) == (8, 48, 8)


def test_only_what_was_asked_for_and_differs_is_an_error(source, synthetic_shards, tmp_path):
    asked = ["model.size=small", "model.patch_size=16"]
    with pytest.raises(InputError, match=r"encoder_width 96 instead of 384.*patch_size 8 instead of 16"):
        trained(*labelled(synthetic_shards, tmp_path / "run", source, *asked))
    assert not (tmp_path / "run").exists()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model:\n  size: small\n  image_size: 64\n")
    config = configured(["--config", str(recipe), *labelled(synthetic_shards, tmp_path / "run", source)])
    assert config.model.dimensions == ModelConfig(size="tiny").dimensions
    assert config.model.image_size == 32


def test_published_weights_give_what_they_know(synthetic_shards, tmp_path):
    shape = ModelConfig(size="tiny", num_frames=16, image_size=32, patch_size=8)
    torch.save({"model": to_adamae(AdaMAE(shape).state_dict())}, tmp_path / "theirs.pth")
    config = configured(labelled(synthetic_shards, tmp_path / "run", tmp_path / "theirs.pth"))
    assert (config.model.patch_size, config.model.grid) == (8, (8, 4, 4))
    assert config.model.dimensions[:3] == shape.dimensions[:3]


def test_an_average_goes_on_in_a_branch(synthetic_shards, tmp_path):
    shape = ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75)
    save(tmp_path / "theirs.safetensors", AdaMAE(shape).state_dict(), make_metadata(shape))
    first = labelled(synthetic_shards, tmp_path / "run", tmp_path / "theirs.safetensors")
    trained(*first, "finetune.ema_decay=0.5", "checkpoint_every=1", "steps=2")
    trained(f"branch={tmp_path / 'run'}/checkpoints/step-1", f"run={tmp_path / 'again'}")
    whole, again = (tmp_path / run / "checkpoints/step-00000002" for run in ("run", "again"))
    for name in ("model", "average"):
        assert same(load_file(whole / f"{name}.safetensors"), load_file(again / f"{name}.safetensors"))


def test_clips_that_are_not_square_all_the_way(source, synthetic_shards, tmp_path):
    """From weights of square ones, through training and a resume, to features, a figure's clip and an export."""
    run, wide = tmp_path / "run", "model.image_size=[16,48]"
    trained(*TINY, f"data.shards={synthetic_shards}", f"run={run}", f"model.init={source}", wide, "steps=2",
            "checkpoint_every=1", "data.crop=random_resized")  # fmt: skip
    whole = weights(run, 2)
    assert whole["token_sampler.positions"].shape == (2 * 2 * 6, 96)
    shutil.rmtree(run / "checkpoints/step-00000002")
    trained(*TINY, f"data.shards={synthetic_shards}", f"run={run}", f"model.init={source}", wide, "steps=2",
            "checkpoint_every=1", "data.crop=random_resized")  # fmt: skip
    assert same(weights(run, 2), whole)
    features.main([str(synthetic_shards), str(tmp_path / "out"), "--model", str(run), "--device", "cpu", "--tokens"])
    tokens = load_file(tmp_path / "out/features-00000.safetensors")["tokens"]
    assert tokens.shape == (16, 24, 96)
    model = AdaMAE.from_pretrained(run)
    (clip,) = read_clips([synthetic_shards], 4, model.config.frame_size, 2, limit=1)
    maps = model.reconstruct(clip.frames[None])
    assert maps.reconstruction.shape == (1, 4, 16, 48, 3)
    assert maps.error.shape == (1, 2, 2, 6)
    export.main(["export", str(run), str(tmp_path / "hub"), "--to", "huggingface"])
    theirs = VideoMAEModel.from_pretrained(tmp_path / "hub").eval()
    processor = AutoImageProcessor.from_pretrained(tmp_path / "hub")
    with torch.no_grad():
        found = theirs(**processor(list(clip.frames.movedim(3, 1)), return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(found, model.encode(clip.frames[None]).tokens, atol=1e-4, rtol=1e-4)
