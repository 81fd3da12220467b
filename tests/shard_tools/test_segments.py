"""Segments are samples with exactly their frames.

Far ones are found by seeking, and damage costs those that need damaged frames.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import islice, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any

import av
import numpy as np
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

# Of the video: 3 s at 30 frames per second.
NUM_FRAMES = 90


@pytest.fixture(scope="module")
def video(generate: Callable[..., Path]) -> Path:
    return generate("--num-frames", str(NUM_FRAMES))


def cut(
    path: Path, segments: Iterable[Segment | None], labels: Iterable[str] = repeat("run")
) -> ItemStore:
    """Return inputs that ask for segments of a video; None is all of it."""
    size = path.stat().st_size
    items = []
    for segment, label in zip(segments, labels, strict=False):
        text = "" if segment is None else str(segment)
        items.append(Item("a.mp4", str(path), (label,), size, segment=text))
    return collect(items)


def build(inputs: ItemStore, folder: Path, run_jobs: Any = run_here, **settings: Any) -> None:
    """Make a dataset; by default of every frame, with jobs run in this process."""
    maker = Build(folder, Settings(**({"frame_stride": 1} | settings)))
    with maker.lock():
        while plan := maker.plan(inputs, []):
            list(maker.run(plan, inputs, partial(run_jobs, work.process_job)))
            maker.finish(plan)


# Of 30 frames per second, those shown from the start on and before the end.
FRAMES = {
    Segment(0, 1): range(30),
    Segment(0.5, 1): range(15, 30),
    Segment(0.51, 1.49): range(16, 45),
    # Annotations round: it ends a little after the video.
    Segment(2.0, 3.2): range(60, 90),
    # Thirds, rounded to milliseconds.
    Segment(0.333, 0.667): range(10, 20),
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


def as_lists(frames: Mapping[Segment, range]) -> dict[str, list[int]]:
    return {str(segment): list(numbers) for segment, numbers in frames.items()}


def test_segments_hold_exactly_their_frames_or_are_rejected_each_by_itself(
    video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_decodes = 0
    read_frames = source_video.read_frames

    def count(*arguments: Any) -> Iterator[Any]:
        nonlocal num_decodes
        num_decodes += 1
        return read_frames(*arguments)

    for module in (source_video, encode):
        monkeypatch.setattr(module, "read_frames", count)
    build(cut(video, [*FRAMES, *REJECTED]), tmp_path)
    assert num_decodes == 1 + len(FRAMES), "it is decoded once for all, and what is stored"
    assert numbers_of(tmp_path, "segment") == as_lists(FRAMES)
    expected = {f"a.mp4#{segment}": reason for segment, reason in REJECTED.items()}
    assert read_rejects(tmp_path) == expected
    for _, sample in all_samples(tmp_path):
        assert sample.source == "a.mp4"
        first, *_ = FRAMES[Segment.parse(sample.segment)]
        assert sample.start == pytest.approx(first / 30)
    dataset = ShardDataset.open(tmp_path)
    assert {sample.segment for sample in dataset.samples} == {str(segment) for segment in FRAMES}


def test_segments_are_not_copied(video: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--encode copy keeps whole videos"):
        build(cut(video, [Segment(0, 1)]), tmp_path, encode="copy")
    assert not list(tmp_path.rglob("*.tar"))


def test_the_stride_of_a_segment_counts_from_its_start(video: Path, tmp_path: Path) -> None:
    segments = [Segment(3, 20, in_frames=True), Segment(4, 19, in_frames=True)]
    build(cut(video, segments), tmp_path, frame_stride=4)
    assert numbers_of(tmp_path, "segment") == {
        "frames=3,20": [3, 7, 11, 15, 19],
        "frames=4,19": [4, 8, 12, 16],
    }


def test_equal_and_overlapping_segments_are_kept(
    video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adamae.shard_tools.encoding.encode.MAX_OPEN", 2)
    segments = [Segment(0, 1), Segment(0, 1), Segment(0, 2), Segment(0, 1), None, Segment(0.1, 2.9)]
    build(cut(video, segments, ["walk", "run", "run", "run", "run", "run"]), tmp_path)
    samples = [sample for _, sample in all_samples(tmp_path)]
    assert len({sample.key for sample in samples}) == 6
    # The ids of "run" and "walk" are 0 and 1.
    assert {sample.segment: sample.labels for sample in samples} == {
        "": (0,),
        "t=0,1": (0,),
        "t=0,1;2": (0,),
        "t=0,1;3": (1,),
        "t=0,2": (0,),
        "t=0.1,2.9": (0,),
    }
    lengths = {name: len(frames) for name, frames in numbers_of(tmp_path, "segment").items()}
    assert lengths == {
        "": 90,
        "t=0,1": 30,
        "t=0,1;2": 30,
        "t=0,1;3": 30,
        "t=0,2": 60,
        "t=0.1,2.9": 84,
    }


def take(job: work.Job, count: int) -> work.Job:
    """Return a job for the first items of another."""
    return replace(job, items=dict(islice(job.items.items(), count)))


def test_interruptions_and_additions_change_nothing(
    video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = cut(video, [Segment(start / 10, start / 10 + 0.5) for start in range(20)])
    build(inputs, tmp_path / "whole", samples_per_shard=3)

    def stop_early(function: Any, jobs: Any) -> Any:
        for job in jobs:
            begun = take(job, 7)
            yield begun, function(begun)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(inputs, tmp_path / "stopped", run_jobs=stop_early, samples_per_shard=3)
    num_staged = 0
    stage = work.stage

    def stage_and_count(item: Item, stem: Path) -> None:
        nonlocal num_staged
        num_staged += 1
        stage(item, stem)

    monkeypatch.setattr(work, "stage", stage_and_count)
    build(inputs, tmp_path / "stopped", samples_per_shard=3)
    assert num_staged == 13, "finished segments are kept"
    whole = hashes(tmp_path / "whole")
    assert hashes(tmp_path / "stopped") == whole
    before = {name: data for name, data in whole.items() if name.startswith("shard-")}
    inputs.add([Item("a.mp4", str(video), ("run",), video.stat().st_size, segment="t=1,1.2")])
    build(inputs, tmp_path / "whole", samples_per_shard=3)
    assert before.items() <= hashes(tmp_path / "whole").items()
    assert len(all_samples(tmp_path / "whole")) == 21


# Folders of frames, with the patterns of their names.
FRAME_FOLDERS = {
    "run/1": "{:05d}.jpg",
    "run/2": "img_{:05d}.jpg",
    "walk/100%d": "frame_{:010d}.jpg",
    "walk/4": "50%-{}.png",
    "run/hole": "{:05d}.jpg",
    "run/mixed": "{:05d}.jpg",
    "run/named": "{:05d}.jpg",
    "run/first_empty": "{:05d}.jpg",
    "run/one_empty": "{:05d}.jpg",
    "run/last_empty": "{:05d}.jpg",
    "run/cut_off": "{:05d}.jpg",
}


def test_folders_of_frames_are_videos(video: Path, tmp_path: Path) -> None:
    frames = decode(video)[:12]
    for name, pattern in FRAME_FOLDERS.items():
        folder = tmp_path / "in" / name
        folder.mkdir(parents=True)
        for number, frame in enumerate(frames, 1):
            Image.fromarray(frame).save(folder / pattern.format(number), quality=95)
    run_folder = tmp_path / "in/run"
    (run_folder / "hole/00005.jpg").unlink()
    Image.new("RGB", (80, 64)).save(run_folder / "mixed/00007.jpg")
    (run_folder / "named/00001.jpg").rename(run_folder / "named/x1.jpg")
    for name in ("first_empty/00001.jpg", "one_empty/00007.jpg", "last_empty/00012.jpg"):
        (run_folder / name).write_bytes(b"")
    cut_off = run_folder / "cut_off/00009.jpg"
    cut_off.write_bytes(cut_off.read_bytes()[:400])
    message = "is a folder of frames, which does not say their rate: give --fps"
    with pytest.raises(InputError, match=message):
        make(tmp_path / "in", tmp_path / "out")
    assert make(tmp_path / "in", tmp_path / "out", "--fps", "12", "--label", "folder:1") == 0
    labels = {}
    for _, sample in all_samples(tmp_path / "out"):
        assert (sample.fps, sample.num_frames) == (12, 12)
        labels[sample.source] = sample.labels
    assert labels == {"run/1": (0,), "run/2": (0,), "walk/100%d": (1,), "walk/4": (1,)}
    for numbers in numbers_of(tmp_path / "out").values():
        assert numbers == list(range(12))
    assert read_rejects(tmp_path / "out") == {
        "run/hole": "its frames have a hole or repeat a number: 00006.jpg comes in place of 5",
        "run/mixed": "its picture changes shape in the middle",
        "run/named": "its frames are named in several ways: ….jpg and x….jpg",
        "run/first_empty": "its frame 00001.jpg is empty or cannot be read",
        "run/one_empty": "its frame 00007.jpg is empty or cannot be read",
        "run/last_empty": "its frame 00012.jpg is empty or cannot be read",
        "run/cut_off": "its frame 00009.jpg cannot be decoded",
    }


def add_sound(video: Path, path: Path, delay: Fraction) -> None:
    """Write the packets of a video, later by `delay` seconds, and silence that starts at once."""
    with av.open(str(video)) as source, av.open(str(path), "w") as output:
        picture = output.add_stream_from_template(source.streams.video[0])
        sound = output.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), "s16", "mono")
        frame.rate = 8000
        output.mux(sound.encode(frame))
        for packet in source.demux(video=0):
            if packet.size:
                ticks = int(delay / packet.time_base)
                packet.pts += ticks
                packet.dts += ticks
                packet.stream = picture
                output.mux(packet)


@pytest.mark.parametrize(("delay", "is_said"), [("1/2", True), ("1/50", False)])
@pytest.mark.parametrize("times", ["start,end\n{},1,2\n", "start_frame,end_frame\n{},3,20\n"])
def test_a_picture_that_starts_after_the_sound_is_said(
    video: Path,
    tmp_path: Path,
    delay: str,
    is_said: bool,
    times: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_sound(video, tmp_path / "late.mkv", Fraction(delay))
    (tmp_path / "list.csv").write_text("path," + times.format("late.mkv"))
    start, end = times.partition("\n")[0].split(",")
    unit = ":frames" if "frame" in start else ""
    columns = f"path=path,start={start}{unit},end={end}{unit}"
    make(tmp_path / "list.csv", tmp_path / "out", "--dry-run", "--columns", columns)
    warning = "in 1 of 1 videos the picture starts later than the sound (by 0.5 s in late.mkv): seg"
    # Frames are counted from the first one by everybody.
    is_in_seconds = times.startswith("start,")
    assert (warning in capsys.readouterr().err) == (is_said and is_in_seconds)


def test_a_video_that_takes_too_long_keeps_what_is_done(video: Path, tmp_path: Path) -> None:
    reason = "it made no progress for 9 seconds: raise --timeout"

    def stop_late(function: Any, jobs: Any) -> Any:
        for job in jobs:
            function(take(job, 2))
            yield job, reason

    build(cut(video, [None]), tmp_path, run_jobs=stop_late, clip_seconds=1)
    pieces = {
        "t=0,1": list(range(30)),
        "t=1,2": list(range(30, 60)),
        "t=2,inf": list(range(60, 90)),
    }
    stored = numbers_of(tmp_path, "segment")
    (late,) = pieces.keys() - stored
    del pieces[late]
    assert stored == pieces
    assert read_rejects(tmp_path) == {f"a.mp4#{late}": reason}


def test_segments_of_a_variable_frame_rate_go_by_time_or_number(tmp_path: Path) -> None:
    times_ms = [0, 40, 80, 120, 1000, 1040, 1080, 1120, 2000, 2040]
    path = write_video(tmp_path / "a.mkv", map(numbered, range(10)), times_ms=times_ms)
    segments = [Segment(1.0, 1.12), Segment(4, 8, in_frames=True), Segment(0.5, 1.04)]
    build(cut(path, segments), tmp_path / "out")
    stored = numbers_of(tmp_path / "out", "segment")
    assert stored["t=1,1.12"] == [4, 5, 6]
    # Each of the frames is repeated for as long as it was shown.
    assert list(dict.fromkeys(stored["frames=4,8"])) == [4, 5, 6, 7]
    assert stored["t=0.5,1.04"][0] == 3, "the still picture is shown until the next one"
    assert stored["t=0.5,1.04"][-1] == 4


NUM_NOISE = 150
GROUP = 30


def store(path: Path, *segments: Segment) -> dict[str, Result]:
    """Store segments of a video, or all of it; return the results by segment."""
    stems = {}
    for number, segment in enumerate(segments or [None]):
        stems[path.with_name(f"part{number}")] = segment
    results = {}
    settings = Settings(frame_stride=1, quality=4, short_side=64)
    for stem, result in encode_segments(path, stems, settings):
        results[str(stems[stem] or "")] = result
    return results


def numbers(result: Result) -> list[int]:
    """Return the frame numbers in a stored file."""
    assert isinstance(result, StoredVideo)
    return read_numbers(result.path)


def damage_packet(path: Path) -> None:
    """Damage the largest of packets 72 to 77."""
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        largest = max(packets[72:78], key=attrgetter("size"))
        start = largest.pos or 0
        size = largest.size
    data = bytearray(path.read_bytes())
    if data[:1] == b"G":
        # A transport stream loses one of its own packets, of 188 bytes, in the middle of a frame.
        lost = start // 188 * 188 + 376
        del data[lost : lost + 188]
    # The first bytes stay, so that damage hits the picture and not its headers.
    first = start + min(40, size // 2)
    path.write_bytes(flip(data, range(first, start + size, 3)))


@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts", "avi", "flv"])
def test_far_segments_are_sought_and_kept_beside_a_bad_packet(
    container: str, b_frames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"g": str(GROUP), "bf": str(b_frames)}
    path = write_noise(tmp_path / "video", container, NUM_NOISE, options)
    num_decoded = Counter[str]()
    read_frames = source_video.read_frames

    def count(container: Any, *arguments: Any) -> Iterator[Any]:
        for frame in read_frames(container, *arguments):
            num_decoded[container.name] += 1
            yield frame

    for module in (source_video, encode):
        monkeypatch.setattr(module, "read_frames", count)
    spans = [range(133, 138), range(2, 7), range(65, 70), range(67, 72)]
    segments = [Segment(span.start, span.stop, in_frames=True) for span in spans]
    stored = store(path, *segments)
    for segment, span in zip(segments, spans, strict=True):
        assert numbers(stored[str(segment)]) == list(span)
    # An AVI has no times of display: with B-frames it is decoded from the start.
    has_times = container != "avi" or b_frames == 0
    assert num_decoded[str(path)] <= (90 if has_times else 150)

    damage_packet(path)
    assert isinstance(store(path)[""], VideoError)
    stored = store(path, Segment(0, 1.3), Segment(2.3, 3.3), Segment(2.7, 2.9), Segment(3.1, 3.2))
    assert numbers(stored["t=0,1.3"]) == list(range(39))
    assert "damaged" in str(stored["t=2.3,3.3"])
    assert "damaged" in str(stored["t=2.7,2.9"]), "it needs what is damaged before it"
    # Times lead to the key frame behind the damage.
    if has_times:
        assert numbers(stored["t=3.1,3.2"]) == [93, 94, 95]
