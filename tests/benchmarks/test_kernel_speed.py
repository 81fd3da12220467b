"""Every op of the token path is timed, after it was compared with the published way."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adamae.benchmarks import kernel_speed
from adamae.benchmarks.kernel_speed import OPS, Inputs
from adamae.common.errors import InputError
from adamae.model.config import ModelConfig


def test_every_op_is_timed_in_every_phase_it_has(tmp_path: Path) -> None:
    kernel_speed.main(["--batch-size", "1", "--repetitions", "1", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "kernel_speed.json").read_text())["rows"]
    assert {row["op"] for row in rows} == set(OPS)
    phases = []
    for row in rows:
        is_kernel = row["implementation"] == "kernel"
        assert row["ms"] > 0
        assert (row["speed_up"] == 1) == is_kernel, row
        if is_kernel and row["op"] == "gather_tokens":
            phases.append(row["phase"])
    assert phases == ["forward", "backward", "both"]


def test_nothing_is_timed_that_differs_from_the_published_way() -> None:
    config = ModelConfig("tiny", num_frames=4, image_size=64)
    op = OPS["gather_tokens"](Inputs(config, 2, torch.device("cpu"), torch.float32))
    gather = op.kernel.function

    def add_one(*arguments: Tensor) -> Tensor:
        return gather(*arguments) + 1

    def drop_a_token(*arguments: Tensor) -> Tensor:
        return gather(*arguments)[:, :-1]

    def scale_the_gradient(*arguments: Tensor) -> Tensor:
        """Return the right values, with gradients that are a tenth too small."""
        tokens = gather(*arguments)
        return 0.9 * tokens + 0.1 * tokens.detach()

    for wrong, message in (
        (add_one, "gives what the published way gives .differs by up to 1"),
        (drop_a_token, "gives what the published way gives .*instead of"),
        (scale_the_gradient, "has the published way's gradients"),
    ):
        op.kernel.function = wrong
        with pytest.raises(InputError, match=f"gather_tokens {message}"):
            kernel_speed.check(op, "gather_tokens")
