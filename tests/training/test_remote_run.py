"""A run in object storage: fsspec's file system in memory, whose writes may fail."""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from processes import wait_for
from torch import nn

from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.reading import storage
from adamae.training import remote_run
from adamae.training.checkpoint import TrainState, list_checkpoints, load_file
from adamae.training.config import TrainConfig
from adamae.training.distributed import Distributed
from adamae.training.remote_run import TakenOverError, fetch_config, local_run, staging
from adamae.training.run_dir import RunDir

URL = "memory://bucket/runs/x"
CONFIG = TrainConfig(data=DataConfig(shards="there"), run=URL, keep_checkpoints=2)
# Every client in this process sees these files, which are in the order in which they were written.
STORE = MemoryFileSystem.store
PREFIX = "/bucket/runs/x"


@pytest.fixture(autouse=True)
def empty_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "PAUSE_S", 0)
    yield
    STORE.clear()


def failing(error: Exception) -> AbstractContextManager[object]:
    """Make every write in the block raise an error."""
    return patch.object(MemoryFileSystem, "_open", side_effect=error)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that moves to a node of a name, which has a disk of its own."""

    def move(name: str) -> None:
        monkeypatch.setattr(remote_run, "user_cache_dir", lambda: tmp_path / name)

    move("one")
    return move


class Trained:
    """A small model that is trained, saved and loaded in a run directory, as by train.py."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def train(self, *steps: int, config: TrainConfig = CONFIG) -> int:
        """Resume the run, and take these steps; return the step that it resumed from."""
        with RunDir(config, Distributed("cpu")) as run:
            step = self.load(run)
            self.steps(run, *steps)
            return step

    def load(self, run: RunDir) -> int:
        return run.load({"model": self.model}, self.optimizer, TrainState(0, 2, "these")).step

    def steps(self, run: RunDir, *steps: int) -> None:
        """Log, change the weights, and save a checkpoint at each step."""
        for step in steps:
            with run.metrics.open("a") as log:
                print(json.dumps({"step": step}), file=log)
            self.model.weight.data += 1
            run.save(TrainState(step, 2, "these"), {"model": self.model}, self.optimizer, {})


@pytest.fixture
def trained() -> Trained:
    return Trained()


def wait_for_upload(run: RunDir) -> None:
    """Wait until the newest checkpoint is written, and its upload has ended or failed."""
    run.writer.wait()
    assert wait_for(lambda: run.uploader._upload is None, 120)


def list_stored() -> list[str]:
    """List the stored files of the run, in the order in which they were written."""
    return [name.removeprefix(f"{PREFIX}/") for name in STORE]


def list_stored_checkpoints() -> set[str]:
    return {name.split("/")[1] for name in list_stored() if "step-" in name}


def test_another_node_resumes_from_what_was_uploaded(
    node: Callable[[str], None], trained: Trained
) -> None:
    assert trained.train(1, 2) == 0
    weight = trained.model.weight.clone()
    node("two")
    trained.model.weight.data.zero_()
    assert trained.train() == 2
    assert torch.equal(weight, trained.model.weight)
    rows = (staging(URL) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]
    assert (staging(URL) / "config.yaml").exists()


def test_a_checkpoint_counts_with_its_last_file_and_old_ones_go(
    node: Callable[[str], None], trained: Trained
) -> None:
    trained.train(1, 2, 3)
    assert list_stored_checkpoints() == {"step-00000002", "step-00000003"}
    files = [name.split("/")[2] for name in list_stored() if "step-00000003" in name]
    assert sorted(files[:2]) == ["model.safetensors", "optimizer.pt"]
    assert files[2:] == ["train_state.json"]


def test_a_torn_checkpoint_is_skipped_and_a_damaged_one_named(
    node: Callable[[str], None], trained: Trained
) -> None:
    trained.train(1, 2)
    del STORE[f"{PREFIX}/checkpoints/step-00000002/train_state.json"]
    node("two")
    assert trained.train(2) == 1
    STORE[f"{PREFIX}/checkpoints/step-00000002/model.safetensors"].truncate(10)
    node("three")
    message = r"step-00000002 cannot be loaded \(model.safetensors has changed"
    with pytest.raises(InputError, match=message):
        trained.train()


def test_the_job_that_was_started_last_owns_the_run_and_the_one_before_ends(
    node: Callable[[str], None], trained: Trained
) -> None:
    """The first one may run on a node that was thought lost; neither waits for a clock."""
    first = RunDir(CONFIG, Distributed("cpu")).__enter__()
    trained.load(first)
    node("two")
    trained.steps(first, 1)
    wait_for_upload(first)
    # A job that fails before it trains does not take the run over.
    with pytest.raises(InputError, match="was made with another configuration"):
        trained.train(config=replace(CONFIG, seed=1))
    assert trained.train(2) == 1
    trained.steps(first, 3)
    message = f"{URL} was taken over by a job that was started later, on .*: it continues"
    with pytest.raises(TakenOverError, match=message):
        first.__exit__(None, None, None)
    assert list_stored_checkpoints() == {"step-00000001", "step-00000002"}


