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
# Sizes of a box or a header, and offsets.
ODD_SIZES = (0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1)


def flip_bits(data: bytes, rng: Random) -> bytes:
    """Flip 1, 5 or 50 bits."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 5, 50))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def replace_bytes(data: bytes, rng: Random) -> bytes:
    """Cut off the end, or put other bytes somewhere, in the place of some or between.

    These are zeros, noise, the file's own first bytes, a byte order mark or a size.
    """
    start = rng.choice((0, rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    num_bytes = rng.choice((4, 8))
    # Of 2**63 - 1, four bytes are the lower half.
    size = rng.choice(ODD_SIZES) % 2 ** (8 * num_bytes)
    choices = (
        b"",
        size.to_bytes(num_bytes, rng.choice(("big", "little"))),
        bytes(rng.choice((1, 16, 512))),
        rng.randbytes(16),
        data[:100],
        b"\xef\xbb\xbf",
    )
    new = rng.choice(choices)
    if not new:
        return data[:start]
    end = rng.choice((start, start + len(new)))
    return data[:start] + new + data[end:]


def encode_differently(data: bytes, rng: Random) -> bytes:
    encoding = rng.choice(("utf-16", "utf-8-sig", "latin-1"))
    return data.decode(errors="replace").encode(encoding, errors="replace")


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
    if rng.random() < 0.03:
        for _ in range(1000):
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
        # The shape, the byte order and the order of the axes.
        old = rng.choice((b"(", b"'<", b"False"))
        new = rng.choice((b"(9" + b"9" * 20, b"'>", b"True "))
        return data.replace(old, new, 1)
    array = np.load(io.BytesIO(data), allow_pickle=False)
    numbers = bytearray(array.tobytes())
    header = data[: len(data) - len(numbers)]
    if numbers:
        start = rng.randrange(len(numbers)) // 8 * 8
        number = rng.choice((bytes(8), b"\xff" * 8, b"\x01" + bytes(7)))
        # The last number may be shorter than 8 bytes.
        end = min(start + 8, len(numbers))
        numbers[start:end] = number[: end - start]
    return header + bytes(numbers)


def change_tensors(data: bytes, rng: Random) -> bytes:
    """Change the header of a .safetensors file, or make some weights NaN or huge."""
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    body = bytearray(data[8 + length :])
    if rng.random() < 0.5:
        header = change_json(header, rng)
    else:
        start = rng.randrange(len(body)) // 4 * 4
        weight = rng.choice((np.nan, np.inf, 1e30))
        body[start : start + 400] = np.full(100, weight, np.float32).tobytes()
    return len(header).to_bytes(8, "little") + header + bytes(body)


# Ways to damage any file, and files of a kind; a way that is here twice is taken twice as often.
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
    """Change a file's content or, now and then, remove it, or replace it by a folder or a link."""
    data = path.read_bytes()
    if rng.random() < 0.1:
        path.unlink()
        replacement = rng.choice(("nothing", "folder", "link to itself"))
        if replacement == "folder":
            path.mkdir()
        elif replacement == "link to itself":
            path.symlink_to(path.name)
        return
    change = rng.choice((*BY_SUFFIX.get(path.suffix, ()), *ANY))
    try:
        path.write_bytes(change(data, rng))
    except (ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        # It was damaged before, and is no file of its kind any more.
        path.write_bytes(flip_bits(data, rng))
