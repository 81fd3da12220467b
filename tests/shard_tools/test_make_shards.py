"""Datasets are complete, can be resumed and extended, and always have the same bytes."""

import filecmp
import hashlib
import json
import shutil
import statistics
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import wds2idx
import webdataset
from shard_making import (
    NUM_FRAMES,
    NUM_VIDEOS,
    all_samples,
    hashes,
    make,
    numbers_of,
    read_numbers,
    video_bytes,
)

from adamae.common.errors import InputError
from adamae.pipeline.shards.read_format import read_dataset_info, read_samples
from adamae.shard_tools import make_shards
from adamae.shard_tools.build import read_rejects
from adamae.shard_tools.inputs import Item
from adamae.shard_tools.settings import Settings
from adamae.shard_tools.work import Job, process_job, read_staged
from adamae.shard_tools.write import TAR_FIELDS, dump_sample

THREE = ("--samples-per-shard", "3")
COPY = ("--encode", "copy")


@pytest.fixture
def copied(videos: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(videos, tmp_path / "videos"))


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_every_video_is_stored_with_every_fourth_frame(videos: Path, dataset: Path) -> None:
    samples = all_samples(dataset)
    sources = sorted(path.relative_to(videos).as_posix() for path in videos.rglob("*.mp4"))
    assert sorted(sample.source for _, sample in samples) == sources
    assert list(numbers_of(dataset).values()) == [list(range(0, NUM_FRAMES, 4))] * NUM_VIDEOS
    classes = ["down", "left", "right"]
    for shard, sample in samples:
        assert sample.sha256 == hash_of(video_bytes(dataset, shard, sample))
        assert sample.source_sha256 == hash_of((videos / sample.source).read_bytes())
        assert (sample.num_frames, sample.fps, sample.frame_stride) == (5, 7.5, 4)
        assert (sample.codec, sample.width, sample.height) == ("h264", 64, 64)
        assert classes[sample.label or 0] == sample.source.split("/")[0]


def test_dataset_json_describes_the_shards(dataset: Path) -> None:
    info = read_dataset_info(dataset)
    assert info.classes == ["down", "left", "right"]
    assert info.num_samples == NUM_VIDEOS
    assert info.num_frames == NUM_VIDEOS * 5
    assert info.encode["quality"] == 22
    assert info.report["class_histogram"] == {"down": 3, "left": 3, "right": 3}
    assert info.report["hours"] == pytest.approx(NUM_VIDEOS * 5 / 7.5 / 3600, rel=1e-3)
    for shard in info.shards:
        data = (dataset / shard.name).read_bytes()
        assert shard.num_samples == 3
        assert shard.num_bytes == len(data)
        assert shard.sha256 == hash_of(data)


