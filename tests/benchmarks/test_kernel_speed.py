import json

import pytest
import torch

from benchmarks import kernel_speed
from benchmarks.kernel_speed import CASES, Implementation, Inputs
from common.errors import InputError
from model.config import ModelConfig

SMALL = Inputs(ModelConfig("tiny", num_frames=4, image_size=64), 2, torch.device("cpu"), torch.float32)


def test_every_op_is_timed_in_every_phase_it_has(tmp_path):
    kernel_speed.main(["--batch-size", "1", "--mask-ratio", "0.95", "--repetitions", "1", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "kernel_speed.json").read_text())["rows"]
    assert {row["op"] for row in rows} == set(CASES)
    for row in rows:
        assert row["ms"] > 0
        assert (row["speed_up"] == 1) == (row["implementation"] == "kernel"), row
    phases = [row["phase"] for row in rows if row["op"] == "gather_tokens" and row["implementation"] == "kernel"]
    assert phases == ["forward", "backward", "both"]


def test_nothing_is_timed_that_differs_from_the_published_way():
    case = CASES["gather_tokens"](SMALL)
    wrong = case._replace(kernel=Implementation(lambda: case.kernel.call() + 1, case.kernel.inputs))
    with pytest.raises(InputError, match="gather_tokens gives what the published way gives"):
        kernel_speed.check(wrong, "gather_tokens")


def test_an_op_that_is_wrong_loses_its_own_rows_only(tmp_path, monkeypatch, capsys):
    def wrong(case, name):
        kernel_speed.require("it is right", name != "gather_tokens", "it is not")

    monkeypatch.setattr(kernel_speed, "check", wrong)
    arguments = ["--batch-size", "1", "--repetitions", "1", "--op", "gather_tokens", "patchify"]
    with pytest.raises(InputError, match="1 of 2 cases could not be measured"):
        kernel_speed.main([*arguments, "--output", str(tmp_path)])
    assert {row["op"] for row in json.loads((tmp_path / "kernel_speed.json").read_text())["rows"]} == {"patchify"}
    assert (
        "(1, 0.95, 'gather_tokens'): InputError: no results written, because a check failed" in capsys.readouterr().err
    )
