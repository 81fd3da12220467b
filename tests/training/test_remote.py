"""A run in an object store: a file system of fsspec's that can be told to fail."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.reading import storage
from pipeline.reading.storage import ObjectStore
from training import checkpoint, lease
from training import remote_run as folder
from training.checkpoint import Contents, TrainState
from training.config import TrainConfig
from training.lease import Lease, TakenOverError
from training.remote_run import RemoteRun
from training.run_dir import RunDir
from training.saving import Saver

URL = "faulty://bucket/runs/x"


class Faulty(MemoryFileSystem):
    """Memory which forgets nothing between its instances; `failing`: what every write raises."""

    protocol = "faulty"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failing: Exception | None = None
    order: ClassVar[list[str]] = []

    def pipe_file(self, path, value, mode="overwrite", **options):
        self._written(path)
        super().pipe_file(path, value, **options)

    def put_file(self, lpath, rpath, *others, **options):
        self._written(rpath)
        super().put_file(lpath, rpath, *others, **options)

    def _written(self, path: str) -> None:
        if Faulty.failing is not None:
            raise Faulty.failing
        Faulty.order.append(path.removeprefix(f"{URL}/"))


@pytest.fixture(autouse=True)
def store(monkeypatch) -> Iterator[type[Faulty]]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.store.clear()
    Faulty.order.clear()
    Faulty.failing = None
    monkeypatch.setattr(storage.time, "sleep", lambda _: None)
    monkeypatch.setattr(lease, "RENEW_S", 0.01)
    monkeypatch.setattr(lease, "PATIENCE_S", 0.2)
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)
    yield Faulty
    Faulty.failing = None


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Iterator[str]:
    """Move to a machine of that name, with a disk of its own."""

    def moved(name: str) -> None:
        monkeypatch.setattr(folder, "user_cache_dir", lambda: tmp_path / name)

    moved("one")
    return moved


@pytest.fixture
def contents() -> Contents:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return Contents({"model": model}, optimizer, {})


CONFIG = TrainConfig(data=DataConfig(shards="there"), run=URL)
START = TrainState(0, 2, "these")


def train(contents: Contents, *steps: int, keep: int = 2) -> int:
    """What train.py does with a run folder; returns the step that was gone on from."""
    with RunDir(CONFIG, is_main=True) as run:
        run.fetch()
        first = checkpoint.load_newest(run.checkpoints, contents, START, 100).step
        with Saver(run, contents, keep) as saver:
            for step in steps:
                with run.metrics.open("a") as log:
                    print(json.dumps({"step": step}), file=log)
                contents.modules["model"].weight.data += 1
                saver.save(replace(START, step=step))
                saver.mark_reviewed(step)
        return first


def there() -> set[str]:
    return {name.removeprefix(f"{URL}/") for name in Faulty.store}


def test_another_machine_goes_on_from_what_was_uploaded(machine, contents):
    assert train(contents, 1, 2) == 0
    weight = contents.modules["model"].weight.clone()
    machine("two")
    contents.modules["model"].weight.data.zero_()
    assert train(contents) == 2
    assert torch.equal(weight, contents.modules["model"].weight)
    here = folder.staging(URL)
    assert [json.loads(line)["step"] for line in (here / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert (here / "checkpoints/step-00000002/reviewed").exists()
    assert (here / "config.yaml").exists()


def test_a_checkpoint_counts_with_its_last_file_and_old_ones_go(machine, contents):
    train(contents, 1, 2, 3)
    assert {name.split("/")[1] for name in there() if "step-" in name} == {"step-00000002", "step-00000003"}
    of_three = [name.split("/")[2] for name in Faulty.order if "step-00000003" in name]
    assert sorted(of_three[:2]) == ["model.safetensors", "optimizer.pt"]
    assert of_three[2:] == ["train_state.json", "reviewed"]
    assert "lease.txt" not in there()


def test_a_torn_checkpoint_is_said_and_skipped(machine, contents, capsys):
    train(contents, 1, 2, 3, keep=3)
    del Faulty.store[f"{URL}/checkpoints/step-00000003/train_state.json"]
    Faulty.store[f"{URL}/checkpoints/step-00000002/model.safetensors"].truncate(10)
    machine("two")
    assert train(contents) == 1
    said = capsys.readouterr().err
    assert f"{URL}/checkpoints/step-00000003 is not whole (it has no train_state.json), and is skipped" in said
    assert "step-00000002 is not whole (model.safetensors has changed since it was written), and is skipped" in said


def test_two_launches_are_refused_whatever_their_clocks_say(machine, contents, monkeypatch):
    with RunDir(CONFIG, is_main=True):
        machine("two")
        monkeypatch.setattr(lease.time, "time", lambda: 0.0)
        with pytest.raises(InputError, match=f"{URL} is in use by another training job, on .*: wait for it"):
            train(contents)
    assert train(contents) == 0


def test_a_lease_that_was_left_is_free_after_a_while_and_at_once_on_the_same_machine(machine, monkeypatch, capsys):
    Lease(ObjectStore(URL), "someone")._renew()
    mine = Lease(ObjectStore(URL), "someone")
    mine.take()
    mine.release()
    assert "watching" not in capsys.readouterr().err
    left = Lease(ObjectStore(URL + "2"), "someone")
    left._renew()
    other = Lease(ObjectStore(URL + "2"), "another")
    other.take()
    assert "is in use by" in capsys.readouterr().err
    with pytest.raises(TakenOverError):
        left.check()
    other.release()
    assert ObjectStore(URL + "2").read(Lease.NAME) is None


def test_who_has_lost_the_lease_uploads_nothing_more_and_ends(machine, contents):
    with RunDir(CONFIG, is_main=True) as run:
        saver = Saver(run, contents, 2)
        ObjectStore(URL).write(Lease.NAME, b"other elsewhere 1")
        saver.save(replace(START, step=1))
        with pytest.raises(TakenOverError, match="is in use by another training job, on elsewhere"):
            saver.join()
    assert not [name for name in there() if "step-" in name]
    assert Faulty.store[f"{URL}/{Lease.NAME}"].getvalue() == b"other elsewhere 1"


def test_a_store_without_permission_is_one_sentence_before_the_first_step(machine, contents):
    Faulty.failing = PermissionError("Access Denied")
    with pytest.raises(InputError, match=f"{URL}/lease.txt cannot be written to: no permission"):
        train(contents, 1)


def test_a_store_that_does_not_exist_is_one_sentence(machine):
    with pytest.raises(InputError, match="nowhere://bucket/x cannot be opened: Protocol not known"):
        RunDir(replace(CONFIG, run="nowhere://bucket/x"), is_main=True)


def test_an_upload_that_fails_is_tried_again_and_loses_nothing(machine, contents, capsys):
    with RunDir(CONFIG, is_main=True) as run, Saver(run, contents, 2) as saver:
        Faulty.failing = OSError("503 slow down")
        saver.save(replace(START, step=1))
        saver.join()
        said = capsys.readouterr().err
        assert "503 slow down; " in said
        assert f"{run.path} keeps all of it, and the next checkpoint tries again" in said
        assert checkpoint.whole(run.checkpoints)
        Faulty.failing = None
        saver.save(replace(START, step=2))
    assert {"checkpoints/step-00000001/train_state.json", "checkpoints/step-00000002/train_state.json"} <= there()


def test_a_run_that_could_not_be_uploaded_says_so_at_its_end(machine, contents):
    with RunDir(CONFIG, is_main=True) as run:
        saver = Saver(run, contents, 2)
        Faulty.failing = OSError("503 slow down")
        saver.save(replace(START, step=1))
        with pytest.raises(InputError, match="503 slow down"):
            saver.__exit__()
        Faulty.failing = None
    assert train(contents) == 1  # from this machine's folder, and uploads it
    assert "checkpoints/step-00000001/train_state.json" in there()


def test_a_request_that_fails_now_and_then_is_repeated(machine):
    calls = []

    def request() -> int:
        calls.append(1)
        if len(calls) < 4:
            raise OSError("503")
        return 7

    assert ObjectStore(URL)._tried("read", request) == 7


def test_a_folder_that_was_emptied_is_not_filled_from_this_machine_in_silence(machine, contents):
    train(contents, 1)
    Faulty.store.clear()
    with pytest.raises(InputError, match=f"{URL} is empty, and .* keeps what was trained there: remove that"):
        train(contents)
    shutil.rmtree(folder.staging(URL))
    assert train(contents) == 0


def test_a_line_that_is_being_written_is_not_uploaded(machine):
    run = RemoteRun(URL, folder.staging(URL))
    run.local.mkdir(parents=True, exist_ok=True)
    (run.local / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    run.sync()
    assert Faulty.store[f"{URL}/metrics.jsonl"].getvalue() == b'{"step": 1}\n'


def test_machines_without_the_first_process_fetch_the_newest(machine, contents, monkeypatch):
    train(contents, 1)
    machine("two")
    monkeypatch.setenv("LOCAL_RANK", "0")
    run = RunDir(CONFIG, is_main=False)
    run.fetch()
    assert [path.name for path in checkpoint.whole(run.checkpoints)] == ["step-00000001"]


def test_a_folder_by_its_url_is_a_run_too(machine, contents, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, run=f"file://{tmp_path}/bucket/run"))
    assert train(contents, 1) == 0
    machine("two")
    assert train(contents) == 1
    assert (tmp_path / "bucket/run/checkpoints/step-00000001/train_state.json").is_file()


def test_the_heart_beats(machine):
    held = Lease(ObjectStore(URL), "me")
    held.take()
    first = ObjectStore(URL).read(Lease.NAME)
    ticking = threading.Event()
    while ObjectStore(URL).read(Lease.NAME) == first:
        ticking.wait(0.01)
    held.release()


def test_commands_read_a_run_by_its_url(machine, contents):
    train(contents, 1)
    machine("two")
    copy = folder.local_run(URL)
    weight = checkpoint.load_file(copy / "checkpoints/step-00000001/model.safetensors")["weight"]
    assert torch.equal(weight, contents.modules["model"].weight)
    assert copy != folder.staging(URL)
    Faulty.store[f"{URL}/config.yaml"].write(b"another")
    assert folder.local_run(URL) == copy
    assert (copy / "config.yaml").read_bytes().endswith(b"another")
    assert folder.local_run("runs/x") == Path("runs/x")
