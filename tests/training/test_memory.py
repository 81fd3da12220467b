"""What a step takes is known before the first one, and what does not fit is refused."""

import json

import pytest
import torch

from benchmarks import memory_vs_ratio
from benchmarks.harness import RESULTS
from common.errors import InputError
from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.config import ModelConfig
from training import memory
from training.config import TrainConfig, parse

CPU = torch.device("cpu")
SMALL = {"size": "tiny", "image_size": 48, "patch_size": 8, "mask_ratio": 0.85}


def config(*overrides: str) -> TrainConfig:
    return parse(["data.shards=s", *[f"model.{name}={value}" for name, value in SMALL.items()], *overrides])


def model(**changes) -> AdaMAE:
    with torch.device("meta"):
        return AdaMAE(ModelConfig(**(SMALL | changes)))


@pytest.fixture
def room(monkeypatch):
    """Sets what the device has, in bytes."""
    return lambda size: monkeypatch.setattr(memory, "available_bytes", lambda device: size)


@pytest.fixture(scope="module")
def counted() -> memory.Need:
    """Of eight clips, byte by byte; it takes some seconds."""
    return memory.counted(model().config, 8, CPU)


def test_the_estimate_is_near_what_was_counted_for_a_gpu():
    """Every tenth point of the table that benchmarks/memory_vs_ratio.py has written."""
    rows = json.loads((RESULTS / "cpu/memory_vs_ratio.json").read_text())["rows"]
    for row in rows[::10]:
        names = ("masking", "mask_ratio", "decoder_depth", "activation_checkpointing")
        with torch.device("meta"):
            made = AdaMAE(ModelConfig(**{name: row[name] for name in names}))
        estimated = memory.estimated(made, "bf16", torch.device("cuda")).of(row["batch_size"]) / 2**30
        assert estimated == pytest.approx(row["predicted_peak_gib"], rel=0.08), row


def test_the_estimate_is_near_what_is_counted_here(counted):
    assert memory.estimated(model(), "bf16", CPU).of(8) == pytest.approx(counted.of(8), rel=0.15)


def test_an_absurd_batch_is_refused_at_once_with_the_largest_that_fits(room, monkeypatch):
    made = model()
    need = memory.estimated(made, "bf16", CPU)
    monkeypatch.setattr(memory, "counted", lambda *_: pytest.fail("that takes seconds"))
    room(10 * 2**30)
    with pytest.raises(InputError, match=r"batch_size=1000000 would take about .* GiB in a step, of 10 GiB") as raised:
        memory.check_memory(config(), made, 1_000_000, CPU)
    most = int(str(raised.value).split(" clips are the most that fit")[0].rsplit(" ", 1)[1])
    assert need.of(most) <= 10 * 2**30 < need.of(most + 1)
    assert "activation_checkpointing=true" in str(raised.value)


def test_a_close_one_is_counted(room, counted, monkeypatch):
    monkeypatch.setattr(memory, "counted", lambda *_: counted)
    room(counted.of(8) * 1.01)
    said = memory.check_memory(config(), model(), 8, CPU)
    assert said.startswith(f"a step of 8 clips takes {memory.gib(counted.of(8))}, of")
    room(counted.of(8) * 0.99)
    with pytest.raises(InputError, match=r"would take .* 7 clips are the most that fit"):
        memory.check_memory(config(), model(), 8, CPU)


def test_what_fits_well_is_said_and_a_classifier_is_estimated_too(room):
    room(100 * 2**30)
    assert " takes about 0.0" in memory.check_memory(config(), model(), 2, CPU)
    with torch.device("meta"):
        classifier = VideoClassifier(model().config, 5)
    assert memory.check_memory(config("task=finetune"), classifier, 2, CPU)
    with pytest.raises(InputError, match=r"lower batch_size$"):
        memory.check_memory(config("task=finetune"), classifier, 10**6, CPU)


def test_there_is_memory_here():
    assert 2**28 < memory.available_bytes(CPU) < 2**50


def test_the_benchmark_says_the_same_of_a_run(tmp_path, capsys, counted):
    file = tmp_path / "x.yaml"
    file.write_text("model:\n" + "".join(f"  {name}: {value}\n" for name, value in SMALL.items()))
    memory_vs_ratio.main(["--config", str(file), "--batch-size", "8", "device=cpu"])
    said = capsys.readouterr().out
    assert said.startswith(f"a step of 8 clips takes {memory.gib(counted.of(8))} on this CPU (weights 0.00")
    with pytest.raises(InputError, match=r"steps=3 changes a run: say which one"):
        memory_vs_ratio.main(["steps=3"])
