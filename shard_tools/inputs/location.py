"""Where the bytes of a video are: in a file, behind a URL, in a tar or in a cell of Parquet."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import msgspec

from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.pipeline.reading.storage import ObjectStore

# Characters of a suffix that a temporary copy keeps: the names of files are limited.
MAX_SUFFIX = 16


class TarMember(msgspec.Struct, frozen=True, tag="tar"):
    """A video in a tar: bytes in the middle of a file."""

    archive: str
    offset: int
    size: int
    name: str

    def read(self) -> bytes:
        """Return the bytes of the video."""
        with open(self.archive, "rb") as archive:
            archive.seek(self.offset)
            return archive.read(self.size)


class ParquetCell(msgspec.Struct, frozen=True, tag="parquet"):
    """A video in a table: a cell of a Parquet file. `row` counts within its row group."""

    archive: str
    row_group: int
    row: int
    column: str
    name: str

    def __str__(self) -> str:
        return self.name

    def read(self) -> bytes:
        """Return the bytes of the video.

        Only the pages of its column up to its row are decoded: a whole row group of videos may
        exceed memory.
        """
        file = import_pyarrow(self.archive).ParquetFile(self.archive)
        groups = [self.row_group]
        batches = file.iter_batches(batch_size=1, row_groups=groups, columns=[self.column])
        # A batch is a row, and those before this one are passed over.
        (batch,) = islice(batches, self.row, self.row + 1)
        (cell,) = batch.column(0).to_pylist()
        if isinstance(cell, dict):
            # Hugging Face's Video feature is {bytes, path}.
            cell = cell["bytes"]
        return cell or b""


# A string is a path or a URL.
Location = str | TarMember | ParquetCell


def import_pyarrow(where: str) -> Any:
    """Import pyarrow.parquet. Raise InputError, about `where`, if it is not installed."""
    try:
        # Imported late: it takes half a second, and only Parquet needs it.
        import pyarrow.parquet
    except ImportError as error:
        what = f"{where} is Parquet, which needs pyarrow"
        raise InputError(f"{what}: pip install pyarrow, or save it as CSV") from error
    return pyarrow.parquet


def open_location(location: Location) -> BinaryIO:
    """Open the bytes of `location`, of which only what is read is fetched from object storage."""
    if not isinstance(location, str):
        return io.BytesIO(location.read())
    if is_remote(location):
        return cast(BinaryIO, ObjectStore(location).open(""))
    return open(location, "rb")


@contextmanager
def local_copy(location: Location, folder: Path | None = None) -> Iterator[Path]:
    """Yield a local file with the bytes of `location`, or a temporary copy of them in `folder`.

    Raise StorageError if object storage fails, MissingFileError if it has no such file.
    """
    if isinstance(location, str) and not is_remote(location):
        yield Path(location)
        return
    name = location if isinstance(location, str) else location.name
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # A member's own name may be too long for a file, and FFmpeg looks at the extension alone.
        path = Path(scratch, "video").with_suffix(PurePosixPath(name).suffix[:MAX_SUFFIX])
        if isinstance(location, str):
            ObjectStore(location).fetch("", path)
        else:
            path.write_bytes(location.read())
        yield path
