"""A run on a teacher's features: resumes where its teacher has moved, not where it has changed."""

import json
import shutil
from pathlib import Path

import pytest
from runs import is_same, load_weights

from common.errors import InputError
from model.weights.pretrained import find_file, load
from train import train
from training.config import parse


def test_a_run_resumes_with_the_teacher_that_it_began_with(tiny_run: Path, arguments: list[str], tmp_path: Path):
    teacher = Path(shutil.copytree(tiny_run, tmp_path / "teacher"))
    target = ["model.target=teacher", "model.loss=cosine", "model.visible_loss_weight=0.1"]
    given = [*arguments, *target, "evaluation.every=4", "steps=4"]
    train(parse([*given, f"model.teacher={teacher}"]))
    whole = load_weights(tmp_path / "run", 4)
    assert whole["decoder.head.weight"].shape[0] == 96
    assert not any(name.startswith("target") for name in whole)
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    assert len(json.loads((newest / "train_state.json").read_text())["state"]["target"]) == 64
    assert len(list((tmp_path / "run/figures").iterdir())) == 2, "errors and masks are plotted without reconstructions"

    shutil.rmtree(newest)
    moved = teacher.rename(tmp_path / "moved")
    train(parse([*given, f"model.teacher={moved}"]))
    assert is_same(load_weights(tmp_path / "run", 4), whole)
    shutil.rmtree(newest)
    shutil.rmtree(max((moved / "checkpoints").glob("step-*")))
    with pytest.raises(InputError, match=r"trained on another teacher than model\.teacher: set it to the same weights"):
        train(parse([*given, f"model.teacher={moved}"]))
    with pytest.raises(InputError, match=r"the teacher .* does not exist"):
        train(parse([*given, f"model.teacher={teacher}"]))
    assert load(find_file(tmp_path / "run")).config.teacher == str(teacher), "weights are read without it"
