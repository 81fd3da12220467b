"""Bytes of a sample out of its shard, checked against the hashes that were taken when the shard was made."""

import hashlib
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from common.errors import InputError
from pipeline.decoding.video_error import VideoError
from pipeline.planning.plan import ClipPlan
from pipeline.reading.ahead import LookAhead, Piece, Pieces
from pipeline.reading.ledger import Holder
from pipeline.reading.storage import is_remote
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice

OPENS = 5  # tries to open a copy before another process makes room of it
T = TypeVar("T")


class Reader:
    """Reads byte ranges of shards, of local ones where they are; safe to use from many threads."""

    def __init__(self, dataset: ShardDataset, plan: ClipPlan | None = None) -> None:
        """`plan`: what will be read, of which shards in an object store are downloaded ahead."""
        self._dataset = dataset
        self._closed = False
        self._starting = threading.Lock()  # no download begins after the end
        self._files = OpenFiles(
            lambda piece: self._ahead is not None and self._ahead.expects(piece), dataset.cache.max_bytes
        )
        self._renewed: set[Piece] = set()
        self._renewing = threading.Lock()
        self._pieces = Pieces(dataset, plan)
        self._holder: Holder | None = None
        self._held: dict[Piece, Path] = {}  # what the cache keeps for this reader
        self._ahead: LookAhead | None = None
        if plan is not None and dataset.is_remote:
            self._ahead = LookAhead(plan, self._pieces, dataset.cache.max_bytes, self._fetch_ahead, self._let_go)

    def download(self, sample: int) -> None:
        """Have the sample here; returns at once if it is.

        Raises VideoError if its row is broken, InputError if the object store does not give it.
        """
        self._usable(sample)
        if piece := self._pieces.of(sample):
            self._file(piece)

    def read(self, sample: int) -> bytes:
        """The video of a sample. Raises VideoError if its bytes are not those that were put there.

        The hash costs 0.6 ms a megabyte and finds what decoders do not: most flipped bytes decode to something.
        """
        piece, video = self._piece(sample), self._usable(sample)
        return self._tried(piece, partial(self._whole, piece, video))

    def clip(self, sample: int, frames: Sequence[int]) -> VideoSlice:
        """What of a sample's video these frames take: their groups of pictures where it has such, else all of it.

        Raises VideoError if the bytes are not those that were put there.
        """
        piece, video = self._piece(sample), self._usable(sample)
        groups = self._dataset.gops(sample)
        if groups is None:
            return VideoSlice(self.read(sample), tuple(frames), video.num_frames)
        return self._tried(piece, partial(groups.slice_video, frames, partial(self._range, piece, video)))

    def _piece(self, sample: int) -> Piece:
        return self._pieces.of(sample) or Piece(int(self._dataset.shard_of[sample]))

    def _usable(self, sample: int) -> Sample:
        video = self._dataset.samples[sample]
        if video.problem:
            raise VideoError(video.problem)
        return video

    def _tried(self, piece: Piece, read: Callable[[], T]) -> T:
        try:
            return read()
        except VideoError:
            if not self._renew(piece):
                raise
            return read()

    def _whole(self, piece: Piece, video: Sample) -> bytes:
        data = self._range(piece, video, 0, video.size)
        if len(data) < video.size:
            raise VideoError(f"the shard ends after {len(data)} of the video's {video.size} bytes")
        if hashlib.sha256(data).hexdigest() != video.sha256:
            raise VideoError("the bytes have changed since the shard was made (sha256 differs)")
        return data

    def _range(self, piece: Piece, video: Sample, offset: int, size: int) -> bytes:
        """`size` bytes of a video from `offset` on, fewer at the end of the shard."""
        file = self._file(piece)  # held here: another thread may push it out of the cache
        return os.pread(file.fileno(), size, offset + (video.offset if piece.sample is None else 0))

    def _renew(self, piece: Piece) -> bool:
        """Download a piece anew if its copy has been damaged here; whether that may have helped."""
        if not is_remote(self._dataset.shards[piece.shard]):
            return False
        with self._renewing:
            if piece not in self._renewed:
                self._renewed.add(piece)
                self._fetch(piece, fresh=True).close()
                self._files.close()
        return True

    def reach(self, batch: int) -> None:
        """Have the shards of the plan's batches from `batch` on downloaded in the background; returns at once.

        The cache may have those that no batch from there on reads.
        """
        with self._starting:
            if self._ahead is not None and not self._closed:
                self._ahead.reach(batch)

    def close(self) -> None:
        """Stop the downloads and close the files. What is still to be read opens them again, but downloads nothing."""
        with self._starting:
            self._closed = True
        self._files.close()
        if self._ahead is not None:
            self._ahead.close()
        if self._holder is not None:
            self._holder.close()

    def _let_go(self, pieces: Iterable[Piece]) -> None:
        """The cache may have them, and is told when they are read again."""
        if self._ahead is None or self._holder is None:
            return
        wanted_in = {path: self._ahead.wanted_in(piece) for piece in pieces if (path := self._held.pop(piece, None))}
        if wanted_in:
            self._dataset.cache.ledger.release(wanted_in, self._holder)

    def _file(self, piece: Piece) -> BinaryIO:
        return self._files.get(piece) or self._files.add(piece, self._open(piece))

    def _open(self, piece: Piece) -> BinaryIO:
        place = self._dataset.shards[piece.shard]
        remote = is_remote(place)
        for _ in range(OPENS if remote else 1):
            with suppress(FileNotFoundError):
                return self._fetch(piece) if remote else open(place, "rb")
        if remote:
            raise InputError(f"the cache is too small to hold {place} until it is opened: raise data.cache_gib")
        raise InputError(f"{place} is missing: run `python shard_tools/check_shards.py` on its folder")

    def _fetch(self, piece: Piece, *, fresh: bool = False, ahead: bool = False) -> BinaryIO:
        """A piece of an object store."""
        file = self._dataset.cache.open(
            self._dataset.shards[piece.shard],
            version=self._dataset.info.shards[piece.shard].sha256,
            size=self._pieces.num_bytes(piece),
            start=None if piece.sample is None else self._dataset.samples[piece.sample].offset,
            fresh=fresh,
            given_up=lambda: self._closed,
            holder=self._expecting(),
            ahead=ahead,
        )
        if self._holder:
            self._held[piece] = Path(file.name)
            if self._ahead and not self._ahead.expects(piece):  # a replacement, or it is behind already
                self._let_go([piece])
        return file

    def _fetch_ahead(self, piece: Piece) -> None:
        self._fetch(piece, ahead=True).close()

    def _expecting(self) -> Holder | None:
        """Who expects what is fetched now; None: nobody for longer than that takes."""
        with self._starting:
            if self._ahead and not self._holder and not self._closed:
                self._holder = self._dataset.cache.ledger.holder()
            return self._holder


