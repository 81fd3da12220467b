"""Files written by hand (lists, label maps, configurations) are read, or refused in a sentence."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adamae.common.errors import InputError
from adamae.shard_tools.inputs import read_inputs, read_label_map
from adamae.training.config import TrainConfig, parse, to_yaml

# The same examples every time, so that a test does not fail by chance.
fixed = settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# The first three are files in the folder of the test.
NAMES = st.sampled_from(
    [
        "a.mp4",
        "b b.mp4",
        "c",
        "../a.mp4",
        "/nowhere.mp4",
        "s3://bucket/a.mp4",
        "a.mp4/",
        "x" * 300 + ".mp4",
    ]
)
TEXT = st.text(max_size=12) | st.text(st.sampled_from('ab01.,;\t"\n\r -/é\x00'), max_size=40)
HEADS = ["path", "label", "youtube_id", "time_start", "time_end", "-1", "1e400", '"', "'"]
CELLS = NAMES | TEXT | st.sampled_from(HEADS)
JSON_KEYS = st.sampled_from(["id", "path", "label", "template"]) | TEXT


def nest(inner: Any) -> Any:
    return st.lists(inner, max_size=3) | st.dictionaries(JSON_KEYS, inner, max_size=4)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | CELLS
JSON: Any = st.recursive(SCALARS, nest, max_leaves=12)
# Keys of configurations, and some that are none.
KEYS = st.sampled_from(
    "run steps epochs batch_size seed precision data model optimizer finetune"
    " device shards weights frame_stride flip crop size num_frames mask_ratio base_lr".split()
)


SECTIONS = st.dictionaries(KEYS | TEXT, JSON, max_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name in ("a.mp4", "b b.mp4", "c.mp4"):
        (folder / name).write_bytes(b"no video, but a file")
    return folder


def check_list(path: Path) -> None:
    """Read a list; every item must have a source, a location, and a label that is text or None."""
    with contextlib.suppress(InputError):
        items = read_inputs(str(path))
        assert items
        assert len({item.source for item in items}) == len(items)
        for item in items:
            assert item.source
            assert item.label is None or isinstance(item.label, str)
            assert item.problem or "://" in item.location or Path(item.location).is_file()


@fixed
@given(
    st.lists(st.lists(CELLS, max_size=5), max_size=6),
    st.sampled_from([" ", ",", ";", "\t"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1"]),
)
@example([["path", "label"], ["a.mp4", "walk"], ["b b.mp4"]], ",", "utf-8")
@example(
    [["youtube_id", "time_start", "time_end", "label"], ["c", "nan", "1e400", "walk"]], ",", "utf-8"
)
@example([["x" * 300, "walk"]], " ", "utf-8-sig")
def test_text_lists(folder: Path, rows: list[list[str]], separator: str, encoding: str) -> None:
    path = folder / {" ": "list.txt", "\t": "list.tsv"}.get(separator, "list.csv")
    text = "\n".join(separator.join(row) for row in rows)
    errors = "replace" if encoding == "latin-1" else "surrogatepass"
    path.write_bytes(text.encode(encoding, errors))
    check_list(path)


@fixed
@given(JSON)
@example([{"id": "a", "template": "Moving [something]"}])
def test_json_lists(folder: Path, value: Any) -> None:
    path = folder / "list.json"
    path.write_text(json.dumps(value))
    check_list(path)


@fixed
@given(JSON, st.booleans())
@example({"walk": "0", "run": "1"}, True)
@example(["walk"], False)
def test_label_maps(folder: Path, value: Any, is_json: bool) -> None:
    path = folder / ("labels.json" if is_json else "labels.txt")
    path.write_text(json.dumps(value))
    with contextlib.suppress(InputError):
        assert all(isinstance(name, str) for name in read_label_map(path).names)


# Parsing one takes 0.2 s.
@settings(fixed, max_examples=30)
@given(st.dictionaries(KEYS | TEXT, JSON | SECTIONS, max_size=4))
@example({"data": {"shards": "x"}, "steps": 3})
@example({"data": {"shards": ["x", "y"], "weights": [1, 2.5]}})
def test_configurations(folder: Path, values: dict[str, Any]) -> None:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    with contextlib.suppress(InputError):
        config = parse(["--config", str(path), "data.shards=x"])
        assert isinstance(config, TrainConfig)
        path.write_text(to_yaml(config))
        assert parse(["--config", str(path)]) == config, "the written configuration differs"
