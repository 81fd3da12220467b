import json

import pytest
import torch

from adamae.benchmarks import kernel_speed
from adamae.benchmarks.kernel_speed import OPS, Inputs
from adamae.common.errors import InputError
from adamae.model.config import ModelConfig


def test_every_op_is_timed_in_every_phase_it_has(tmp_path):
    kernel_speed.main(["--batch-size", "1", "--repetitions", "1", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "kernel_speed.json").read_text())["rows"]
    assert {row["op"] for row in rows} == set(OPS)
    for row in rows:
        assert row["ms"] > 0
        assert (row["speed_up"] == 1) == (row["implementation"] == "kernel"), row
    phases = [
        row["phase"]
        for row in rows
        if row["op"] == "gather_tokens" and row["implementation"] == "kernel"
    ]
    assert phases == ["forward", "backward", "both"]


def test_nothing_is_timed_that_differs_from_the_published_way() -> None:
    inputs = Inputs(
        ModelConfig("tiny", num_frames=4, image_size=64), 2, torch.device("cpu"), torch.float32
    )
    op = OPS["gather_tokens"](inputs)
    gather = op.kernel.function
    for wrong, says in (
        (
            lambda *given: gather(*given) + 1,
            "gives what the published way gives .differs by up to 1",
        ),
        (lambda *given: gather(*given)[:, :-1], "gives what the published way gives .*instead of"),
        (
            lambda *given: 0.9 * gather(*given) + 0.1 * gather(*given).detach(),
            "has the published way's gradients",
        ),
    ):
        op.kernel.function = wrong
        with pytest.raises(InputError, match=f"gather_tokens {says}"):
            kernel_speed.check(op, "gather_tokens")