class OpenFiles:
    """The files of pieces, open to be read; safe to use from many threads.

    Those used last stay open, half of what the process may have. A file that is let go is closed when its last reader
    is done with it.
    """

    def __init__(self, expected: Callable[[Piece], bool], most_removed: int) -> None:
        """`most_removed`: bytes of files that the cache has removed and that stay open all the same."""
        self._expected, self._most_removed = expected, most_removed
        self._most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 8192) // 2
        self._files: OrderedDict[Piece, BinaryIO] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    def get(self, piece: Piece) -> BinaryIO | None:
        with self._lock:
            if piece in self._files:
                self._files.move_to_end(piece)
            return self._files.get(piece)

    def add(self, piece: Piece, file: BinaryIO) -> BinaryIO:
        """Keep a file, and let go of those that have been removed, whose room the disk does not get back else.

        What will be read yet stays, of that what was used last: of a cache that is too small for the shards that clips
        are taken from in turns, it would be downloaded for every clip.
        """
        with self._lock:
            states = [(kept, os.fstat(opened.fileno())) for kept, opened in reversed(self._files.items())]
            room = self._most_removed
            for other, state in states:
                if state.st_nlink:
                    continue
                if self._expected(other) and state.st_size <= room:
                    room -= state.st_size
                else:
                    del self._files[other]
            while len(self._files) >= self._most:
                self._files.popitem(last=False)
            return self._files.setdefault(piece, file)

    def close(self) -> None:
        with self._lock:
            self._files.clear()