def test_storage_that_cannot_be_used_is_one_sentence_before_the_first_step(
    node: Callable[[str], None], trained: Trained
) -> None:
    with (
        failing(PermissionError("Access Denied")),
        pytest.raises(InputError, match=f"{URL}/owner cannot be written to: no permission"),
    ):
        trained.train(1)
    with pytest.raises(InputError, match="nowhere://bucket/x cannot be opened: Protocol not known"):
        trained.train(config=replace(CONFIG, run="nowhere://bucket/x"))


def test_an_upload_that_fails_is_tried_again_or_said_at_the_end_and_loses_nothing(
    node: Callable[[str], None], trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [f"checkpoints/step-0000000{step}/train_state.json" for step in (1, 2, 3)]
    run = RunDir(CONFIG, Distributed("cpu")).__enter__()
    trained.load(run)
    for step in (1, 2, 3):
        with nullcontext() if step == 2 else failing(OSError("503 slow down")):
            trained.steps(run, step)
            wait_for_upload(run)
        note = f"{run.path} keeps everything, and the next checkpoint tries again"
        assert (note in capsys.readouterr().err) == (step != 2)
    # The upload of the second step has brought the first one along.
    assert [state in list_stored() for state in states] == [True, True, False]
    with failing(OSError("503 slow down")), pytest.raises(InputError, match="503 slow down"):
        run.__exit__(None, None, None)
    # It resumes from the folder on this node, and uploads that.
    assert trained.train() == 3
    assert states[2] in list_stored()


@contextmanager
def silent(suffix: str) -> Iterator[None]:
    """Let no write of files that end in `suffix` return before the end of the block."""
    released = threading.Event()
    write = MemoryFileSystem.pipe_file

    def write_unless_silent(self: MemoryFileSystem, path: str, *arguments: object) -> None:
        if path.endswith(suffix):
            released.wait()
        write(self, path, *arguments)

    with patch.object(MemoryFileSystem, "pipe_file", write_unless_silent):
        yield
        released.set()


def test_an_upload_without_an_answer_holds_up_neither_checkpoints_nor_a_stop(
    node: Callable[[str], None],
    trained: Trained,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_run, "STOP_TIMEOUT_S", 0.2)
    run = RunDir(CONFIG, Distributed("cpu")).__enter__()
    trained.load(run)
    with silent("optimizer.pt"):
        started = time.monotonic()
        trained.steps(run, 1, 2, 3)
        run.is_stopping = True
        run.__exit__(None, None, None)
        assert time.monotonic() - started < 100, "the storage is silent for ever"
    assert [path.name for path in list_checkpoints(run.checkpoints)] == [
        "step-00000002",
        "step-00000003",
    ]
    note = rf"{URL} has not answered for \d+ s; {run.path} keeps the"
    assert re.search(note, capsys.readouterr().err)
    assert trained.train() == 3
    assert "checkpoints/step-00000003/train_state.json" in list_stored()


def test_at_a_stop_storage_that_fails_is_said_and_the_job_can_be_requeued(
    node: Callable[[str], None], trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(CONFIG, Distributed("cpu")).__enter__()
    trained.load(run)
    run.is_stopping = True
    with failing(OSError("503 slow down")):
        trained.steps(run, 1)
        run.__exit__(None, None, None)
    assert "503 slow down; " in capsys.readouterr().err
    assert trained.train() == 1


def test_a_folder_that_was_emptied_is_not_filled_from_this_node_in_silence(
    node: Callable[[str], None], trained: Trained
) -> None:
    trained.train(1)
    STORE.clear()
    with pytest.raises(InputError, match=f" keeps another run than {URL} holds: remove it"):
        trained.train()
    shutil.rmtree(staging(URL))
    assert trained.train() == 0


def test_nodes_without_the_main_rank_fetch_the_newest(
    node: Callable[[str], None], trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.train(1)
    node("two")
    second = Distributed("cpu")
    second.rank = 1
    with RunDir(CONFIG, second) as run:
        assert [path.name for path in list_checkpoints(run.checkpoints)] == ["step-00000001"]


def test_commands_read_a_run_by_its_url(node: Callable[[str], None], trained: Trained) -> None:
    assert fetch_config(URL) is None
    trained.train(1)
    node("two")
    assert (fetch_config(URL) / "config.yaml").exists()
    copy = local_run(URL)
    weight = load_file(copy / "checkpoints/step-00000001/model.safetensors")["weight"]
    assert torch.equal(weight, trained.model.weight)
    assert copy != staging(URL)
    STORE[f"{PREFIX}/config.yaml"].seek(0, 2)
    STORE[f"{PREFIX}/config.yaml"].write(b"another")
    assert local_run(URL) == copy
    assert (copy / "config.yaml").read_bytes().endswith(b"another")
    assert local_run("runs/x") == Path("runs/x")
