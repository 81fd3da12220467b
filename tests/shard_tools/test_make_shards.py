import filecmp
import hashlib
import io
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import av
import pytest
import wds2idx
import webdataset
from av.video.frame import PictureType
from shard_making import NUM_FRAMES, NUM_VIDEOS, all_samples, decode, hashes, make, video_bytes

from common.errors import InputError
from pipeline.shards.format import read_dataset_info, read_samples
from shard_tools import make_shards
from shard_tools.build import read_rejects
from shard_tools.synthetic_videos import read_frame_number
from shard_tools.write import PLACE


def test_every_video_is_stored_with_every_fourth_frame(videos: Path, dataset: Path) -> None:
    samples = all_samples(dataset)
    assert sorted(sample.source for _, sample in samples) == sorted(
        path.relative_to(videos).as_posix() for path in videos.rglob("*.mp4")
    )
    classes = read_dataset_info(dataset).classes
    assert classes == ["down", "left", "right"]
    for shard, sample in samples:
        data = video_bytes(dataset, shard, sample)
        assert hashlib.sha256(data).hexdigest() == sample.sha256
        numbers = [read_frame_number(frame) for frame in decode(data)]
        assert numbers == list(range(0, NUM_FRAMES, 4))
        assert sample.num_frames == len(numbers)
        assert (sample.fps, sample.frame_stride, sample.codec, sample.width, sample.height) == (7.5, 4, "h264", 64, 64)
        assert sample.label is not None
        assert classes[sample.label] == sample.source.split("/")[0]
        assert sample.source_sha256 == hashlib.sha256((videos / sample.source).read_bytes()).hexdigest()


def test_groups_are_short_and_closed_without_b_frames(videos: Path, tmp_path: Path) -> None:
    make(videos, tmp_path / "out", "--frame-stride", "1", "--gop", "5")
    for shard, sample in all_samples(tmp_path / "out"):
        with av.open(io.BytesIO(video_bytes(tmp_path / "out", shard, sample))) as container:
            frames = list(container.decode(video=0))
            types = "".join(PictureType(frame.pict_type).name for frame in frames)
            assert types == ("IPPPP" * 4)[:NUM_FRAMES]
            assert [frame.key_frame for frame in frames] == [number % 5 == 0 for number in range(NUM_FRAMES)]
            assert container.streams.video[0].average_rate == 30


def test_dataset_says_what_it_holds(dataset: Path) -> None:
    info = read_dataset_info(dataset)
    assert info.num_samples == NUM_VIDEOS
    assert info.num_frames == NUM_VIDEOS * 5
    assert [shard.num_samples for shard in info.shards] == [3, 3, 3]
    assert info.report["class_histogram"] == {"down": 3, "left": 3, "right": 3}
    assert info.report["hours"] == pytest.approx(NUM_VIDEOS * 5 / 7.5 / 3600, rel=1e-3)
    assert info.encode["quality"] == 23
    for shard in info.shards:
        data = (dataset / shard.name).read_bytes()
        assert len(data) == shard.num_bytes
        assert hashlib.sha256(data).hexdigest() == shard.sha256


def test_other_readers_understand_the_shards(dataset: Path, tmp_path: Path) -> None:
    info = read_dataset_info(dataset)
    for shard in info.shards:
        with wds2idx.IndexCreator(str(dataset / shard.name), str(tmp_path / "index"), verbose=False) as creator:
            creator.create_index()
        assert (tmp_path / "index").read_text() == (dataset / shard.index_name).read_text()
        samples = list(read_samples(dataset, shard))
        read = list(webdataset.WebDataset(str(dataset / shard.name), shardshuffle=False))
        assert [entry["__key__"] for entry in read] == [sample.key for sample in samples]
        for entry, sample in zip(read, samples, strict=True):
            assert hashlib.sha256(entry["mp4"]).hexdigest() == sample.sha256
            described = json.loads(entry["json"])
            assert described == {k: v for k, v in asdict(sample).items() if k not in PLACE}


def test_same_bytes_at_any_number_of_workers_and_in_parts(
    workers: None, videos: Path, dataset: Path, tmp_path: Path
) -> None:
    make(videos, tmp_path / "three", "--samples-per-shard", "3", "--workers", "3")
    assert hashes(tmp_path / "three") == hashes(dataset)
    for part in ("2/2", "1/2"):
        assert not (tmp_path / "parts" / "dataset.json").exists()
        make(videos, tmp_path / "parts", "--samples-per-shard", "3", "--part", part)
    assert hashes(tmp_path / "parts") == hashes(dataset)


