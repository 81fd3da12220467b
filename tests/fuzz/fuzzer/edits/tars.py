"""Edits of tars: their headers, their order, and links, devices and sizes that a tar of videos should not hold."""

import gzip
import io
import tarfile
from collections.abc import Callable
from random import Random

BLOCK = 512
NAMES = (
    *("./{}", "../{}", "/{}", "v1.0/{}", ".{}", "{}/", "a/../{}", "A.B.{}", "{}.part", "x\\{}", "é{}", "{}\n"),
    *("\x1b[31m{}", "CON/{}", "{} .mp4", "a" * 120 + "/{}", "b" * 300 + "{}", "{}.mp4.json", ".mp4"),
)
KINDS = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE)
SIZES = (b"00000000000\0", b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"-0000000001\0", b"not a size\0\0")

Member = tuple[tarfile.TarInfo, bytes]


def members(data: bytes) -> list[Member]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(member, opened.read() if (opened := tar.extractfile(member)) else b"") for member in tar]


def written(content: list[Member], layout: int = tarfile.PAX_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=layout) as tar:
        for member, inside in content:
            tar.addfile(member, io.BytesIO(inside))
    return target.getvalue()


def _of_members(edit: Callable[[list[Member], Random], None]) -> Callable[[bytes, Random], bytes]:
    def edited(data: bytes, rng: Random) -> bytes:
        try:
            content = members(data)
            if not content:
                return data
            edit(content, rng)
            return written(content, rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)))
        except (tarfile.TarError, ValueError, OSError):
            return data

    edited.__name__ = edit.__name__
    return edited


@_of_members
def member_name(content: list[Member], rng: Random) -> None:
    member = rng.choice(content)[0]
    others = [other.name for other, _ in content]
    member.name = rng.choice((*NAMES, rng.choice(others).replace("{", ""))).format(member.name)


@_of_members
def member_kind(content: list[Member], rng: Random) -> None:
    """A link to another member or to what lies elsewhere, a device, a pipe, a sparse file."""
    member = rng.choice(content)[0]
    member.type = rng.choice(KINDS)
    member.linkname = rng.choice((rng.choice(content)[0].name, "../elsewhere/secret.mp4", "/dev/zero", member.name))


@_of_members
def member_order(content: list[Member], rng: Random) -> None:
    content.insert(rng.randrange(len(content)), content.pop(rng.randrange(len(content))))


@_of_members
def member_twice(content: list[Member], rng: Random) -> None:
    content.insert(rng.randrange(len(content)), rng.choice(content))


@_of_members
def member_lost(content: list[Member], rng: Random) -> None:
    del content[rng.randrange(len(content))]


@_of_members
def member_label(content: list[Member], rng: Random) -> None:
    """What stands beside a video is no label, or one that cannot be."""
    texts = (b"", b"\xff\xfe", b"5\n", b"a\nb", b"null", b"[1]", b'{"label": {"a": 1}}', b"x" * 100_000, b"\x1b[2J")
    beside = [place for place, (member, _) in enumerate(content) if member.name.endswith((".cls", ".json", ".txt"))]
    if beside:
        place = rng.choice(beside)
        text = rng.choice(texts)
        content[place][0].size = len(text)
        content[place] = content[place][0], text


@_of_members
def member_headers(content: list[Member], rng: Random) -> None:
    """Extended headers say something else than the plain one."""
    key = rng.choice(("path", "size", "GNU.sparse.major", "GNU.sparse.size", "GNU.sparse.map", "linkpath", "mtime"))
    value = rng.choice(("", "0", "-1", "9" * 30, "../elsewhere/secret.mp4", "0,10,20", "nan"))
    rng.choice(content)[0].pax_headers = {key: value}


def header(data: bytes, rng: Random) -> bytes:
    """A field of a header is another, with the checksum made right again or not."""
    heads = [start for start in range(0, len(data), BLOCK) if data[start + 257 : start + 262] == b"ustar"]
    if not heads:
        return data
    start = rng.choice(heads)
    block = bytearray(data[start : start + BLOCK])
    if rng.random() < 0.5:
        block[124:136] = rng.choice(SIZES)
    else:
        block[rng.randrange(BLOCK)] = rng.randrange(256)
    if rng.random() < 0.8:
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    return data[:start] + bytes(block) + data[start + BLOCK :]


def compressed(data: bytes, rng: Random) -> bytes:
    return gzip.compress(data, mtime=0)


EDITS = (
    *(member_name, member_name, member_kind, member_order, member_twice, member_lost),
    *(member_label, member_headers, header, header, header, compressed),
)
