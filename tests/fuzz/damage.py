"""Random damage to files, by their kind. The same seed damages the same way."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    0.5,
    2**63,
    10**30,
    float("nan"),
    "",
    "x" * 5000,
    "\x1b[2J\nerror: all is lost",
    "../../secret",
    [],
    {},
    [[]],
    {"a": 1},
    "\udce9",
)
ODD_SIZES = (0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1)  # of a box, a header, an offset


def flip_bits(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 5, 50))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def replace_bytes(data: bytes, rng: Random) -> bytes:
    """Cut off the end, or put zeros, noise, other bytes of the file, marks or sizes in the place of some or between."""
    start = rng.choice((0, rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    size = rng.choice((4, 8))
    number = (rng.choice(ODD_SIZES) % 2 ** (8 * size)).to_bytes(size, rng.choice(("big", "little")))
    new = rng.choice(
        (
            b"",
            number,
            bytes(rng.choice((1, 16, 512))),
            rng.randbytes(16),
            data[:100],
            b"\xef\xbb\xbf",
        )
    )
    return data[:start] + new + (data[rng.choice((start, start + len(new))) :] if new else b"")


def encode_differently(data: bytes, rng: Random) -> bytes:
    return data.decode(errors="replace").encode(
        rng.choice(("utf-16", "utf-8-sig", "latin-1")), errors="replace"
    )


def replace_value(tree: Any, rng: Random) -> Any:
    """Replace or remove one value somewhere inside, or nest it a thousand levels deep."""
    if isinstance(tree, (dict, list)) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        if rng.random() < 0.15:
            del tree[key]
        else:
            tree[key] = replace_value(tree[key], rng)
        return tree
    value = rng.choice(ODD_VALUES)
    if isinstance(tree, (int, float)) and rng.random() < 0.5:
        value = tree + rng.choice((-1, 1, 10**6))
    for _ in range(1000 if rng.random() < 0.03 else 0):
        value = [value]
    return value


def change_json(data: bytes, rng: Random) -> bytes:
    return json.dumps(replace_value(json.loads(data), rng)).encode(errors="surrogateescape")


def change_yaml(data: bytes, rng: Random) -> bytes:
    return yaml.safe_dump(replace_value(yaml.safe_load(data), rng)).encode(errors="replace")


def change_lines(data: bytes, rng: Random) -> bytes:
    """Remove, repeat, move or change one line, or put a blank one in its place."""
    lines = data.split(b"\n")
    number = rng.randrange(len(lines))
    line = lines.pop(number)
    changed = change_json(line, rng) if line.startswith(b"{") else flip_bits(line, rng)
    lines[number:number] = rng.choice(([], [line, line], [b""], [changed]))
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines) + 1), line)
    return b"\n".join(lines)


def change_array(data: bytes, rng: Random) -> bytes:
    """Change one number of an .npy file, or its header."""
    if rng.random() < 0.3:
        return data.replace(
            rng.choice((b"(", b"'<", b"False")), rng.choice((b"(9" + b"9" * 20, b"'>", b"True ")), 1
        )
    raw = bytearray(np.load(io.BytesIO(data), allow_pickle=False).tobytes())
    if raw:
        start = rng.randrange(len(raw)) // 8 * 8
        raw[start : start + 8] = rng.choice((bytes(8), b"\xff" * 8, b"\x01" + bytes(7)))[
            : len(raw) - start
        ]
    return data[: len(data) - len(raw)] + bytes(raw)


def change_tensors(data: bytes, rng: Random) -> bytes:
    """Change the header of a .safetensors file, or make some weights NaN or huge."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], bytearray(data[8 + length :])
    if rng.random() < 0.5:
        header = change_json(header, rng)
    else:
        start = rng.randrange(len(body)) // 4 * 4
        body[start : start + 400] = np.full(
            100, rng.choice((np.nan, np.inf, 1e30)), np.float32
        ).tobytes()
    return len(header).to_bytes(8, "little") + header + bytes(body)


ANY = (flip_bits, replace_bytes, replace_bytes)
BY_SUFFIX: dict[str, tuple[Callable[[bytes, Random], bytes], ...]] = {
    ".json": (change_json, change_json, encode_differently),
    ".jsonl": (change_lines, change_lines, encode_differently),
    ".csv": (change_lines, encode_differently),
    ".yaml": (change_yaml, change_yaml, change_lines),
    ".npy": (change_array, change_array),
    ".safetensors": (change_tensors, change_tensors),
}


def damage(path: Path, rng: Random) -> None:
    """Change a file's content or, now and then, remove it, or put a folder or a link to itself in its place."""
    data = path.read_bytes()
    if rng.random() < 0.1:
        path.unlink()
        rng.choice((lambda: None, path.mkdir, lambda: path.symlink_to(path.name)))()
        return
    try:
        path.write_bytes(rng.choice((*BY_SUFFIX.get(path.suffix, ()), *ANY))(data, rng))
    except (
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
        yaml.YAMLError,
    ):  # damaged before, so not of its kind
        path.write_bytes(flip_bits(data, rng))
