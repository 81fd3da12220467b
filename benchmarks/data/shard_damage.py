"""How much damage to copied videos the two checks of `make_shards --encode copy` find.

    python benchmarks/data/shard_damage.py FOLDER_OF_VIDEOS

Every video is damaged in several ways at random places. Of the copies whose pictures are no longer those of the source
(the others lost nothing), which share is refused? What is not refused plays, with wrong pictures.
"""

import argparse
import hashlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import av
import torch

from benchmarks.harness import RESULTS, Row, machine, require, write_results
from common.errors import run_command
from pipeline.decoding.containers import main_stream, open_video
from shard_tools.encoding.encode import store
from shard_tools.encoding.picture import UnusableError
from shard_tools.inputs import read_inputs
from shard_tools.settings import CHECKS, Settings

Damage = Callable[[bytearray, random.Random], bytes]


def flipped(count: int) -> Damage:
    def flip(data: bytearray, draw: random.Random) -> bytes:
        for _ in range(count):
            data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
        return bytes(data)

    return flip


def overwritten(count: int, content: Callable[[random.Random, int], bytes]) -> Damage:
    def overwrite(data: bytearray, draw: random.Random) -> bytes:
        start = draw.randrange(len(data))
        data[start : start + count] = content(draw, min(count, len(data) - start))
        return bytes(data)

    return overwrite


def lost_byte(data: bytearray, draw: random.Random) -> bytes:
    del data[draw.randrange(len(data))]
    return bytes(data)


KINDS: dict[str, Damage] = {
    "cut off": lambda data, draw: bytes(data[: draw.randrange(len(data))]),
    "a byte is missing": lost_byte,
    "64 KiB of something else": overwritten(2**16, lambda draw, count: draw.randbytes(count)),
    "4 KiB of zeros": overwritten(2**12, lambda draw, count: bytes(count)),
    "512 bytes of zeros": overwritten(512, lambda draw, count: bytes(count)),
    "10 bytes wrong": flipped(10),
    "1 byte wrong": flipped(1),
}


def pictures(path: Path) -> str:
    """A hash of all frames that a player shows, as far as it gets."""
    digest = hashlib.sha256()
    try:
        with open_video(path) as container:
            stream = main_stream(container)
            if stream is None:
                raise ValueError("no video is left")
            stream.codec_context.thread_count = 1
            for frame in container.decode(stream):
                digest.update(frame.to_ndarray().tobytes())
    except (av.error.FFmpegError, ValueError):
        digest.update(b"stopped")
    return digest.hexdigest()


def is_refused(path: Path, check: str) -> bool:
    try:
        store(path, path.with_suffix(""), Settings(encode="copy", check=check))
    except (UnusableError, av.error.FFmpegError):
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", type=Path, help="folder of intact videos")
    parser.add_argument("--copies", type=int, default=2, help="damaged copies of each video and kind")
    parser.add_argument("--largest-mb", type=float, default=1.0, help="leave out larger videos, which take long")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu")
    arguments = parser.parse_args()
    av.logging.set_level(None)
    items = list(read_inputs(str(arguments.videos), None, unlabelled=True))
    paths = [arguments.videos / item.source for item in items if item.size <= arguments.largest_mb * 1e6]
    for path in paths:
        require("intact videos are taken", not any(is_refused(path, check) for check in CHECKS), path.name)
    intact = {path: pictures(path) for path in paths}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, damage in KINDS.items():
            changed, refused = 0, dict.fromkeys(CHECKS, 0)
            for path in paths:
                for copy in range(arguments.copies):
                    damaged = Path(folder, f"damaged{path.suffix}")
                    damaged.write_bytes(damage(bytearray(path.read_bytes()), random.Random(f"{path.name} {copy}")))
                    if pictures(damaged) == intact[path]:
                        continue
                    changed += 1
                    for check in CHECKS:
                        refused[check] += is_refused(damaged, check)
            shares = {f"refused_by_{check}": refused[check] / max(changed, 1) for check in CHECKS}
            rows.append({"damage": kind, "changed_videos": changed} | shares)
            print(rows[-1])
    notes = [
        f"{len(paths)} videos, {arguments.copies} damaged copies each; those that still look the same are left out."
    ]
    write_results(arguments.output, "shard_damage", rows, machine(torch.device("cpu")), notes)


if __name__ == "__main__":
    run_command(main)
