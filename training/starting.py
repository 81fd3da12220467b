"""How a run begins: with the shape of the weights it starts from, or as a branch of another run.

branch=RUN                           from RUN's newest checkpoint, with RUN's settings and any others
branch=RUN/checkpoints/step-200      from this one
"""

import re
import sys
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from common.errors import InputError
from common.logging import log
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.weights import pretrained
from model.weights.loading import load_weights
from model.weights.warm_start import CLIP, ENCODER, warm_start
from model.weights.weight_files import read_state_dict
from pipeline.reading.storage import is_remote
from training import checkpoint, distributed
from training.checkpoint import Contents
from training.config import TrainConfig, parse
from training.distributed import Distributed
from training.manifest import Manifest, TrainState
from training.remote_run import local_run
from training.run_dir import local_path

# Of a classifier's model; how it was masked only decides whether its shape can be.
SHAPE = ("size", *ENCODER, *CLIP, "masking", "mask_ratio")


def configured(arguments: list[str]) -> TrainConfig:
    """`parse`, on top of what is known already: a branch has the settings of its source, a classifier or probe the
    shape of finetune.checkpoint; what stands on the command line is above both. Raises InputError."""
    given = _given(arguments)
    if given.get("branch"):
        above = ["steps=null"] if "epochs" in given and "steps" not in given else []
        return parse(["--config", str(_settings_of_branch(given)), *above, *arguments])
    config = parse(arguments)
    if config.task == "pretrain" or not config.finetune.checkpoint or config.branch:
        return config
    theirs = _shape(config)
    left = set(SHAPE) - {key.removeprefix("model.") for key in given}
    if "model.size" in given:
        left -= {"encoder_width", "encoder_depth", "encoder_heads"}
    taken = {name: getattr(theirs, name) for name in sorted(left)}
    if others := [f"{name} {value}" for name, value in taken.items() if value != getattr(config.model, name)]:
        _say(f"as {config.finetune.checkpoint} has it: {', '.join(others)}")
    return replace(config, model=replace(config.model, **taken))


def begin_branch(
    config: TrainConfig, contents: Contents, start: TrainState, total_steps: int, process: Distributed
) -> TrainState:
    """Put what fits of the checkpoint that `branch` names into place; returns where the run then is.

    Weights fit as those of model.init do. The optimizer's state is kept if it is of these weights, the place if a step
    takes as many clips of the same videos. A run with checkpoints of its own goes on from them: nothing is done. All
    processes call it; raises InputError.
    """
    if not config.branch or checkpoint.existing(local_path(config.run) / "checkpoints"):
        return start
    source = find_checkpoint(config.branch)
    place = _verified(source).place
    theirs = pretrained.run_config(source.parents[1])
    if (task := theirs.get("task", "pretrain")) != config.task:
        key = "model.init" if config.task == "pretrain" else "finetune.checkpoint"
        raise InputError(f"{config.branch} is of task={task}: for {config.task}, give {key}= instead")
    why_anew = _why_anew(place, start)
    if not why_anew and place.step >= total_steps:
        raise InputError(
            f"{source} has taken {place.step} steps, and this run has {total_steps}: give a larger steps= or epochs="
        )
    said = [_put_weights(source, contents)]
    bits = (theirs.get("optimizer") or {}).get("state_bits", 32)
    kept = bits == config.optimizer.state_bits and _put_optimizer(source, contents.optimizer)
    said.append("its optimizer" if kept else "a fresh optimizer: its own is of other weights or groups of them")
    said.append(f"from the first step: {why_anew}" if why_anew else f"from its step {place.step}")
    if process.is_main:
        log("; ".join(said), sys.stderr)
    return start if why_anew else place


def _why_anew(place: TrainState, start: TrainState) -> str:
    """Why a run cannot go on from a place in another; "" where it can."""
    if place.global_batch != start.global_batch:
        return f"its steps had {place.global_batch} clips, not {start.global_batch}"
    return "" if place.videos == start.videos else "it has learnt from other videos"


