import json
from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

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
        assert (row["speed_up_of_ours"] == 1) == (row["implementation"] == "ours"), row
    phases = [row["phase"] for row in rows if row["op"] == "gather_tokens" and row["implementation"] == "ours"]
    assert phases == ["forward", "backward", "both"]


def test_nothing_is_timed_that_differs_from_the_published_way():
    case = CASES["gather_tokens"](SMALL)
    wrong = case._replace(ours=Implementation(lambda: case.ours.call() + 1, case.ours.inputs))
    with pytest.raises(InputError, match="gather_tokens gives what the published way gives"):
        kernel_speed.check(wrong, "gather_tokens")


@pytest.mark.parametrize("op", [op for op in CASES if op != "crop_resize"])  # it reads sizes out of tensors
def test_a_compiled_reference_gives_ours_and_leaves_nothing_out(op, monkeypatch):
    targets: set[str] = set()

    def keep(graph, _):
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=aot_autograd(fw_compiler=keep)))
    case = CASES[op](SMALL)
    torch.testing.assert_close(kernel_speed.compile_reference(case.reference)(), case.ours.call())
    if op == "gumbel_topk":
        assert "aten._assert_async.msg" in targets, "the sampling itself"


def test_an_op_that_is_wrong_loses_its_own_rows_only(tmp_path, monkeypatch):
    def wrong(case, name):
        kernel_speed.require("it is right", name != "gather_tokens", "it is not")

    monkeypatch.setattr(kernel_speed, "check", wrong)
    arguments = ["--batch-size", "1", "--repetitions", "1", "--op", "gather_tokens", "patchify"]
    with pytest.raises(InputError, match=r"1 ops are not reported: gather_tokens, batch 1, .*it is right"):
        kernel_speed.main([*arguments, "--output", str(tmp_path)])
    assert {row["op"] for row in json.loads((tmp_path / "kernel_speed.json").read_text())["rows"]} == {"patchify"}
