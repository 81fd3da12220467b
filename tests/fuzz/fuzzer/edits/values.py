"""Edits of what is said in JSON, JSON lines and YAML: a value, a key, a line is another."""

import json
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import yaml

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 5, 2.5, 2**31, 2**63, 10**12, 10**30, -0.5, 1e308, math.inf, -math.inf, math.nan),
    *(
        "",
        "5",
        "-1",
        "x",
        "null",
        "../elsewhere/secret.mp4",
        "/etc/hostname",
        "a\0b",
        "\x1b[31mred",
        "é" * 3000,
        "\ud800",
    ),
    *([], {}, [1], [None], {"x": 1}, [[1, 2], [3]], ["a", 1]),
)
DEEP = "[" * 100_000
BOMB = "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9 if i else ['x'] * 9)}]\n" for i in range(9))
YAML_SNIPPETS = (
    "&a [*a]", "&a {x: *a}", "!!python/object/apply:os.system ['touch ../elsewhere/ran']", "!!python/name:os.system",
    "!!binary aGVsbG8=", "!!timestamp 2001-01-01", "!!set {a, b}", "2001-01-01", "12:30:45", "0o17", "1_000", ".inf",
    ".nan", "1e400", "9" * 5000, "~", "yes", "'", '"\\x"', "*unknown", "{a: 1, a: 2}", "[" * 3000, "? [a]", "|\n  text",
    "\t", "%TAG",
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside a value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from places(inner)


def edit_tree(value: Any, rng: Random) -> Any:
    """`value` with one thing in it changed, in place."""
    found = list(places(value))
    if not found:
        return rng.choice(VALUES)
    container, key = rng.choice(found)
    kind = rng.randrange(8)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[rng.choice((f"{key}x", str(key).upper(), "", "__class__"))] = container.pop(key)
    elif kind == 2:
        other, there = rng.choice(found)
        container[key], other[there] = other[there], container[key]
    elif kind == 3 and isinstance(container, list):
        container.insert(key, container[key])
    elif kind == 4 and isinstance(container[key], int | float) and math.isfinite(container[key]):
        container[key] += rng.choice((-1, 1, 2, 0.5, 10**6))
    elif kind == 4 and isinstance(container[key], str) and container[key]:
        place = rng.randrange(len(container[key]))
        container[key] = container[key][:place] + rng.choice("0a/.\n") + container[key][place + 1 :]
    else:
        container[key] = rng.choice(VALUES)
    return value


def json_value(data: bytes, rng: Random) -> bytes:
    return _rewritten(data, lambda value: edit_tree(value, rng))


def json_deep(data: bytes, rng: Random) -> bytes:
    """A value is nested deeper than a parser may want to go."""
    marked = _rewritten(data, lambda value: _with_mark(value, rng))
    return marked.replace(b'"@DEEP@"', DEEP.encode(), 1)


def _with_mark(value: Any, rng: Random) -> Any:
    found = list(places(value))
    if not found:
        return "@DEEP@"
    container, key = rng.choice(found)
    container[key] = "@DEEP@"
    return value


def _rewritten(data: bytes, edit: Callable[[Any], Any]) -> bytes:
    try:
        return json.dumps(edit(json.loads(data))).encode()
    except (ValueError, RecursionError, TypeError):
        return data


def line_value(data: bytes, rng: Random) -> bytes:
    """One line of a table says something else."""
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    lines[place] = json_value(lines[place], rng)
    return b"\n".join(lines)


def lines_moved(data: bytes, rng: Random) -> bytes:
    """A line is gone, stands twice, has changed places with another, is blank or is no text."""
    lines = data.split(b"\n")
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines.insert(other, lines[place])
    elif kind == 2:
        lines[place], lines[other] = lines[other], lines[place]
    else:
        lines.insert(place, (b"", b"\xff\xfe", b"{", b"null")[rng.randrange(4)] if kind < 5 else lines[place][::-1])
    return b"\n".join(lines)


def encoding(data: bytes, rng: Random) -> bytes:
    """Not the UTF-8 that is expected: with a byte order mark, in UTF-16, with a wrong byte, with other line ends."""
    place = rng.randrange(len(data) + 1)
    try:
        wide = data.decode().encode("utf-16")
    except UnicodeError:
        wide = data
    turned = data.replace(b"\n", b"\r\n")
    return rng.choice((b"\xef\xbb\xbf" + data, wide, data[:place] + b"\xff" + data[place:], turned, data + b"\0"))


def yaml_value(data: bytes, rng: Random) -> bytes:
    try:
        return yaml.safe_dump(edit_tree(yaml.safe_load(data), rng), sort_keys=False).encode(errors="replace")
    except (yaml.YAMLError, UnicodeError, RecursionError, ValueError, TypeError):
        return data


def yaml_snippet(data: bytes, rng: Random) -> bytes:
    """A value is written in one of YAML's stranger ways."""
    lines = data.decode(errors="replace").split("\n")
    named = [place for place, line in enumerate(lines) if ": " in line]
    if not named:
        return data
    place = rng.choice(named)
    lines[place] = f"{lines[place].partition(':')[0]}: {rng.choice(YAML_SNIPPETS)}"
    return "\n".join(lines).encode()


def yaml_bomb(data: bytes, rng: Random) -> bytes:
    """Nine lists of nine aliases each: 10^9 values, if they are followed."""
    key = rng.choice((b"", b"model: *b8\n", b"data: *b8\n", b"run: *b8\n", b"steps: *b8\n"))
    return BOMB.encode() + data + b"\n" + key


JSON = (json_value, json_value, json_value, json_value, json_deep, encoding)
LINES = (line_value, line_value, line_value, lines_moved, lines_moved, encoding)
YAML = (yaml_value, yaml_value, yaml_snippet, yaml_snippet, yaml_bomb, lines_moved, encoding)
