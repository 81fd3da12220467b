"""Whatever the input holds ends in a shard, or in rejected.jsonl with a reason."""

import csv
import gzip
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from made_videos import remux
from PIL import Image
from shard_making import all_samples, flip, list_segments, make, make_folder

from adamae.common.errors import InputError
from adamae.pipeline.shards.read_format import read_dataset_info
from adamae.shard_tools import make_shards
from adamae.shard_tools.build import Build, read_rejects
from adamae.shard_tools.settings import Settings


@pytest.fixture(scope="module")
def whole(generate: Callable[..., Path]) -> Path:
    """Return an intact video, with its table of contents at the end as most tools write it."""
    return generate("--size", "96", "--num-frames", "100")


@pytest.fixture(scope="module")
def streamable(whole: Path) -> bytes:
    """Return the same with its table of contents at the beginning, so that a cut file opens."""
    return remux(whole.read_bytes(), "mp4", movflags="+faststart")


def write_sound(path: Path) -> None:
    """Write a file with sound alone."""
    with av.open(str(path), "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=44100, layout="mono")
        samples = np.zeros((1, 4096), np.float32)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        frame.rate = 44100
        output.mux([*stream.encode(frame), *stream.encode(None)])


def write_no_frames(path: Path) -> None:
    """Write a video that has no frames."""
    with av.open(str(path), "w", format="mp4") as output:
        stream: Any = output.add_stream("h264", 25)
        stream.width = 64
        stream.height = 64
        stream.pix_fmt = "yuv420p"
        output.start_encoding()


def write_huge_gif(path: Path) -> None:
    """Write a GIF whose header says 65535x65535."""
    pictures = [Image.fromarray(np.full((8, 8), gray, np.uint8)) for gray in (0, 128, 255)]
    pictures[0].save(path, format="GIF", save_all=True, append_images=pictures[1:])
    data = bytearray(path.read_bytes())
    data[6:10] = b"\xff\xff\xff\xff"
    path.write_bytes(data)


def write_png(path: Path) -> None:
    Image.new("RGB", (64, 64)).save(path, format="PNG")


def write_jpeg(path: Path) -> None:
    Image.new("RGB", (64, 64)).save(path, format="JPEG")


def test_files_that_are_no_intact_video(whole: Path, streamable: bytes, tmp_path: Path) -> None:
    good = whole.read_bytes()
    folder = tmp_path / "in"
    fragments = remux(good, "mp4", movflags="frag_keyframe+empty_moov")
    key = {
        "encryption_scheme": "cenc-aes-ctr",
        "encryption_key": "76a6" * 8,
        "encryption_kid": "a7e6" * 8,
    }
    middle = range(len(good) // 3, len(good) * 2 // 3, 100)
    # What each file holds, or a function that writes it, and parts of the reason, one of which is
    # in it: versions of FFmpeg differ.
    contents: dict[str, tuple[bytes | Callable[[Path], None], str]] = {
        "empty.mp4": (b"", "the file is empty"),
        "text.mp4": (b"Not found: please log in\n" * 40, "text file"),
        "random.mp4": (np.random.default_rng(0).bytes(20000), "no video format that FFmpeg knows"),
        "zeros.mp4": (bytes(20000), "nothing but zeros"),
        "cut_to_header.mp4": (good[:40], "moov"),
        "cut_in_the_middle.mp4": (good[: len(good) // 2], "moov"),
        "cut_at_the_end.mp4": (good[:-100], "moov"),
        "cut_head.mp4": (
            good[5000:],
            "no video format that FFmpeg knows, or its beginning is missing",
        ),
        "cut_streamable_middle.mp4": (streamable[: len(streamable) // 2], "cut off"),
        "cut_streamable_end.mp4": (streamable[:-300], "cut off"),
        "cut_fragments.mp4": (fragments[: len(fragments) * 2 // 3], "cut off"),
        "cut.mkv": (remux(good, "matroska")[: len(good) // 2], "cut off"),
        "cut.ts": (remux(good, "mpegts")[:-3000], "cut off|damaged"),
        "flipped.mp4": (
            flip(good, middle),
            "cannot be decoded|is damaged|cut off or damaged",
        ),
        "zeros_inside.mp4": (
            good[:9000] + bytes(6000) + good[15000:],
            "cannot be decoded|is damaged",
        ),
        "encrypted.mp4": (
            remux(good, "mp4", **key),
            "frame 0 cannot be decoded|frame 0 is damaged",
        ),
        "sound_only.mp4": (write_sound, "no video, only sound"),
        "no_frames.mp4": (write_no_frames, "no frame|moov|no video"),
        "still.mp4": (write_png, "still image"),
        "photo.mp4": (write_jpeg, "still image"),
        "huge.gif": (write_huge_gif, "65535x65535|cannot be decoded|no frame|FFmpeg"),
        "playlist.mp4": (
            b"#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1:9/a.ts\n",
            "text file|no frame|no video",
        ),
        "html.webm": (b"<!DOCTYPE html><html><body>403 Forbidden</body></html>" * 9, "web page"),
        "s3.mp4": (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', "it is XML"),
        "lfs.mp4": (b"version https://git-lfs.github.com/spec/v1\noid sha256:f0", "git lfs pull"),
    }
    make_folder(folder, {"good.mp4": good})
    for name, (content, _) in contents.items():
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content)
    (folder / "dangling.mp4").symlink_to(folder / "nowhere.mp4")
    make(folder, tmp_path / "out")
    rejects = read_rejects(tmp_path / "out")
    assert rejects.pop("dangling.mp4") == "it is a link to a file that does not exist"
    assert sorted(rejects) == sorted(contents)
    for name, (_, reason) in contents.items():
        assert any(part in rejects[name] for part in reason.split("|")), f"{name}: {rejects[name]}"
    assert [sample.source for _, sample in all_samples(tmp_path / "out")] == ["good.mp4"]


def test_awkward_names_and_places_are_no_problem(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [
        "with spaces/a b  c.mp4",
        "dots/v1.0.final.mp4",
        "unicode/日本語 видео ñ.mp4",
        "newline/a\nb.mp4",
        "dash/-rf.mp4",
        "same/clip.mp4",
        "other/clip.mp4",
        "folder.mp4/clip.mp4",
        "upper/CLIP.MP4",
        "wrong_extension/actually_mp4.avi",
        'quote/it\'s "so" 100% $HOME.mp4',
        "bytes/\udcff\udcfe.mp4",
        f"{200 * 'x'}/{200 * 'x'}.mp4",
    ]
    no_videos = {"same/._clip.mp4": "what a Mac leaves behind", "notes.txt": "no video"}
    make_folder(tmp_path / "in", dict.fromkeys(names, whole.read_bytes()) | no_videos)
    (tmp_path / "in" / "same" / "loop").symlink_to(tmp_path / "in")
    make(tmp_path / "in", tmp_path / "out", "--encode", "copy", "--label", "folder:1")
    samples = [sample for _, sample in all_samples(tmp_path / "out")]
    assert sorted(sample.source for sample in samples) == sorted(names)
    assert len({sample.key for sample in samples}) == len(names)
    assert all(re.fullmatch("[A-Za-z0-9_-]{24,71}", sample.key) for sample in samples)
    assert {sample.container for sample in samples} == {"mp4"}
    assert read_rejects(tmp_path / "out") == {}
    report = read_dataset_info(tmp_path / "out").report
    assert [len(group) for group in report["duplicates"]] == [len(names)]
    assert [len(group) for group in report["conflicts"]] == [len(names)]
    log = capsys.readouterr().err
    for what in ("names", "labels"):
        assert f"1 file appears under several {what}; all were kept (the first: " in log


def test_lists_with_errors(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    lines = [
        "a.mp4,run",
        "absent.mp4,run",
        "b.mp4,",
        "folder,run",
        "c.mp4,run",
        "c.mp4,walk",
        "d.mp4,swim",
        "a.mp4,run",
        "secret.mp4,run",
    ]
    files = dict.fromkeys(("a.mp4", "b.mp4", "c.mp4", "d.mp4", "secret.mp4"), whole.read_bytes())
    make_folder(tmp_path, {**files, "list.csv": "\n".join(lines), "classes.txt": "walk\nrun\n"})
    # The tests may be run by root, who may read everything.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: "secret" not in str(path))
        make(tmp_path / "list.csv", tmp_path / "out", "--label-map", str(tmp_path / "classes.txt"))
    assert read_rejects(tmp_path / "out") == {
        "absent.mp4": "there is no such file",
        "b.mp4": "it has no label, others have one",
        "c.mp4": "it is listed with two labels, 'run' and 'walk'",
        "d.mp4": "its label 'swim' is not in the label map",
        "folder": "it is a folder, not a video file",
        "secret.mp4": "no permission to read it",
    }
    ((_, sample),) = all_samples(tmp_path / "out")
    assert (sample.source, sample.label) == ("a.mp4", 1)


BAD_COMMANDS: list[tuple[str, str]] = [
    (
        "videos s3://bucket/out",
        r"s3://bucket/out is a URL: make the shards in a folder, .*`aws s3 sync FOLDER s3://b",
    ),
    ("nowhere out", "nowhere does not exist"),
    (
        "pictures out",
        r"no video found in .*; skipped 1 pictures: convert animated ones to .* own: a\.jpg",
    ),
    ("broken.json out", "broken.json is not a list of videos"),
    (
        "quote.csv out",
        r"quote\.csv, line 2, cannot be split at commas \(.*\): a quote there is not closed",
    ),
    ("videos empty.csv", "empty.csv is a file"),
    ("videos videos/shards", "lies inside the input"),
    ("videos videos", "lies inside the input"),
    ("absent.csv out", "none of 2 videos can be used"),
    ("binary.csv out", r"binary\.csv is binary, or no text in UTF-16"),
    ("list.txt.gz out", r"list\.txt\.gz is compressed \(gzip\): unpack it"),
    ("rubbish out", "none of 1 videos can be used"),
    ("videos out --frame-stride 0", "--frame-stride: it must be at least 1, not 0"),
    ("videos out --quality 99", "--quality: it must be 0 to 63, not 99"),
    ("videos out --timeout inf", r"--timeout: it must be 0.001 to 1e\+09, not inf"),
    ("videos out --encode copy --clip-seconds 3", "cannot go with --clip-seconds"),
    ("videos out --encode copy --gop 4", "--encode copy keeps every byte: it cannot go with --gop"),
    ("videos out --encode copy --tune size", "cannot go with --tune"),
    ("videos out --root videos", "--root is for the paths of a list"),
    ("videos out --hold-out 20", "--hold-out is a fraction between 0 and 1"),
    ("videos/a.mp4 out --hold-out 0.1", "--hold-out leaves no video for train"),
    ("videos out --hold-out 0.4 --group-by person", "--group-by is person: give folder:1"),
    ("videos out --label-map nowhere.txt", "nowhere.txt is not a label map"),
    ("videos out --split a=x.csv --split a=y.csv", "--split names must differ"),
    ("nonsense://bucket/folder out", "cannot be opened"),
    ("videos /proc/shards", "/proc/shards cannot be made"),
    ("videos out --split a.csv", "a.csv is not like train=train.csv"),
    ("videos out --part 5/4", "5/4 is not like 1/4"),
    ("videos", "the following arguments are required: output; `.*` lists every option"),
    (
        "videos out --frame_stride 2",
        "there is no option --frame_stride: did you mean --frame-stride",
    ),
    ("videos out --encode av2", "--encode: invalid choice: 'av2'"),
]


@pytest.mark.parametrize(("command", "sentence"), BAD_COMMANDS)
def test_bad_commands_end_in_one_sentence(
    whole: Path, tmp_path: Path, command: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "pictures/a.jpg": b"",
        "videos/a.mp4": whole.read_bytes(),
        "rubbish/a.mp4": b"rubbish",
        "empty.csv": b"",
        "quote.csv": b'a.mp4,left\nb.mp4,"left\nc.mp4,right\n',
        "broken.json": b"{",
        "binary.csv": b"\xff\xfe\x00",
        "list.txt.gz": gzip.compress(b"a.mp4 run"),
        "absent.csv": b"a.mp4,run\nb.mp4,walk\n",
    }
    monkeypatch.chdir(make_folder(tmp_path, files))
    with pytest.raises(InputError, match=sentence) as caught:
        make_shards.main(command.split())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() or "can be used" in sentence
    assert not list(tmp_path.rglob("dataset.json"))
    assert not list(tmp_path.rglob("*.tar"))


def test_a_second_run_at_the_same_time_is_refused(whole: Path, tmp_path: Path) -> None:
    build = Build(tmp_path / "out", Settings())
    with build.lock(), pytest.raises(InputError, match="is locked by another run"):
        make(whole.parent, tmp_path / "out")


UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount() -> bool:
    script = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return sys.platform == "linux" and subprocess.run(script, capture_output=True).returncode == 0


# The smaller disk is full in a worker, the larger one when the shard is put together.
@pytest.mark.skipif(not can_mount(), reason="this machine does not let users mount")
@pytest.mark.parametrize("size", ["36k", "96k"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_full_disk_ends_the_run_and_blames_no_video(
    videos: Path, tmp_path: Path, size: str, cut: bool
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    inputs = list_segments(videos, tmp_path / "list.json") if cut else videos
    script = [sys.executable, make_shards.__file__]
    command = [*script, str(inputs), str(disk / "out"), "--workers", "1"]
    # No other process sees this mount.
    mount = f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
    shell = [*UNSHARE, "sh", "-c", mount, str(disk)]
    result = subprocess.run([*shell, *command], capture_output=True, text=True)
    assert result.returncode == 74, result.stderr
    assert "No space left on device" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


# Encoding takes 20 s.
@pytest.mark.parametrize("encode", ["copy", pytest.param("h264", marks=pytest.mark.slow)])
def test_shared_clips_are_all_accounted_for(
    shared_folder: Path | None, tmp_path: Path, encode: str
) -> None:
    if shared_folder is None:
        pytest.skip("no clips beside the repository")
    # Beside the videos lie tables (.tsv).
    edge_cases = list((shared_folder / "videos/edge").glob("*.[!t]*"))
    broken = list((shared_folder / "videos/broken").glob("*.[!t]*"))
    clips = [*edge_cases, *broken]
    (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in clips))
    options = ["--encode", encode]
    if encode != "copy":
        options.append("--frame-stride=1")
    make(tmp_path / "list.txt", tmp_path / "out", *options)
    samples = [sample for _, sample in all_samples(tmp_path / "out")]
    stored = {Path(sample.source).name: sample.num_frames for sample in samples}
    reasons = read_rejects(tmp_path / "out")
    # Some intact videos cannot be copied, only encoded.
    rejects = {
        Path(source).name for source, reason in reasons.items() if "--encode copy" not in reason
    }
    assert rejects == {path.name for path in broken} | {"decord__corrupted.mp4"}
    assert len(stored) + len(reasons) == len(clips)
    with (shared_folder / "videos/edge/MANIFEST.tsv").open() as manifest:
        for row in csv.DictReader(manifest, delimiter="\t"):
            name = next(iter(row.values()))
            # Variable frame rate is made constant, and the edit list of one clip hides its first
            # frames.
            if name in stored and row["vfr"] == "no" and "discard" not in name:
                assert stored[name] == int(row["frames"]), name