def test_copy_keeps_every_byte(videos: Path, tmp_path: Path) -> None:
    make(videos, tmp_path / "out", "--encode", "copy")
    for shard, sample in all_samples(tmp_path / "out"):
        assert video_bytes(tmp_path / "out", shard, sample) == (videos / sample.source).read_bytes()
        assert (sample.num_frames, sample.frame_stride, sample.fps) == (NUM_FRAMES, 1, 30)


def test_killed_at_any_moment_it_ends_with_the_same_bytes(videos: Path, dataset: Path, tmp_path: Path) -> None:
    command = [sys.executable, make_shards.__file__, str(videos), str(tmp_path / "out")]
    command += ["--samples-per-shard", "3", "--workers", "2", "--max-rejects", "1"]
    # Before the first result, in the middle of the first shard, and after it.
    moments = [".work/plan.jsonl", ".work/items/*/*.json", "shard-000000.tar"]
    for moment in moments:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any((tmp_path / "out").glob(moment)):
            time.sleep(0.01)
        assert process.poll() is None, f"the run ended before {moment} was seen"
        process.kill()  # the parent alone: its workers must notice by themselves
        process.wait()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert hashes(tmp_path / "out") == hashes(dataset)


def test_a_torn_staged_result_is_made_again(videos: Path, dataset: Path, tmp_path: Path) -> None:
    class PowerCutError(Exception):
        pass

    def cut(*_: object) -> None:
        raise PowerCutError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shard_tools.build.write_shard", cut)
        with pytest.raises(PowerCutError):
            make(videos, tmp_path / "out", "--samples-per-shard", "3")
    staged = sorted((tmp_path / "out" / ".work" / "items").glob("*/*.mp4"))
    assert len(staged) >= 3
    assert max(Counter(path.parent for path in staged).values()) <= 3, "a folder a shard"
    staged[0].write_bytes(staged[0].read_bytes()[:-7])
    staged[1].unlink()
    make(videos, tmp_path / "out", "--samples-per-shard", "3")
    assert hashes(tmp_path / "out") == hashes(dataset)


def test_new_videos_come_into_new_shards(videos: Path, tmp_path: Path) -> None:
    grown = tmp_path / "videos"
    shutil.copytree(videos, grown)
    late = sorted(grown.rglob("*.mp4"))[::4]
    for path in late:
        path.rename(tmp_path / path.name)
    make(grown, tmp_path / "out", "--samples-per-shard", "3")
    before = hashes(tmp_path / "out")
    for path in late:
        (tmp_path / path.name).rename(path)
    make(grown, tmp_path / "out", "--samples-per-shard", "3")
    after = hashes(tmp_path / "out")
    assert {name: after[name] for name in before if name.startswith("shard-")} == {
        name: data for name, data in before.items() if name.startswith("shard-")
    }
    samples = all_samples(tmp_path / "out")
    assert {s.source for name, s in samples if name not in before} == {p.relative_to(grown).as_posix() for p in late}
    assert len(samples) == NUM_VIDEOS
    make(grown, tmp_path / "out", "--samples-per-shard", "3")
    assert hashes(tmp_path / "out") == after, "a run with nothing to do changed something"


