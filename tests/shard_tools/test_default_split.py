"""Videos for which no split is named are held out by folders of recordings, if there are any."""

from pathlib import Path

import pytest

from adamae.shard_tools.default_split import add_split
from adamae.shard_tools.make_shards import parse_arguments

BY_FOLDER = ["--hold-out", "0.2", "--group-by", "folder:2"]
BY_VIDEO = BY_FOLDER[:2]


@pytest.mark.parametrize(
    ("files", "added"),
    [
        (["run/a/1.mp4", "run/b/1.mp4", "walk/a/1.mp4", "walk/c/1.mp4"], BY_FOLDER),
        (["run/1.mp4", "run/2.mp4", "walk/1.mp4"], BY_VIDEO),
        (["run/a/1.mp4", "run/b/1.mp4", "walk/a/1.mp4", "walk/2.mp4"], BY_VIDEO),
        (["train/run/1.mp4", "train/walk/1.mp4", "test/run/2.mp4", "test/walk/2.mp4"], BY_VIDEO),
        (["run/a/1.png", "run/b/1.png", "walk/a/1.png", "walk/c/1.png"], BY_VIDEO),
    ],
    ids=["folders", "videos", "both", "subsets", "frames"],
)
def test_folders_within_classes_are_groups(
    files: list[str], added: list[str], tmp_path: Path
) -> None:
    for name in files:
        file = tmp_path / "videos" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    arguments = [str(tmp_path / "videos"), str(tmp_path / "shards")]
    assert add_split(arguments, parse_arguments(arguments)) == [*arguments, *added]


@pytest.mark.parametrize(
    ("own", "added"),
    [
        (["--hold-out", "0.1"], []),
        (["--split", "train=a.csv"], []),
        (["--group-by", "name:p[0-9]+"], BY_VIDEO),
    ],
)
def test_what_the_user_says_stays(own: list[str], added: list[str], tmp_path: Path) -> None:
    arguments = [*own, str(tmp_path), "shards"]
    assert add_split(arguments, parse_arguments(arguments)) == [*arguments, *added]
