"""Edits of files of numbers: safetensors, PyTorch's, NumPy's."""

import ast
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from fuzzer.edits.plain import flip
from fuzzer.edits.values import VALUES, edit_tree

TYPES = ("F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "C64", "X9", "")
# What a reader that runs code would run: it leaves a file where nothing should be.
CODE = b"cos\nsystem\n(S'touch ../elsewhere/ran'\ntR."


def _of_header(edit: Callable[[dict[str, Any], Random], Any]) -> Callable[[bytes, Random], bytes]:
    def edited(data: bytes, rng: Random) -> bytes:
        try:
            header, content = _split(data)
            text = json.dumps(edit(header, rng)).encode()
        except (ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError):
            return data
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + content

    edited.__name__ = edit.__name__
    return edited


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@_of_header
def header(values: dict[str, Any], rng: Random) -> Any:
    return edit_tree(values, rng)


@_of_header
def about(values: dict[str, Any], rng: Random) -> Any:
    """What the file says of its model is another: widths, depths, heads, or no JSON."""
    described = json.loads(values["__metadata__"]["model_config"])
    if rng.random() < 0.1:
        values["__metadata__"]["model_config"] = rng.choice(("", "{", "[]", "null", "[" * 50_000))
    else:
        key = rng.choice(sorted(described))
        number = rng.choice((0, -1, 1, 3, 17, 64, 10**4, 10**6, 10**9, 10**30))
        described[key] = rng.choice((number, number, rng.choice(VALUES)))
        values["__metadata__"]["model_config"] = json.dumps(described)
    return values


@_of_header
def tensor(values: dict[str, Any], rng: Random) -> Any:
    """A tensor has another type, shape, place or name."""
    names = [name for name in values if name != "__metadata__"]
    name = rng.choice(names)
    kind = rng.randrange(5)
    if kind == 0:
        values[name]["dtype"] = rng.choice(TYPES)
    elif kind == 1:
        shape = values[name]["shape"]
        values[name]["shape"] = rng.choice(([*shape, 1], shape[1:], shape[::-1], [0], [2**40], [1] * 70, [-1]))
    elif kind == 2:
        values[name]["data_offsets"] = values[rng.choice(names)]["data_offsets"]
    elif kind == 3:
        old = "blocks.0."
        new = rng.choice(("blocks.1.", "blocks.7.", "blocks.1000000.", "blocks.x.", "blocks.-1."))
        values = {key.replace(old, new) if key == name or rng.random() < 0.5 else key: v for key, v in values.items()}
    else:
        values[rng.choice((f"module.{name}", "", "é" * 1000, "head.weight", "a\x1b[31m"))] = values.pop(name)
    return values


def numbers(data: bytes, rng: Random) -> bytes:
    """Some of the numbers are not finite, or far too large."""
    try:
        header, content = _split(data)
        (start, end) = rng.choice([v["data_offsets"] for k, v in header.items() if k != "__metadata__"])
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError, IndexError):
        return data
    values = np.frombuffer(content, np.uint8).copy()
    part = values[start : end - (end - start) % 4].view(np.float32) if not start % 4 else values[:0].view(np.float32)
    if len(part):
        chosen = slice(None) if rng.random() < 0.3 else rng.randrange(len(part))
        part[chosen] = rng.choice((np.nan, np.inf, -np.inf, 3e38, 1e-45, 0))
    return data[: len(data) - len(content)] + values.tobytes()


def header_length(data: bytes, rng: Random) -> bytes:
    length = rng.choice((0, 1, 7, len(data), 2**31, 10**8, 2**63, 2**64 - 1))
    return struct.pack("<Q", length) + data[8:]


SAFETENSORS = (header, about, about, tensor, tensor, numbers, numbers, header_length)


def archive(data: bytes, rng: Random) -> bytes:
    """A member of PyTorch's zip is damaged, lost, or stands twice, in a zip that is whole."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as source:
            content = [(name, source.read(name)) for name in source.namelist()]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return data
    place = rng.randrange(len(content))
    name, inside = content[place]
    kind = rng.randrange(5)
    if kind == 0:
        del content[place]
    elif kind == 1:
        content[place] = name, inside[: rng.randrange(len(inside) + 1)]
    elif kind == 2:
        content[place] = rng.choice((f"../{name}", f"{name}x", "archive/data.pkl")), inside
    else:
        content[place] = name, flip(inside, rng)
    return _zipped(content)


def code(data: bytes, rng: Random) -> bytes:
    """A pickle that runs a command where it is read as such."""
    kind = rng.randrange(3)
    if kind == 0:
        return CODE
    if kind == 1:
        return pickle.dumps({"model": {"a": 1}}) + CODE
    return _zipped([("archive/data.pkl", CODE), ("archive/version", b"3\n"), ("archive/byteorder", b"little")])


def _zipped(content: list[tuple[str, bytes]]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as output:
        for name, inside in content:
            output.writestr(zipfile.ZipInfo(name), inside)
    return target.getvalue()


PYTORCH = (archive, archive, archive, code)


def array_header(data: bytes, rng: Random) -> bytes:
    """The type, the shape or the order of an array is another."""
    try:
        length = struct.unpack_from("<H", data, 8)[0]
        described = ast.literal_eval(data[10 : 10 + length].decode("latin-1"))
    except (ValueError, SyntaxError, struct.error):
        return data
    kind = rng.randrange(3)
    if kind == 0:
        shapes = ((0,), (2**40,), (-1,), (1, 1, 1), (), [1], (1.5,), tuple(n + 1 for n in described["shape"]))
        described["shape"] = rng.choice(shapes)
    elif kind == 1:
        described["descr"] = rng.choice(("|O", "<i8", "<f2", "|V0", "x", [("a", "<i4")], "|S7", "<M8[s]"))
    else:
        edit_tree(described, rng)
    text = repr(described).encode("latin-1", "replace")
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return data[:8] + struct.pack("<H", len(text) % 65536) + text + data[10 + length :]


def array_value(data: bytes, rng: Random) -> bytes:
    """Numbers in an array are others: one of the extremes, its neighbour's, or one more."""
    try:
        values = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError, TypeError, MemoryError):
        return data
    if not values.size or not values.dtype.itemsize:
        return data
    start = len(data) - values.nbytes
    width = rng.choice([n for n in (1, 2, 4, 8) if n <= values.dtype.itemsize])
    place = start + rng.randrange(values.nbytes - width + 1)
    place -= (place - start) % width
    old = int.from_bytes(data[place : place + width], "little")
    new = rng.choice((0, 1, old + 1, old - 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), rng.getrandbits(8 * width)))
    return data[:place] + (new % 2 ** (8 * width)).to_bytes(width, "little") + data[place + width :]


def array_rows(data: bytes, rng: Random) -> bytes:
    """Two rows have changed places, one is lost or stands twice."""
    try:
        values = np.load(io.BytesIO(data), allow_pickle=False)
        order = list(range(len(values)))
        place, other = rng.randrange(len(order)), rng.randrange(len(order))
        if rng.random() < 0.5:
            order[place], order[other] = order[other], order[place]
        else:
            order[place : place + 1] = rng.choice(([], [place, place]))
        target = io.BytesIO()
        np.save(target, values[order])
    except (ValueError, EOFError, OSError, SyntaxError, TypeError, MemoryError, IndexError):
        return data
    return target.getvalue()


ARRAYS = (array_header, array_value, array_value, array_value, array_rows)
