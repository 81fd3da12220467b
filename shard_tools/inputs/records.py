"""Objects of JSON, and rows whose cells hold lists, as records: one a video, or a segment of one."""

import re
from collections.abc import Iterator
from typing import Any

from common.errors import InputError
from shard_tools.inputs.cells import is_pair, parse_nested, parse_time
from shard_tools.inputs.formats import ENDS, LENGTHS, PAIRS, PATHS, STARTS, is_time, to_key

WRAPPERS = {"info", "version", "data", "videos", "annotations", "annotation"}  # beside or around a list of objects
ONE_VIDEO = set("path filename video videopath videoid videouid vidname vid id".split())  # in an object by no id
ANNOTATIONS = {"annotations", "annotation"}  # which are unfolded with and without times; these with times:
PARTS = set("""
    segments segment clips clip steps events actions actioninstances narratedactions instances moments intervals labels
    languagequeries""".split())  # fmt: skip
TIMES = re.compile("segment|time|span|clip|window|moment|event|interval|shot|action|range|phase|step")  # in names


def list_records(value: Any, where: str) -> Iterator[Any]:
    """Yield the entries of a list, of an object by id, or of what either is wrapped in."""
    if isinstance(value, list):
        yield from value
        return
    if not isinstance(value, dict):
        raise InputError(f"{where} is not a list of videos: it is a {type(value).__name__}")
    if any(to_key(name) in ONE_VIDEO and isinstance(entry, str) for name, entry in value.items()):
        yield value
        return
    if isinstance(value.get("database"), dict):  # ActivityNet's, HACS', THUMOS', COIN's
        value = value["database"]
    tables = [key for key, entries in value.items() if _are_objects(entries)]
    if tables and {*value} & WRAPPERS:
        if len(tables) > 1:
            raise InputError(f"{where} holds several lists ({', '.join(tables)}): give one in a file of its own")
        yield from list_records(value[tables[0]], where)
        return
    for key, entry in value.items():
        for item in entry if isinstance(entry, list) else [entry]:
            yield {"key" if "id" in item else "id": key, **item} if isinstance(item, dict) else [key, item]


def unfold(record: Any) -> Iterator[Any]:
    """Yield an object once per annotation in it, or segment of parallel lists; anything else, or with none, itself."""
    cells = {name: parse_nested(cell) for name, cell in record.items()} if isinstance(record, dict) else {}
    for name, cell in cells.items():
        entries = [cell] if isinstance(cell, dict) and name in ANNOTATIONS else cell
        if _are_objects(entries) and (name in ANNOTATIONS or (to_key(name) in PARTS and any(map(has_times, entries)))):
            outer = {key: value for key, value in record.items() if key != name}
            for entry in entries:
                yield from unfold(_join(outer, name, entry))
            return
    lengths = {len(cell) for name, cell in cells.items() if _are_times(to_key(name), cell)}
    if len(lengths) != 1:
        yield record
        return
    length = lengths.pop()
    parallel = {name: cell for name, cell in cells.items() if isinstance(cell, list) and len(cell) == length}
    for number in range(length):  # ActivityNet Captions, Panda-70M
        yield {**record, **{name: cell[number] for name, cell in parallel.items()}}


def _join(outer: dict[str, Any], name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of a part of a video: its own times and labels, but the video's id."""
    own = {f"{name} {key}" if key in outer and to_key(key) in PATHS else key: value for key, value in entry.items()}
    times = f"{STARTS}|{ENDS}|{'|'.join(PAIRS | LENGTHS)}" if has_times(entry) else "-"
    others = {f"video's {key}" if key in own or re.fullmatch(times, to_key(key)) else key: outer[key] for key in outer}
    return others | own


def has_times(entry: dict[str, Any]) -> bool:
    """Whether an object says where a segment is, itself or in a list of objects."""
    return any(
        (re.fullmatch(STARTS, to_key(name)) and parse_time(value) is not None)
        or (to_key(name) in PAIRS and (is_pair(value) or _are_times(to_key(name), value)))
        or (_are_objects(value) and any(map(has_times, value)))
        for name, value in entry.items()
    )


def holds_segments(name: str, cell: Any) -> bool:
    """Whether a cell says where segments are, inside of lists or objects."""
    cell = parse_nested(cell)
    if isinstance(cell, dict):
        return has_times(cell) or any(holds_segments(key, value) for key, value in cell.items())
    if _are_objects(cell) and to_key(name) in PAIRS:
        return True
    if is_pair(cell):
        return to_key(name) in PAIRS
    if not isinstance(cell, list):
        return False
    if cell and all(map(is_pair, cell)):
        return TIMES.search(to_key(name)) is not None
    return any(holds_segments(name, value) for value in cell if isinstance(value, (list, dict)))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _are_times(key: str, value: Any) -> bool:
    """Whether a list holds segments, or the starts or the ends of some, by its name."""
    if not isinstance(value, list) or not value:
        return False
    if key in PAIRS:
        return all(map(is_pair, value))
    return is_time(key) and None not in map(parse_time, value)