def test_a_second_run_with_other_labels_is_refused(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("right/video_000000.mp4,right\nleft/video_000001.mp4,left\n")
    arguments = (tmp_path / "train.csv", tmp_path / "out", "--root", str(videos), "--encode", "copy")
    make(*arguments)
    before = hashes(tmp_path / "out")
    (tmp_path / "train.csv").write_text("right/video_000000.mp4,left\nleft/video_000001.mp4,left\n")
    changed = r"1 videos that have another label now \(the first: right/video_000000\.mp4, 'right' there and 'left' in"
    with pytest.raises(InputError, match=changed):
        make(*arguments)
    with pytest.raises(InputError, match="have another label now"):
        make(*arguments, "--unlabelled")
    assert hashes(tmp_path / "out") == before


def test_a_video_that_has_changed_since_is_named(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    first, second = sorted(videos.rglob("*.mp4"))[:2]
    shutil.copy(first, tmp_path / "in" / "a.mp4")
    make(tmp_path / "in", tmp_path / "out", "--encode", "copy")
    make(tmp_path / "in", tmp_path / "out", "--encode", "copy")
    shutil.copy(second, tmp_path / "in" / "a.mp4")
    sizes = f"{first.stat().st_size} bytes then and {second.stat().st_size} now"
    with pytest.raises(InputError, match=f"1 videos that have changed since .*a.mp4, {sizes}"):
        make(tmp_path / "in", tmp_path / "out", "--encode", "copy")


def test_a_shard_that_is_gone_is_named(videos: Path, dataset: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dataset, tmp_path / "copy"))
    gone = sorted(copy.glob("*.tar"))[0]
    gone.write_bytes(gone.read_bytes()[:-512])
    with pytest.raises(InputError, match=f"{gone.name} is missing or incomplete"):
        make(videos, copy, "--samples-per-shard", "3")
    gone.unlink()
    with pytest.raises(InputError, match=f"{gone.name} is missing or incomplete"):
        make(videos, copy, "--samples-per-shard", "3")


def test_a_label_map_is_for_numbers_too(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("right/video_000000.mp4,2\nleft/video_000001.mp4,0\nleft/video_000004.mp4,7\n")
    (tmp_path / "map.txt").write_text("left\nup\nright\n")
    options = ("--root", str(videos), "--encode", "copy", "--label-map", str(tmp_path / "map.txt"))
    make(tmp_path / "train.csv", tmp_path / "out", *options)
    labels = {sample.source: sample.label for _, sample in all_samples(tmp_path / "out")}
    assert labels == {"right/video_000000.mp4": 2, "left/video_000001.mp4": 0}
    assert read_dataset_info(tmp_path / "out").classes == ["left", "up", "right"]
    assert "'7' is not in the label map" in (tmp_path / "out" / "rejected.jsonl").read_text()


def test_other_settings_are_refused_before_anything_is_touched(videos: Path, dataset: Path) -> None:
    before = hashes(dataset)
    with pytest.raises(InputError, match="short_side is 256 there and 128 now"):
        make(videos, dataset, "--samples-per-shard", "3", "--short-side", "128")
    assert hashes(dataset) == before


def test_a_reject_moves_no_other_video(videos: Path, dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(videos, tmp_path / "videos")
    broken = all_samples(dataset)[4][1].source
    whole = (videos / broken).read_bytes()
    (tmp_path / "videos" / broken).write_bytes(whole[: len(whole) // 2])
    make(tmp_path / "videos", tmp_path / "out", "--samples-per-shard", "3")
    expected = [(name, sample.key) for name, sample in all_samples(dataset) if sample.source != broken]
    assert [(name, sample.key) for name, sample in all_samples(tmp_path / "out")] == expected
    assert filecmp.cmp(dataset / "shard-000000.tar", tmp_path / "out" / "shard-000000.tar", shallow=False)
    assert list(read_rejects(tmp_path / "out")) == [broken]
    # Mended and asked for, it is taken in; without being asked for, it stays out.
    (tmp_path / "videos" / broken).write_bytes(whole)
    make(tmp_path / "videos", tmp_path / "out", "--samples-per-shard", "3")
    assert list(read_rejects(tmp_path / "out")) == [broken]
    make(tmp_path / "videos", tmp_path / "out", "--samples-per-shard", "3", "--retry-rejects")
    assert read_rejects(tmp_path / "out") == {}
    assert all_samples(tmp_path / "out")[-1][1].source == broken


def test_too_many_rejects_are_an_error_after_the_work(videos: Path, tmp_path: Path) -> None:
    shutil.copytree(videos, tmp_path / "videos")
    (tmp_path / "videos" / "left" / "empty.mp4").touch()
    arguments = [str(tmp_path / "videos"), str(tmp_path / "out"), "--workers", "1", "--max-rejects"]
    assert make_shards.main([*arguments, "0.05"]) == 3
    assert read_dataset_info(tmp_path / "out").num_samples == NUM_VIDEOS
    assert make_shards.main([*arguments, "0.2"]) == 0


def test_splits_share_their_classes(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("right/video_000000.mp4,right\nleft/video_000001.mp4,left\n")
    (tmp_path / "val.csv").write_text("down/video_000002.mp4,down\nright/video_000003.mp4,right\n")
    splits = [f"--split={name}={tmp_path}/{name}.csv" for name in ("train", "val")]
    assert make(videos, tmp_path / "out", *splits) == 0
    for name, labels in (("train", {"right", "left"}), ("val", {"right", "down"})):
        assert read_dataset_info(tmp_path / "out" / name).classes == ["down", "left", "right"]
        samples = [sample for _, sample in all_samples(tmp_path / "out" / name)]
        assert {sample.source.split("/")[0] for sample in samples} == labels
        assert all(["down", "left", "right"][sample.label or 0] == sample.source.split("/")[0] for sample in samples)


def test_classes_keep_their_ids_when_splits_grow(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("right/video_000000.mp4,right\n")
    (tmp_path / "val.csv").write_text("left/video_000001.mp4,left\n")
    splits = [f"--split={name}={tmp_path}/{name}.csv" for name in ("train", "val")]
    make(videos, tmp_path / "out", *splits)
    (tmp_path / "val.csv").write_text("left/video_000001.mp4,left\ndown/video_000002.mp4,down\n")
    make(videos, tmp_path / "out", *splits)
    assert read_dataset_info(tmp_path / "out" / "train").classes == ["left", "right"]
    assert read_dataset_info(tmp_path / "out" / "val").classes == ["left", "right", "down"]
    (tmp_path / "map.txt").write_text("down\nleft\nright\n")
    (tmp_path / "val.csv").write_text("left/video_000004.mp4,left\n")
    with pytest.raises(InputError, match="their ids would change"):
        make(videos, tmp_path / "out", *splits, "--label-map", str(tmp_path / "map.txt"))


def test_long_videos_are_split_without_losing_a_frame(videos: Path, tmp_path: Path) -> None:
    make(videos, tmp_path / "out", "--frame-stride", "2", "--max-seconds", "0.28")
    by_source: dict[str, list[int]] = {}
    for shard, sample in sorted(all_samples(tmp_path / "out"), key=lambda place: place[1].key):
        numbers = [read_frame_number(frame) for frame in decode(video_bytes(tmp_path / "out", shard, sample))]
        assert len(numbers) == sample.num_frames <= 4
        by_source.setdefault(sample.source, []).extend(numbers)
    assert len(by_source) == NUM_VIDEOS
    assert all(numbers == list(range(0, NUM_FRAMES, 2)) for numbers in by_source.values())


def test_pieces_are_spread_over_all_shards(videos: Path, tmp_path: Path) -> None:
    options = ["--frame-stride", "2", "--max-seconds", "0.28", "--samples-per-shard", "5"]
    make(videos, tmp_path / "out", *options)
    assert {shard.num_samples for shard in read_dataset_info(tmp_path / "out").shards} == {4, 5}
    shards_of: dict[str, set[str]] = {}
    for shard, sample in all_samples(tmp_path / "out"):
        shards_of.setdefault(sample.source, set()).add(shard)
    assert statistics.mean(len(shards) for shards in shards_of.values()) > 2, "three pieces each"
    make(videos, tmp_path / "three", *options, "--workers", "3")
    assert hashes(tmp_path / "three") == hashes(tmp_path / "out")
    for part in ("2/3", "1/3", "3/3"):
        assert not (tmp_path / "parts" / "dataset.json").exists()
        make(videos, tmp_path / "parts", *options, "--part", part)
    assert hashes(tmp_path / "parts") == hashes(tmp_path / "out")


def test_one_long_video_fills_as_many_shards_as_asked_for(videos: Path, tmp_path: Path) -> None:
    one = next(videos.rglob("*.mp4"))
    make(one, tmp_path / "out", "--frame-stride", "1", "--max-seconds", "0.1", "--min-shards", "6")
    assert [shard.num_samples for shard in read_dataset_info(tmp_path / "out").shards] == [1] * 6


def test_fps_chooses_the_stride_per_video(videos: Path, tmp_path: Path) -> None:
    make(videos, tmp_path / "out", "--fps", "10")
    assert {(sample.frame_stride, sample.fps) for _, sample in all_samples(tmp_path / "out")} == {(3, 10.0)}


def test_estimate_writes_nothing(videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(videos, tmp_path / "out", "--estimate") == 0
    said = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    found = re.search(
        r"tried 9 of 9 videos, 0 unusable: expect about ([\d.]+) kB, (\d+) frames and [\d.]+ (s|min)", said
    )
    assert found, said
    make(videos, tmp_path / "out")
    info = read_dataset_info(tmp_path / "out")
    assert float(found[1]) * 1000 == pytest.approx(info.num_bytes, rel=0.1)
    assert int(found[2]) == pytest.approx(info.num_frames, rel=0.1)