def find_checkpoint(branch: str) -> Path:
    """The folder of the checkpoint that `branch` names: a run's newest, or one of its; raises InputError."""
    if is_remote(branch) and "/checkpoints/" in branch:
        raise InputError(f"{branch} is one checkpoint of a run in a store: copy it here, or give the run itself")
    path = local_run(branch)
    match = re.fullmatch(r"step-(\d{1,18})", path.name)
    found = checkpoint.whole(path.parent if match else path / "checkpoints")
    if match:
        found = [folder for folder in found if checkpoint.step_of(folder.name) == int(match[1])]
    if not found:
        there = [folder.name for folder in checkpoint.whole(path.parent)] if match else []
        raise InputError(
            f"{branch} holds no checkpoint to branch from: give"
            f" {'one of ' + ', '.join(there) if there else 'a run folder with checkpoints/'}"
        )
    return found[-1]


def _given(arguments: list[str]) -> dict[str, str]:
    """What the command line itself says, by key."""
    given: dict[str, str] = {}
    for argument, after in zip_longest(arguments, arguments[1:], fillvalue=""):
        if match := re.fullmatch(r"(?:--)?([a-z_][\w.]*)=(.*)", argument, re.DOTALL):
            given[match[1]] = match[2]
        elif argument.startswith("--"):
            given[argument.removeprefix("--")] = after
    return given


def _settings_of_branch(given: dict[str, str]) -> Path:
    """The config.yaml below the command line: that of the branch itself once it has begun, else of its source."""
    for key in ("model.init", "finetune.checkpoint"):
        if given.get(key):
            raise InputError(f"branch and {key} both say what weights to start from: give one of them")
    if not given.get("run"):
        raise InputError("a branch is a new run: give its folder, run=FOLDER")
    own = local_path(given["run"]) / "config.yaml"
    source = find_checkpoint(given["branch"]).parents[1] / "config.yaml" if not own.exists() else own
    if not own.exists() and own.absolute().parent == source.absolute().parent:
        raise InputError(f"run={given['run']} is what is branched from: give another folder")
    return source


def _shape(config: TrainConfig) -> ModelConfig:
    """Of a classifier or probe: as its run has it, or, before it has begun, as the weights it starts from do."""
    run = local_path(config.run)
    if (run / "config.yaml").exists():
        return pretrained.config_of_run(run)
    return pretrained.load(local_run(config.finetune.checkpoint), like=config.model).config


def _verified(source: Path) -> Manifest:
    """Its manifest; raises InputError in all processes where one finds files that have changed."""
    reason = None
    try:
        manifest = Manifest.read(source)
        if distributed.is_node_main():
            checkpoint.verify(source, manifest, ["model.safetensors", "optimizer.pt"])
    except (OSError, ValueError) as error:
        reason = f"{source} cannot be branched from ({error}): give another checkpoint"
    if (reason := next(filter(None, distributed.gathered(reason)), None)) is not None:
        raise InputError(reason)
    return manifest


def _put_weights(source: Path, contents: Contents) -> str:
    """Returns a sentence that says what was taken."""
    if isinstance(model := contents.modules["model"], AdaMAE):
        return warm_start(model, source)
    for name, module in contents.modules.items():  # an average begins as what it averages
        file = source / f"{name}.safetensors"
        load_weights(module, read_state_dict(file if file.exists() else source / "model.safetensors")[0])
    return f"weights of {source}"


def _put_optimizer(source: Path, optimizer: torch.optim.Optimizer) -> bool:
    """Take the state, but not the settings, of an optimizer of the same weights in the same groups; whether it was."""
    try:
        saved = torch.load(source / "optimizer.pt", map_location="cpu", weights_only=True)
        own = optimizer.state_dict()
        groups = [[len(group["params"]) for group in state["param_groups"]] for state in (saved, own)]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        fits = groups[0] == groups[1] and all(
            value.dim() == 0 or value.shape == p.shape
            for p, number in zip(parameters, numbers, strict=True)
            for value in saved["state"].get(number, {}).values()
            if isinstance(value, Tensor)
        )
        if fits:
            optimizer.load_state_dict({"state": saved["state"], "param_groups": own["param_groups"]})
    except checkpoint.UNUSABLE as error:
        raise InputError(f"{source} cannot be branched from ({' '.join(str(error).split())[:300]})") from error
    return fits


def _say(sentence: str) -> None:
    if distributed.is_node_main():
        log(sentence, sys.stderr)
