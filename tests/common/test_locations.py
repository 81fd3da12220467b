"""A URL is used or refused by its name, and never becomes a local folder that is called `s3:`."""

from importlib import import_module
from pathlib import Path

import pytest

from adamae.common.errors import InputError

ROOT = Path(__file__).parents[2]
URL = "s3://bucket/x"
# Arguments that write, or read what must be on this node.
REFUSED = {
    "compare": [f"shards --models m --output {URL}"],
    "evaluate": [f"runs/x shards --output {URL}", f"runs/x shards --config {URL}"],
    "export": [f"import x.pth {URL}", f"export runs/x {URL}"],
    "preview": [f"shards --output {URL}", f"shards --config {URL}"],
    "shard_tools.check_shards": [URL],
    "shard_tools.make_shards": [f"videos out --label-map {URL}"],
    "shard_tools.synthetic_videos": [URL],
    "training.load_config": [
        f"data.shards=x data.cache_dir={URL}",
        f"data.shards=x --config {URL}",
    ],
    "visualize": [f"runs/x video.mp4 --output {URL}"],
}
COMMANDS = [(module, line) for module, lines in REFUSED.items() for line in lines]


@pytest.mark.parametrize(("module", "line"), COMMANDS)
def test_a_url_is_refused_by_its_name(
    module: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = import_module(f"adamae.{module}")
    for name in ("parse_arguments", "load_config", "main"):
        if hasattr(command, name):
            parse = getattr(command, name)
            break
    with pytest.raises(InputError, match=f"{URL} is a URL: give a path on this node"):
        parse(line.split())
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_no_bare_paths() -> None:
    """Path("s3://bucket") is the folder s3:, which a command would make."""
    files = [*ROOT.glob("*.py")]
    for package in ("benchmarks", "common", "shard_tools", "training"):
        files += (ROOT / package).rglob("*.py")
    for file in files:
        assert "type=Path" not in file.read_text(), file
