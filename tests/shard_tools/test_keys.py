"""Names of samples inside the tars: no two alike, and those of earlier versions stay."""

import json
import shutil
from pathlib import Path

import pytest
from shard_making import Here, all_samples, hashes, make

from common.errors import InputError
from pipeline.shards.format import read_dataset_info
from shard_tools import make_shards
from shard_tools.build import Build
from shard_tools.inputs import read_inputs
from shard_tools.planning import new_plan
from shard_tools.planning.layout import EARLIER_KEY_DIGITS, key_of
from shard_tools.planning.plan import Plan
from shard_tools.settings import Settings

ALIKE = ("621331/clip.mp4", "1111041/clip.mp4")  # SHA-256 of both begins with c596d5dcb6
COPIED = Settings(samples_per_shard=2, encode="copy")
OPTIONS = ("--encode", "copy", "--samples-per-shard", "2", "--unlabelled")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make_shards.ENGINES, "processes", lambda *arguments: Here())


def filled(folder: Path, videos: Path, names: tuple[str, ...]) -> Path:
    for name, video in zip(names, sorted(videos.rglob("*.mp4")), strict=False):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(video, folder / name)
    return folder


def earlier(videos: Path, folder: Path, most: int = 99) -> Build:
    """What an earlier version made of `videos`, or had made of them when it was killed after `most`."""
    items = read_inputs(str(videos), None, True)
    making = Build(folder, COPIED)
    with making.locked(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_plan, "KEY_DIGITS", EARLIER_KEY_DIGITS)
        plan = making.plan(items, [], False)
        assert plan is not None
        assert plan.key_digits == EARLIER_KEY_DIGITS
        head, *shards = map(json.loads, making.plan_file.read_text().splitlines())
        del head["key_digits"], head["num_shards"]
        making.plan_file.write_text(json.dumps({**head, "shards": dict(shards)}) + "\n")
        plan = making.plan(items, [], False)
        assert plan is not None
        making.run(plan, items, Here(most), lambda outcome: None)
        if most >= len(items):
            assert making.finish(plan) is None
    return making


def test_sources_whose_earlier_keys_were_alike_are_both_stored(videos: Path, tmp_path: Path) -> None:
    assert len({key_of(source, EARLIER_KEY_DIGITS) for source in ALIKE}) == 1
    filled(tmp_path / "in", videos, ALIKE)
    assert make(tmp_path / "in", tmp_path / "out", *OPTIONS) == 0
    assert sorted(sample.source for _, sample in all_samples(tmp_path / "out")) == sorted(ALIKE)


def test_a_dataset_of_an_earlier_version_keeps_its_keys(videos: Path, tmp_path: Path) -> None:
    earlier(filled(tmp_path / "in", videos, ("a.mp4", "b.mp4", "c.mp4")), tmp_path / "out")
    before = hashes(tmp_path / "out")
    filled(tmp_path / "in", videos, ("a.mp4", "b.mp4", "c.mp4", "d.mp4"))
    assert make(tmp_path / "in", tmp_path / "out", *OPTIONS) == 0
    after = hashes(tmp_path / "out")
    kept = {name: content for name, content in before.items() if name.startswith("shard-")}
    assert {name: after[name] for name in kept} == kept
    keys = {sample.source: sample.key for _, sample in all_samples(tmp_path / "out")}
    assert keys == {name: key_of(name, EARLIER_KEY_DIGITS) for name in ("a.mp4", "b.mp4", "c.mp4")} | {
        "d.mp4": key_of("d.mp4")
    }


def test_a_run_that_an_earlier_version_began_ends_with_its_bytes(videos: Path, tmp_path: Path) -> None:
    filled(tmp_path / "in", videos, ("a.mp4", "b.mp4", "c.mp4", "d.mp4", "e.mp4"))
    earlier(tmp_path / "in", tmp_path / "whole")
    earlier(tmp_path / "in", tmp_path / "out", most=3)
    assert make(tmp_path / "in", tmp_path / "out", *OPTIONS) == 0
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_an_earlier_plan_with_two_keys_alike_says_what_to_do(videos: Path, tmp_path: Path) -> None:
    filled(tmp_path / "in", videos, ("a.mp4",))
    earlier(tmp_path / "in", tmp_path / "out", most=0)
    plan_file = tmp_path / "out" / ".work" / "plan.json"
    plan_file.write_text(
        plan_file.read_text().replace('["a.mp4", null, 0]', json.dumps([[s, None, 0] for s in ALIKE])[1:-1])
    )
    assert Plan.load(plan_file).sources("shard-000000.tar") == list(ALIKE)
    with pytest.raises(InputError, match=r"same key clip-c596d5dcb6 .*: remove .*/out/\.work, planned by an earlier"):
        make(tmp_path / "in", tmp_path / "out", *OPTIONS)
    shutil.rmtree(tmp_path / "out" / ".work")
    assert make(tmp_path / "in", tmp_path / "out", *OPTIONS) == 0


@pytest.mark.parametrize("stored", [(), ALIKE[:1]], ids=["both new", "one stored"])
def test_two_keys_alike_are_found_before_anything_is_made(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: tuple[str, ...]
) -> None:
    for module in ("plan", "new_plan"):
        monkeypatch.setattr(
            f"shard_tools.planning.{module}.key_of", lambda source, digits: key_of(source, EARLIER_KEY_DIGITS)
        )
    if stored:
        make(filled(tmp_path / "in", videos, stored), tmp_path / "out", *OPTIONS)
    before = hashes(tmp_path / "out") if stored else {}
    filled(tmp_path / "in", videos, ALIKE)
    with pytest.raises(InputError, match=r"would have the same key clip-c596d5dcb6 in .*: rename one of them"):
        make(tmp_path / "in", tmp_path / "out", *OPTIONS)
    made = {name: content for name, content in hashes(tmp_path / "out").items() if not name.startswith(".work")}
    assert made == before


def test_a_part_says_what_it_waits_for(videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "in", videos, ("a.mp4", "b.mp4", "c.mp4", "d.mp4", "e.mp4", "f.mp4"))
    assert make(tmp_path / "in", tmp_path / "out", *OPTIONS, "--part", "3/3") == 0
    assert "part 3 of 3 is done, part 1 is not; the part that ends last completes" in capsys.readouterr().out
    assert make(tmp_path / "in", tmp_path / "out", *OPTIONS, "--part", "1/3") == 0
    assert "part 1 of 3 is done, part 2 is not" in capsys.readouterr().out
    assert make(tmp_path / "in", tmp_path / "out", *OPTIONS, "--part", "2/3") == 0
    assert read_dataset_info(tmp_path / "out").num_samples == 6


def test_without_a_dataset_where_one_was_due_no_run_ends_well(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "in", videos, ("a.mp4", "b.mp4"))
    monkeypatch.setattr(Build, "_finish_shard", lambda *arguments: None)  # any fault by which a shard does not come
    with pytest.raises(InputError, match=r"shard-000000\.tar is not whole yet: start the same command again"):
        make(tmp_path / "in", tmp_path / "out", *OPTIONS)
