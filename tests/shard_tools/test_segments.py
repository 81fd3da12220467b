"""Segments are samples with exactly their frames; far ones are found by seeking, damage costs those that need it."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image
from shard_making import (
    all_samples,
    collect,
    decode,
    flip,
    hashes,
    make,
    numbers_of,
    read_numbers,
    run_here,
    write_noise,
    write_video,
)
from test_picture import numbered

from adamae.common.errors import InputError
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos import source_video
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools import work
from adamae.shard_tools.build import Build, read_rejects
from adamae.shard_tools.encoding import encode
from adamae.shard_tools.encoding.encode import Result, StoredVideo, encode_segments
from adamae.shard_tools.inputs import Item, ItemStore
from adamae.shard_tools.settings import Settings

NUM_FRAMES = 90  # at 30 fps


@pytest.fixture(scope="module")
def video(generate) -> Path:
    return generate("--num-frames", str(NUM_FRAMES))


def cut(
    path: Path, segments: Iterable[Segment | None], labels: Iterable[str] = repeat("run")
) -> ItemStore:
    size = path.stat().st_size
    pairs = zip(segments, labels, strict=False)
    return collect(
        Item("a.mp4", str(path), (name,), size, segment=str(segment or ""))
        for segment, name in pairs
    )


def build(inputs: ItemStore, folder: Path, jobs: Any = run_here, **settings: Any) -> None:
    maker = Build(folder, Settings(**({"frame_stride": 1} | settings)))
    with maker.lock():
        while plan := maker.plan(inputs, []):
            list(maker.run(plan, inputs, lambda wanted: jobs(work.process_job, wanted)))
            maker.finish(plan)


FRAMES = {  # of 30 a second: those shown from the start on and before the end
    Segment(0, 1): range(30),
    Segment(0.5, 1): range(15, 30),
    Segment(0.51, 1.49): range(16, 45),
    Segment(2.0, 3.2): range(60, 90),  # annotations round: it ends a little after the video
    Segment(0.333, 0.667): range(10, 20),  # thirds, rounded to milliseconds
    Segment(2.5, math.inf): range(75, 90),
    Segment(10, 50, in_frames=True): range(10, 50),
    Segment(89, 90, in_frames=True): range(89, 90),
}
REJECTED = {
    Segment(-1, 1): "its segment starts at -1, which no video has",
    Segment(2, 2): "its segment ends at 2, not after its start at 2",
    Segment(2, 1): "its segment ends at 1, not after its start at 2",
    Segment(math.nan, 1): "its segment starts at nan, which no video has",
    Segment(3, 4): "its segment starts at 3, and the video has 3 seconds",
    Segment(1, 4): "its segment ends at 4, and the video has 3 seconds",
    Segment(90, 91, True): "its segment starts at 90, and the video has 90 frames",
    Segment(1, 200, True): "its segment ends at 200, and the video has 90 frames",
    Segment(0.5, 8, True): "its segment's frames 0.5 to 8 are not whole numbers",
    Segment(0.01, 0.02): "its segment from 0.01 to 0.02 is shorter than a frame",
}


def test_segments_hold_exactly_their_frames_or_are_rejected_each_by_itself(
    video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Counter[str]()
    read_frames = source_video.read_frames
    for module in (source_video, encode):
        monkeypatch.setattr(
            module, "read_frames", lambda *args: opened.update(["video"]) or read_frames(*args)
        )
    build(cut(video, [*FRAMES, *REJECTED]), tmp_path)
    assert numbers_of(tmp_path, "segment") == {
        str(segment): list(frames) for segment, frames in FRAMES.items()
    }
    assert read_rejects(tmp_path) == {
        f"a.mp4#{segment}": reason for segment, reason in REJECTED.items()
    }
    assert opened["video"] == 1 + len(FRAMES), "it is decoded once for all, and what is stored"
    for _, sample in all_samples(tmp_path):
        assert sample.source == "a.mp4"
        assert sample.start == pytest.approx(FRAMES[Segment.parse(sample.segment)][0] / 30)
    dataset = ShardDataset.open(tmp_path)
    assert {sample.segment for sample in dataset.samples} == {str(segment) for segment in FRAMES}
    with pytest.raises(InputError, match="--encode copy keeps whole videos"):
        build(cut(video, [Segment(0, 1)]), tmp_path / "copy", encode="copy")
    assert not list((tmp_path / "copy").rglob("*.tar"))
    build(
        cut(video, [Segment(3, 20, True), Segment(4, 19, True)]),
        tmp_path / "stride",
        frame_stride=4,
    )
    found = numbers_of(tmp_path / "stride", "segment")
    assert found == {"frames=3,20": [3, 7, 11, 15, 19], "frames=4,19": [4, 8, 12, 16]}, (
        "counted from its start"
    )


def test_equal_and_overlapping_segments_are_kept(
    video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adamae.shard_tools.encoding.encode.MAX_OPEN", 2)
    segments = [Segment(0, 1), Segment(0, 1), Segment(0, 2), Segment(0, 1), None, Segment(0.1, 2.9)]
    build(cut(video, segments, ["walk", "run", "run", "run", "run", "run"]), tmp_path)
    found = {sample.segment: sample.labels for _, sample in all_samples(tmp_path)}
    assert found == {
        "": (0,),
        "t=0,1": (0,),
        "t=0,1;2": (0,),
        "t=0,1;3": (1,),
        "t=0,2": (0,),
        "t=0.1,2.9": (0,),
    }
    assert {name: len(frames) for name, frames in numbers_of(tmp_path, "segment").items()} == {
        "": 90,
        "t=0,1": 30,
        "t=0,1;2": 30,
        "t=0,1;3": 30,
        "t=0,2": 60,
        "t=0.1,2.9": 84,
    }
    assert len({sample.key for _, sample in all_samples(tmp_path)}) == 6


def test_interruptions_and_additions_change_nothing(
    video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = cut(video, [Segment(start / 10, start / 10 + 0.5) for start in range(20)])
    build(inputs, tmp_path / "whole", samples_per_shard=3)

    def stop_early(function: Any, jobs: Any) -> Any:
        for job in jobs:
            half = replace(job, items=dict(islice(job.items.items(), 7)))
            yield half, function(half)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(inputs, tmp_path / "stopped", jobs=stop_early, samples_per_shard=3)
    made = Counter[Path]()
    stage = work.stage

    def stage_and_count(item: Item, stem: Path) -> None:
        made.update([stem])
        stage(item, stem)

    monkeypatch.setattr(work, "stage", stage_and_count)
    build(inputs, tmp_path / "stopped", samples_per_shard=3)
    assert made.total() == 13, "finished segments are kept"
    assert hashes(tmp_path / "stopped") == hashes(tmp_path / "whole")
    before = {
        name: data for name, data in hashes(tmp_path / "whole").items() if name.startswith("shard-")
    }
    inputs.add([Item("a.mp4", str(video), ("run",), video.stat().st_size, segment="t=1,1.2")])
    build(inputs, tmp_path / "whole", samples_per_shard=3)
    assert before.items() <= hashes(tmp_path / "whole").items()
    assert len(all_samples(tmp_path / "whole")) == 21


def test_folders_of_frames_are_videos(video: Path, tmp_path: Path) -> None:
    patterns = {"run/1": "{:05d}.jpg", "run/2": "img_{:05d}.jpg", "walk/100%d": "frame_{:010d}.jpg"}
    patterns |= {"walk/4": "50%-{}.png"} | dict.fromkeys(
        ("run/hole", "run/mixed", "run/named"), "{:05d}.jpg"
    )
    for name, pattern in patterns.items():
        (tmp_path / "in" / name).mkdir(parents=True)
        for number, frame in enumerate(decode(video)[:12], 1):
            Image.fromarray(frame).save(tmp_path / "in" / name / pattern.format(number), quality=95)
    folder = tmp_path / "in/run"
    (folder / "hole/00005.jpg").unlink()
    Image.new("RGB", (80, 64)).save(folder / "mixed/00007.jpg")
    (folder / "named/00001.jpg").rename(folder / "named/x1.jpg")
    with pytest.raises(
        InputError, match="is a folder of frames, which does not say their rate: give --fps"
    ):
        make(tmp_path / "in", tmp_path / "out")
    assert make(tmp_path / "in", tmp_path / "out", "--fps", "12", "--label-column", "folder") == 0
    samples = [sample for _, sample in all_samples(tmp_path / "out")]
    found = {sample.source: (sample.labels, sample.fps, sample.num_frames) for sample in samples}
    run, walk = ((0,), 12, 12), ((1,), 12, 12)
    assert found == {"run/1": run, "run/2": run, "walk/100%d": walk, "walk/4": walk}
    assert all(numbers == [*range(12)] for numbers in numbers_of(tmp_path / "out").values())
    assert read_rejects(tmp_path / "out") == {
        "run/hole": "its frames have a hole or repeat a number: 00006.jpg comes in place of 5",
        "run/mixed": "its picture changes shape in the middle",
        "run/named": "its frames are named in several ways: ….jpg and x….jpg",
    }


def test_a_video_that_takes_too_long_keeps_what_is_done(video: Path, tmp_path: Path) -> None:
    def stop_late(function: Any, jobs: Any) -> Any:
        for job in jobs:
            function(replace(job, items=dict(islice(job.items.items(), 2))))
            yield job, "it made no progress for 9 seconds: raise --timeout"

    whole = cut(video, [None])
    build(whole, tmp_path, jobs=stop_late, clip_seconds=1)
    pieces = {"t=0,1": range(30), "t=1,2": range(30, 60), "t=2,inf": range(60, 90)}
    found = numbers_of(tmp_path, "segment")
    assert found == {segment: list(pieces[segment]) for segment in found}
    (late,) = pieces.keys() - found
    assert read_rejects(tmp_path) == {
        f"a.mp4#{late}": "it made no progress for 9 seconds: raise --timeout"
    }


def test_segments_of_a_variable_frame_rate_go_by_time_or_number(tmp_path: Path) -> None:
    times_ms = [0, 40, 80, 120, 1000, 1040, 1080, 1120, 2000, 2040]
    path = write_video(tmp_path / "a.mkv", map(numbered, range(10)), times_ms=times_ms)
    segments = [Segment(1.0, 1.12), Segment(4, 8, in_frames=True), Segment(0.5, 1.04)]
    build(cut(path, segments), tmp_path / "out")
    found = numbers_of(tmp_path / "out", "segment")
    assert found["t=1,1.12"] == [4, 5, 6]
    assert list(dict.fromkeys(found["frames=4,8"])) == [4, 5, 6, 7]
    assert found["t=0.5,1.04"][0] == 3, "the still picture is shown until the next one"
    assert found["t=0.5,1.04"][-1] == 4


NUM_NOISE, GROUP = 150, 30


def store(path: Path, *segments: Segment) -> dict[str, Result]:
    """What becomes of segments, or of the whole."""
    stems = {
        path.with_name(f"part{number}"): segment
        for number, segment in enumerate(segments or [None])
    }
    results = encode_segments(path, stems, Settings(frame_stride=1, quality=4, short_side=64))
    return {str(stems[stem] or ""): result for stem, result in results}


def numbers(result: Result) -> list[int]:
    """The frame numbers in a file."""
    assert isinstance(result, StoredVideo)
    return read_numbers(result.path)


def damage_packet(path: Path) -> None:
    """Damage the largest of packets 72 to 77."""
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    place = max(places[72:78], key=itemgetter(1))
    data, start = bytearray(path.read_bytes()), place[0] or 0
    if data[:1] == b"G":  # a transport stream: a packet of it is lost
        del data[start // 188 * 188 + 376 :][:188]
    path.write_bytes(flip(data, range(start + min(40, place[1] // 2), start + place[1], 3)))


@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts", "avi", "flv"])
def test_far_segments_are_sought_and_kept_beside_a_bad_packet(
    container: str, b_frames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_noise(
        tmp_path / "video", container, NUM_NOISE, {"g": str(GROUP), "bf": str(b_frames)}
    )
    decoded = Counter[str]()
    read_frames = source_video.read_frames

    def count(container: Any, *arguments: Any) -> Iterator[Any]:
        for frame in read_frames(container, *arguments):
            decoded[container.name] += 1
            yield frame

    for module in (source_video, encode):
        monkeypatch.setattr(module, "read_frames", count)
    wanted = [range(133, 138), range(2, 7), range(65, 70), range(67, 72)]
    found = store(path, *(Segment(frames.start, frames.stop, in_frames=True) for frames in wanted))
    assert [numbers(found[f"frames={frames.start},{frames.stop}"]) for frames in wanted] == [
        [*it] for it in wanted
    ]
    has_times = not (
        container == "avi" and b_frames
    )  # of display: what has none is decoded from the start
    assert decoded[str(path)] <= (90 if has_times else 150)

    damage_packet(path)
    assert isinstance(store(path)[""], VideoError)
    found = store(path, Segment(0, 1.3), Segment(2.3, 3.3), Segment(2.7, 2.9), Segment(3.1, 3.2))
    assert numbers(found["t=0,1.3"]) == [*range(39)]
    assert "damaged" in str(found["t=2.3,3.3"])
    assert "damaged" in str(found["t=2.7,2.9"]), "it needs what is damaged before it"
    if has_times:  # which lead behind the damage
        assert numbers(found["t=3.1,3.2"]) == [93, 94, 95]
