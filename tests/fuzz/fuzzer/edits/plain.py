"""Edits of bytes that know nothing of what they mean."""

from random import Random

INTERESTING = (0, 1, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def flip(data: bytes, rng: Random) -> bytes:
    """A few bits are others."""
    edited = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64)) if data else 0):
        edited[rng.randrange(len(edited))] ^= 1 << rng.randrange(8)
    return bytes(edited)


def number(data: bytes, rng: Random) -> bytes:
    """A number that often matters stands somewhere, in either byte order."""
    width = rng.choice((1, 2, 4, 4, 8))
    value = rng.choice(INTERESTING) % 256**width
    place = _place(data, rng)
    return data[:place] + value.to_bytes(width, rng.choice(("big", "little"))) + data[place + width :]


def noise(data: bytes, rng: Random) -> bytes:
    place = _place(data, rng)
    length = rng.choice((1, 4, 16, 256))
    return data[:place] + rng.randbytes(length) + data[place + length :]


def hole(data: bytes, rng: Random) -> bytes:
    """Zeros, as an interrupted download leaves them."""
    place = _place(data, rng)
    length = min(len(data) - place, rng.choice((16, 64, 512, 4096)))
    return data[:place] + bytes(length) + data[place + length :]


def cut(data: bytes, rng: Random) -> bytes:
    """The end is missing; now and then everything."""
    return data[: rng.choice((0, 1, 7, 64, _place(data, rng), len(data) - 1 if data else 0))]


def remove(data: bytes, rng: Random) -> bytes:
    place = _place(data, rng)
    return data[:place] + data[place + rng.choice((1, 4, 8, 512, 4096)) :]


def repeat(data: bytes, rng: Random) -> bytes:
    """A piece stands twice, there or elsewhere."""
    start, place = _place(data, rng), _place(data, rng)
    piece = data[start : start + rng.choice((1, 8, 512, 4096))]
    return data[:place] + piece + data[place:]


def exchange(data: bytes, rng: Random) -> bytes:
    """The two parts behind a point have changed places."""
    first, second = sorted((_place(data, rng), _place(data, rng)))
    return data[:first] + data[second:] + data[first:second]


def _place(data: bytes, rng: Random) -> int:
    """Anywhere, but as often as not near the beginning, where headers are."""
    return min(len(data), rng.randrange(256)) if rng.random() < 0.4 else rng.randrange(len(data) + 1)


EDITS = (flip, flip, number, number, noise, hole, cut, remove, repeat, exchange)