def test_other_readers_understand_the_shards(dataset: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    for shard in read_dataset_info(dataset).shards:
        tar = str(dataset / shard.name)
        with wds2idx.IndexCreator(tar, str(index), verbose=False) as creator:
            creator.create_index()
        header = f"v1.2 {shard.num_samples}\n"
        assert index.read_text().startswith(header), "what DALI's reader needs"
        entries = list(webdataset.WebDataset(tar, shardshuffle=False))
        for entry, sample in zip(entries, read_samples(dataset, shard), strict=True):
            assert entry["__key__"] == sample.key
            assert hash_of(entry["mp4"]) == sample.sha256
            expected = json.loads(dump_sample(sample))
            for field in TAR_FIELDS:
                expected.pop(field, None)
            assert json.loads(entry["json"]) == expected


def test_parts_with_several_workers_give_the_same_bytes_and_the_last_one_completes_the_dataset(
    workers: None, videos: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The part that is run, and the first one that is missing then.
    for part, missing in ((3, 1), (1, 2)):
        options = ["--part", f"{part}/3", "--workers", "3"]
        assert make(videos, tmp_path / "out", *THREE, *options) == 0
        assert not (tmp_path / "out" / "dataset.json").exists()
        message = f"part {part} of 3 is done, part {missing} is not; the last part to finish"
        assert message in capsys.readouterr().out
    assert make(videos, tmp_path / "out", *THREE, "--part", "2/3") == 0
    assert hashes(tmp_path / "out") == hashes(dataset)


def test_a_torn_staged_result_is_made_again(
    videos: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("adamae.shard_tools.build.write_shard", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(videos, tmp_path, *THREE)
    staged = sorted((tmp_path / ".work" / "items").glob("*/*.mp4"))
    assert len(staged) >= 3
    assert max(Counter(path.parent for path in staged).values()) <= 3, "a folder per shard"
    staged[0].write_bytes(staged[0].read_bytes()[:-7])
    staged[1].unlink()
    make(videos, tmp_path, *THREE)
    assert hashes(tmp_path) == hashes(dataset)


def test_new_videos_come_into_new_shards(copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    late = sorted(copied.rglob("*.mp4"))[::4]
    for path in late:
        path.rename(tmp_path / path.name)
    make(copied, out, *THREE)
    before = {name: data for name, data in hashes(out).items() if name.startswith("shard-")}
    for path in late:
        (tmp_path / path.name).rename(path)
    make(copied, out, *THREE)
    after = hashes(out)
    assert before.items() <= after.items()
    samples = all_samples(out)
    assert len(samples) == NUM_VIDEOS
    new_sources = {sample.source for shard, sample in samples if shard not in before}
    assert new_sources == {path.relative_to(copied).as_posix() for path in late}
    make(copied, out, *THREE)
    assert hashes(out) == after, "a run with nothing to do changed something"


@pytest.fixture
def listed(videos: Path, tmp_path: Path) -> Path:
    """Return a list of one labeled video beside it."""
    path = tmp_path / "in" / "list.csv"
    path.parent.mkdir()
    shutil.copy(sorted(videos.rglob("*.mp4"))[0], path.parent / "a.mp4")
    path.write_text("a.mp4,right\n")
    return path


def test_what_does_not_fit_a_dataset_is_refused_before_anything_is_touched(
    videos: Path, listed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        make(listed, out, *COPY)
    before = hashes(out)
    listed.write_text("a.mp4,left\n")
    change = (
        r"1 video with another label now \(the first: a\.mp4, 'right' there and 'left' in the"
        " input"
    )
    with pytest.raises(InputError, match=change):
        make(listed, out, *COPY)
    with pytest.raises(InputError, match="with another label now"):
        make(listed, out, *COPY, "--unlabeled")
    listed.write_text("a.mp4,right\n")
    first, second = sorted(videos.rglob("*.mp4"))[:2]
    shutil.copy(second, listed.parent / "a.mp4")
    sizes = f"{first.stat().st_size} bytes there and {second.stat().st_size} bytes in the input"
    with pytest.raises(
        InputError, match=f"1 video of another size than when stored .*a.mp4, {sizes}"
    ):
        make(listed, out, *COPY)
    with pytest.raises(InputError, match="seed is 0 there and 1 now"):
        make(listed, out, *COPY, "--seed", "1")
    assert hashes(out) == before


def test_nothing_is_added_to_a_dataset_with_a_damaged_shard(listed: Path, tmp_path: Path) -> None:
    make(listed, tmp_path / "out", *COPY)
    tar = tmp_path / "out" / "shard-000000.tar"
    tar.write_bytes(tar.read_bytes()[:-512])
    with pytest.raises(InputError, match=r"shard-000000\.tar is missing or incomplete"):
        make(listed, tmp_path / "out", *COPY)
    tar.unlink()
    with pytest.raises(InputError, match=r"shard-000000\.tar is missing or incomplete"):
        make(listed, tmp_path / "out", *COPY)


def test_a_reject_moves_no_other_video(copied: Path, dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    samples = all_samples(dataset)
    _, broken_sample = samples.pop(4)
    broken = broken_sample.source
    intact = (copied / broken).read_bytes()
    (copied / broken).write_bytes(intact[: len(intact) // 2])
    make(copied, out, *THREE)
    expected = [(shard, sample.key) for shard, sample in samples]
    assert [(shard, sample.key) for shard, sample in all_samples(out)] == expected
    assert filecmp.cmp(dataset / "shard-000000.tar", out / "shard-000000.tar", shallow=False)
    # Once repaired, it is read only if the rejects are removed.
    (copied / broken).write_bytes(intact)
    make(copied, out, *THREE)
    assert list(read_rejects(out)) == [broken]
    (out / "rejected.jsonl").unlink()
    make(copied, out, *THREE)
    assert read_rejects(out) == {}
    _, last = all_samples(out)[-1]
    assert last.source == broken


def test_too_many_rejects_are_an_error_after_the_work(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "left" / "empty.mp4").touch()
    arguments = [str(copied), str(tmp_path / "out"), "--max-rejects"]
    assert make_shards.main([*arguments, "0.05"]) == 3
    assert "error: 1 of 10 videos rejected (10%), limit is 5%" in capsys.readouterr().err
    assert read_dataset_info(tmp_path / "out").num_samples == NUM_VIDEOS
    assert make_shards.main([*arguments, "0.2"]) == 0


def test_splits_share_classes_which_keep_their_ids(videos: Path, tmp_path: Path) -> None:
    lists = {
        "train": "right/video_000000.mp4,right\nleft/video_000001.mp4,left\n",
        "val": "left/video_000004.mp4,left\nright/video_000003.mp4,right\n",
    }
    splits = [f"--split={name}={tmp_path}/{name}.csv" for name in lists]
    for name, lines in lists.items():
        (tmp_path / f"{name}.csv").write_text(lines)
    assert make(videos, tmp_path / "out", *splits) == 0
    (tmp_path / "val.csv").write_text(lists["val"] + "down/video_000002.mp4,down\n")
    assert make(videos, tmp_path / "out", *splits) == 0
    for name, classes in (("train", ["left", "right"]), ("val", ["left", "right", "down"])):
        assert read_dataset_info(tmp_path / "out" / name).classes == classes
        labels = set()
        for _, sample in all_samples(tmp_path / "out" / name):
            label = classes[sample.label or 0]
            assert sample.source.startswith(f"{label}/")
            labels.add(label)
        assert labels == set(classes)
    (tmp_path / "map.txt").write_text("down\nleft\nright\n")
    (tmp_path / "val.csv").write_text("left/video_000001.mp4,left\n")
    with pytest.raises(InputError, match="their ids would change"):
        make(videos, tmp_path / "out", *splits, "--label-map", str(tmp_path / "map.txt"))


def test_a_fraction_of_the_files_is_held_out_and_stays_so(videos: Path, tmp_path: Path) -> None:
    def sources(name: str) -> set[str]:
        return {sample.source for _, sample in all_samples(tmp_path / "out" / name)}

    few = tmp_path / "videos"
    shutil.copytree(videos, few, ignore=shutil.ignore_patterns("*_000002.mp4"))
    assert make(few, tmp_path / "out", "--hold-out", "0.4") == 0
    first = sources("validation")
    assert 0 < len(first) < len(first | sources("train")) == len(list(few.rglob("*.mp4")))
    shutil.copytree(videos, few, dirs_exist_ok=True)
    assert make(few, tmp_path / "out", "--hold-out", "0.4") == 0
    assert len(sources("validation") | sources("train")) == NUM_VIDEOS
    assert first <= sources("validation")
    assert not sources("validation") & sources("train")
    assert read_dataset_info(tmp_path / "out/train").classes == ["down", "left", "right"]
    message = r"down/video_000002\.mp4 has no group by --group-by folder:2"
    with pytest.raises(InputError, match=message):
        make(few, tmp_path / "none", "--hold-out", "0.4", "--group-by", "folder:2")
    with pytest.raises(InputError, match="was on both sides of an earlier run"):
        make(few, tmp_path / "out", "--hold-out", "0.4", "--group-by", "name:video")
    assert not (tmp_path / "none").exists()


def test_long_videos_are_cut_into_pieces_in_all_shards_without_losing_a_frame(
    videos: Path, tmp_path: Path
) -> None:
    options = ["--frame-stride", "2", "--clip-seconds", "0.2", "--samples-per-shard", "5"]
    make(videos, tmp_path / "out", *options)
    assert {shard.num_samples for shard in read_dataset_info(tmp_path / "out").shards} == {4, 5}
    shards: dict[str, set[str]] = defaultdict(set)
    numbers: dict[str, list[int]] = defaultdict(list)
    for shard, sample in sorted(all_samples(tmp_path / "out"), key=lambda item: item[1].start):
        shards[sample.source].add(shard)
        numbers[sample.source] += read_numbers(video_bytes(tmp_path / "out", shard, sample))
    assert statistics.mean(map(len, shards.values())) > 2, "three pieces each"
    assert list(numbers.values()) == [list(range(0, NUM_FRAMES, 2))] * NUM_VIDEOS
    for part in ("2/3", "1/3", "3/3"):
        assert not (tmp_path / "parts" / "dataset.json").exists()
        make(videos, tmp_path / "parts", *options, "--part", part)
    assert hashes(tmp_path / "parts") == hashes(tmp_path / "out")
    before = hashes(tmp_path / "parts")
    make(videos, tmp_path / "parts", *options)
    assert hashes(tmp_path / "parts") == before, "a run with nothing to do changed something"


@pytest.mark.parametrize(
    ("fps", "stride"),
    [
        ("10", 3),
        ("10.09", 3),
        ("8", 3),
        ("11", 2),
        ("20", 1),
        ("30.02", 1),
        ("15.1", 2),
        ("15.2", 1),
    ],
)
def test_fps_chooses_the_largest_stride_that_keeps_as_many_frames_per_second(
    videos: Path, tmp_path: Path, fps: str, stride: int, capsys: pytest.CaptureFixture[str]
) -> None:
    make(videos, tmp_path / "out", "--fps", fps)
    # An encoder's own stride may be one that is not stored.
    assert capsys.readouterr().err.endswith(f" --fps {fps}\n"), "the next command"
    for _, sample in all_samples(tmp_path / "out"):
        assert (sample.frame_stride, sample.fps) == (stride, 30 / stride)


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ("", "one frame of every 4 is stored (the default)"),
        ("--clip-seconds 0.1 --frame-stride 2", "one frame of every 2 is stored"),
    ],
)
def test_short_videos_are_named_before_they_are_encoded(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, stored: str
) -> None:
    make(videos, tmp_path / "shards", "--dry-run", *options.split())
    warning = f"9 of 9 videos are too short: {stored}, and a clip needs 16 frames; give --frame"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize("options", ["--frame-stride 1", "--encode copy"])
def test_short_videos_that_no_stride_makes_longer_are_not_named(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    make(videos, tmp_path / "shards", "--dry-run", *options.split())
    assert "WARNING" not in capsys.readouterr().err


def test_a_bug_costs_its_video_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_segments(*arguments: object) -> None:
        raise TypeError("open() got an unexpected keyword argument")

    monkeypatch.setattr("adamae.shard_tools.work.encode_segments", encode_segments)
    path = tmp_path / "one.mp4"
    path.write_bytes(b"bytes")
    stem = tmp_path / "staged"
    assert process_job(Job(str(path), {stem: Item("one.mp4")}, Settings())) is None
    reason = (
        "a bug in make_shards, which you may want to report (TypeError: open() got an unexpected"
        " keyword argument)"
    )
    assert read_staged(stem) == Item("one.mp4", problem=reason)


def test_a_card_says_how_others_load_the_shards(dataset: Path) -> None:
    text = (dataset / "README.md").read_text()
    assert text.startswith('---\nconfigs:\n- config_name: default\n  data_files: "*.tar"\n---\n')
    for part in (
        f"{NUM_VIDEOS} video clips",
        "h264 (9)",
        "0. down: 3\n1. left: 3\n2. right: 3",
        "load_dataset",
    ):
        assert part in text


def test_the_datasets_library_loads_all_splits_from_their_folder(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here, as the import takes seconds.
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    lists = {
        "train": "right/video_000000.mp4,right\nleft/video_000001.mp4,left\n",
        "val": "left/video_000004.mp4,left\n",
    }
    for name, lines in lists.items():
        (tmp_path / f"{name}.csv").write_text(lines)
    splits = [f"--split={name}={tmp_path}/{name}.csv" for name in lists]
    assert make(videos, tmp_path / "out", *splits) == 0
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in loaded.items()} == {"train": 2, "val": 1}
    assert loaded["val"].remove_columns("mp4")[0]["json"]["source"] == "left/video_000004.mp4"
