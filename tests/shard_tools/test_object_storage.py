"""Videos in object storage, whose failures end a run and reject no video."""

from pathlib import Path

import pytest
from object_store import S3Server, request
from shard_making import hashes, make

from adamae.common.errors import InputError
from adamae.pipeline.reading import storage
from adamae.pipeline.shards.read_format import read_dataset_info
from adamae.shard_tools.build import read_rejects

THREE = ("--samples-per-shard", "3")


@pytest.fixture
def bucket(store: S3Server, videos: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a folder with the videos, and what lies beside them."""
    monkeypatch.setattr(storage, "PAUSE_S", 0)
    request(store.url, "PUT", "/bucket")
    for file in sorted(videos.rglob("*.*")):
        name = file.relative_to(videos)
        request(store.url, "PUT", f"/bucket/videos/{name}", file.read_bytes())
    return "s3://bucket/videos"


@pytest.mark.parametrize("code", ["ExpiredToken", "RequestTimeTooSkewed"])
def test_credentials_that_expire_reject_nothing_and_the_same_command_resumes(
    store: S3Server, bucket: str, dataset: Path, tmp_path: Path, code: str
) -> None:
    """After the headers of all videos are read, and some videos."""
    store.inject("403", ".mp4", skipped=3 * 9, code=code)
    says = rf"s3://bucket/videos/.*\.mp4 cannot be read: no permission \({code}\); .*; what is done"
    with pytest.raises(InputError, match=says):
        make(bucket, tmp_path / "out", *THREE)
    staged = list(tmp_path.glob("out/.work/**/*.json"))
    assert 0 < len(staged) < 9
    assert not (tmp_path / "out/rejected.jsonl").exists()
    store.heal()
    assert make(bucket, tmp_path / "out", *THREE) == 0
    assert hashes(tmp_path / "out") == hashes(dataset)


def test_failures_that_pass_leave_no_trace(
    store: S3Server, bucket: str, dataset: Path, tmp_path: Path
) -> None:
    store.inject("503", "4.mp4", times=2)
    store.inject("cut", "5.mp4", times=2)
    assert make(bucket, tmp_path / "out", *THREE) == 0
    assert hashes(tmp_path / "out") == hashes(dataset)


def test_storage_that_fails_decides_nothing_about_pieces(
    store: S3Server, bucket: str, tmp_path: Path
) -> None:
    """Lengths are read from headers: without an answer, a video would not be cut."""
    store.inject("403", ".mp4", skipped=4, code="ExpiredToken")
    with pytest.raises(InputError, match="ExpiredToken"):
        make(bucket, tmp_path / "out", "--clip-seconds", "0.5")
    assert not (tmp_path / "out/.work").exists()


def test_a_bucket_that_cannot_be_listed_says_why(store: S3Server, tmp_path: Path) -> None:
    says = "s3://nowhere/videos cannot be listed: NoSuchBucket: .*; check the name of the bucket"
    with pytest.raises(InputError, match=says):
        make("s3://nowhere/videos", tmp_path / "out")


def test_a_file_that_is_not_there_is_rejected_until_it_is(
    store: S3Server, bucket: str, videos: Path, tmp_path: Path
) -> None:
    names = [video.relative_to(videos).as_posix() for video in sorted(videos.rglob("*.mp4"))]
    late = "left/late.mp4"
    lines = [f"{bucket}/{name},{name.partition('/')[0]}\n" for name in (*names, late)]
    (tmp_path / "list.csv").write_text("".join(lines))
    out = tmp_path / "out"
    for _ in range(2):
        assert make(tmp_path / "list.csv", out, *THREE) == 0
        assert read_rejects(out) == {f"{bucket}/{late}": "there is no such file"}
        assert read_dataset_info(out).num_samples == len(names)
    request(store.url, "PUT", f"/bucket/videos/{late}", (videos / names[0]).read_bytes())
    assert make(tmp_path / "list.csv", out, *THREE) == 0
    assert read_rejects(out) == {}
    assert read_dataset_info(out).num_samples == len(names) + 1
