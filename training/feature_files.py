"""Write and read the features of videos: a file per video, or tars of many.

XXH3 tells damage, of which it misses one case in 2^64, at the speed of memory. A CRC-32 would take
longer than a search by these features.
"""

import io
import json
import sys
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Protocol, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from adamae.common.atomic_io import atomic_write
from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.common.logging import log, printable
from adamae.model.weights.tensor_files import first_line, save_tensors
from adamae.pipeline.reading.storage import ObjectStore
from adamae.shard_tools.inputs.location import import_pyarrow
from adamae.shard_tools.plan import make_key
from adamae.shard_tools.write import Members, list_members
from adamae.training.feature_settings import FILE as SETTINGS_FILE
from adamae.training.feature_settings import write_settings
from adamae.training.video_windows import ListedVideo

# Limits of a tar, as the videos of an unfinished one are encoded again after a kill.
MAX_VIDEOS = 1000
MAX_BYTES = 256e6
# At a time, into object storage.
MAX_UPLOADS = 8
# The name of the checksums in the metadata of a video.
CHECKSUMS = "xxh3"
# The arrays that every video has.
NAMES = ("features", "frames", "times")
Arrays = dict[str, np.ndarray]


class WindowArrays:
    """The arrays of a video's windows, concatenated as they come.

    Kept as a list, the small arrays that stay between large ones that go would fragment memory, by
    2 GB per hour; so each array grows in one buffer.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, bytearray] = {}
        # An empty array for each name, with the type and shape of one window.
        self._examples: Arrays = {}

    def __len__(self) -> int:
        """Return the number of arrays per window, 0 before the first window."""
        return len(self._buffers)

    def append(self, window: Arrays) -> None:
        """Add the arrays of the next window, which have the same names and shapes every time."""
        for name, values in window.items():
            if name not in self._buffers:
                self._buffers[name] = bytearray()
                self._examples[name] = np.empty_like(values)
            self._buffers[name].extend(values.tobytes())

    def stack(self) -> Arrays:
        """Return the arrays of all windows, each with a leading axis of windows, without a copy."""
        stacked = {}
        for name, buffer in self._buffers.items():
            example = self._examples[name]
            stacked[name] = np.frombuffer(buffer, example.dtype).reshape(-1, *example.shape)
        return stacked


class FeatureWriter(Protocol):
    """One way to store the features of videos, used as a context manager."""

    def begin(self, settings: dict[str, Any]) -> None:
        """Write features.json; raise InputError if OUT was begun with other settings."""

    def has(self, video: ListedVideo) -> bool:
        """Return whether an earlier run has stored the features of a video."""

    def write(self, video: ListedVideo, arrays: Arrays) -> None:
        """Store the arrays of a video: features, frames and times, and tokens if asked for."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_writer(kind: str, output: str | Path, part: int, num_parts: int) -> FeatureWriter:
    """Return the writer of a format into a folder or to a URL.

    Raise InputError if the package that it needs is missing, or tars are to be written to a URL.
    """
    if kind == "webdataset":
        if is_remote(output):
            raise InputError(
                f"--format webdataset writes to a folder on this node, and {output} is a URL:"
                " choose safetensors or parquet, or copy the folder later"
            )
        return FeatureTars(Path(output), part, num_parts)
    if kind == "parquet":
        import_pyarrow("OUT")
    if is_remote(output):
        return RemoteFeatureFiles(str(output), kind)
    return FeatureFiles(Path(output), kind)


class FeatureFiles:
    """Writes a file per video, named by its key; see FeatureWriter."""

    def __init__(self, output: Path, kind: str) -> None:
        """Write to the folder `output`; kind: safetensors or parquet."""
        self._output = output
        self._kind = kind

    def begin(self, settings: dict[str, Any]) -> None:
        write_settings(self._output, settings)

    def has(self, video: ListedVideo) -> bool:
        file = self._find_file(video)
        if not file.exists():
            return False
        if self._is_whole(file):
            return True
        log(f"{printable(str(file))} is damaged: its video is encoded again", sys.stderr)
        return False

    def _is_whole(self, file: Path) -> bool:
        """Return whether a file has its header and its full length, without reading all of it."""
        try:
            if self._kind == "parquet":
                import_pyarrow("OUT").ParquetFile(file).close()
            else:
                with safe_open(file, "np"):
                    pass
        # Errors of pyarrow are ValueErrors.
        except (OSError, SafetensorError, ValueError):
            return False
        return True

    def write(self, video: ListedVideo, arrays: Arrays) -> None:
        file = self._find_file(video)
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata = describe(video)
        metadata["fields"] = json.dumps(video.fields)
        with atomic_write(file) as partial_file:
            if self._kind == "parquet":
                save_parquet(partial_file, arrays, metadata)
            else:
                tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
                # The header of safetensors holds strings alone.
                strings = {name: str(value) for name, value in metadata.items()}
                strings[CHECKSUMS] = json.dumps(compute_checksums(arrays, strings))
                save_tensors(partial_file, tensors, strings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: each file is complete when it has its name."""

    def _find_file(self, video: ListedVideo) -> Path:
        return self._output / self._name(video)

    def _name(self, video: ListedVideo) -> str:
        return f"{video.key}.{self._kind}"


class RemoteFeatureFiles(FeatureFiles):
    """Uploads each file as soon as it is written, so that a node that is lost loses none.

    Object storage shows files when they are complete: those that are there are not read again.
    """

    def __init__(self, url: str, kind: str) -> None:
        """url: where the files go; kind: safetensors or parquet."""
        self._scratch = TemporaryDirectory()
        super().__init__(Path(self._scratch.name), kind)
        self._store = ObjectStore(url)
        self._stored = self._store.sizes()
        # Uploads run beside the encoder, which an answer of the store would keep waiting.
        self._pool = ThreadPoolExecutor(MAX_UPLOADS)
        self._uploads: deque[Future[None]] = deque()

    def begin(self, settings: dict[str, Any]) -> None:
        file = self._output / SETTINGS_FILE
        if SETTINGS_FILE in self._stored:
            self._store.download(SETTINGS_FILE, file)
        write_settings(self._output, settings)
        if SETTINGS_FILE not in self._stored:
            self._store.upload(file, SETTINGS_FILE)

    def has(self, video: ListedVideo) -> bool:
        return self._name(video) in self._stored

    def write(self, video: ListedVideo, arrays: Arrays) -> None:
        super().write(video, arrays)
        self._uploads.append(self._pool.submit(self._upload, self._name(video)))
        if len(self._uploads) > MAX_UPLOADS:
            # Raises the error of one that has failed.
            self._uploads.popleft().result()

    def _upload(self, name: str) -> None:
        file = self._output / name
        self._store.upload(file, name)
        file.unlink()

    def __exit__(self, *error: object) -> None:
        """Wait for the uploads, also where a run is stopped between two videos."""
        with self._scratch, self._pool:
            for upload in self._uploads:
                upload.result()


class FeatureTars:
    """Writes tars of many videos by webdataset's ShardWriter; see FeatureWriter.

    A video is the members <key>.<array>.npy and <key>.json. For webdataset the key of a sample ends
    at its first dot, so make_key changes the key, and the JSON has the original. A tar has a
    temporary name until it is complete.
    """

    def __init__(self, output: Path, part: int, num_parts: int) -> None:
        """Write to the folder `output`.

        Processes that run side by side write one part each, from 1 to num_parts, to its own tars.
        """
        self._output = output
        self._stem = f"features-{part}-of-{num_parts}"
        self._written_keys: set[str] = set()
        # Closes the tar that is being written.
        self._files = ExitStack()
        self._is_writing = False
        self._shards: Any = None

    def begin(self, settings: dict[str, Any]) -> None:
        write_settings(self._output, settings)

    def has(self, video: ListedVideo) -> bool:
        return make_key(video.key) in self._written_keys

    def write(self, video: ListedVideo, arrays: Arrays) -> None:
        if self._shards is None:
            self._shards = self._open_shards()
        metadata = describe(video)
        metadata[CHECKSUMS] = compute_checksums(arrays, metadata)
        sample: dict[str, Any] = {"__key__": make_key(video.key), "json": metadata}
        for name, array in arrays.items():
            sample[f"{name}.npy"] = array
        self._is_writing = True
        self._shards.write(sample)
        self._is_writing = False

    def __enter__(self) -> Self:
        # A run that was killed has left its last tar.
        for file in self._output.glob(f".{self._stem}-*.partial"):
            file.unlink()
        for tar in self._output.glob("*.tar"):
            try:
                members = list_whole_tar(tar)
            except tarfile.TarError:
                log(f"{printable(str(tar))} is damaged: its videos are encoded again", sys.stderr)
                tar.unlink()
                continue
            self._written_keys.update(name.partition(".")[0] for name in members)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the last tar, also where a run is stopped between two videos.

        Drop a tar in which a video has been written in part.
        """
        if self._is_writing:
            self._files.__exit__(kind, error, trace)
        elif self._shards is not None:
            self._shards.close()

    def _open_shards(self) -> Any:
        # The import takes half a second, and only this format needs it.
        import webdataset

        tars = self._output.glob(f"{self._stem}-*.tar")
        numbers = [int(tar.stem.rpartition("-")[2]) for tar in tars]
        return webdataset.ShardWriter(
            f"{self._stem}-%06d.tar",
            maxcount=MAX_VIDEOS,
            maxsize=MAX_BYTES,
            post=self._finish_tar,
            start_shard=max(numbers, default=-1) + 1,
            verbose=0,
            opener=self._open_tar,
            mtime=0,
        )

    def _open_tar(self, name: str) -> BinaryIO:
        partial_file = self._files.enter_context(atomic_write(self._output / name))
        return self._files.enter_context(partial_file.open("wb"))

    def _finish_tar(self, name: str) -> None:
        """Close the tar, for which atomic_write gives it its name."""
        self._files.close()


def describe(video: ListedVideo) -> dict[str, Any]:
    """Return the metadata that are stored beside a video's features."""
    return {
        "key": video.key,
        "source": video.source,
        "segment": video.segment,
        "offset": video.offset,
        "label": video.label,
        "incomplete": video.incomplete,
        "episode": str(video.fields.get("episode", "")),
        "fields": video.fields,
    }


def save_parquet(path: Path, arrays: Arrays, metadata: dict[str, Any]) -> None:
    """Write a row per window, with the metadata in each.

    arrays: features [W, D], and the first and last frame and time of each window, frames [W, 2] and
    times [W, 2].
    """
    parquet = import_pyarrow(str(path))
    import pyarrow

    features = arrays["features"]
    columns: dict[str, Any] = {}
    for name, value in metadata.items():
        columns[name] = [value] * len(features)
    columns["first_frame"], columns["last_frame"] = arrays["frames"].T
    columns["start"], columns["end"] = arrays["times"].T
    columns["features"] = pyarrow.FixedSizeListArray.from_arrays(
        pyarrow.array(features.ravel()), features.shape[1]
    )
    # Readers compare the checksums with page_checksum_verification=True.
    parquet.write_table(pyarrow.table(columns), path, write_page_checksum=True)


def list_whole_tar(tar: Path) -> Members:
    """List the members of a tar; raise tarfile.TarError if it is damaged."""
    members = list_members(tar)
    end = max((offset + size for offset, size in members.values()), default=0)
    with tar.open("rb") as file:
        file.seek(end)
        # Blocks of zeros end a tar. At a damaged header tarfile stops without a word.
        if any(file.read()):
            raise tarfile.ReadError("a header is damaged")
    return members


def compute_checksums(arrays: Arrays, metadata: dict[str, Any]) -> dict[str, int]:
    """Compute the XXH3 of each array, with its type and shape, and of the metadata.

    There is one for each, so that features can be read without the tokens beside them.
    """
    described = dict(metadata)
    # They do not describe themselves.
    described.pop(CHECKSUMS, None)
    text = json.dumps(described, sort_keys=True)
    checksums = {"": xxh3_64_intdigest(text.encode())}
    for name, array in arrays.items():
        digest = xxh3_64(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
        checksums[name] = digest.intdigest()
    return checksums


class StoredFeatures(NamedTuple):
    """The features of a video, as they were written."""

    # The video's own file, or a tar of many videos.
    file: Path
    metadata: dict[str, Any]
    features: Float[Tensor, "W D"]
    # Of the first and the last frame of each window.
    frames: Int[np.ndarray, "W 2"]
    times: Float[np.ndarray, "W 2"]


def list_feature_files(folder: Path) -> list[Path]:
    """List the files of features in a folder; raise InputError if there are none."""
    files = [*sorted(folder.rglob("*.safetensors")), *sorted(folder.rglob("*.tar"))]
    if not files:
        raise InputError(
            f"{folder} has no features as safetensors or for webdataset: run extract_features.py"
            " without --format parquet"
        )
    return files


def read_feature_files(path: Path) -> Iterator[StoredFeatures]:
    """Yield the features that extract_features.py has written as safetensors or for webdataset.

    path: their folder, or one file. Raise InputError if there is none, or one is damaged.
    """
    for file in list_feature_files(path) if path.is_dir() else [path]:
        try:
            if file.suffix == ".tar":
                yield from _read_tar(file)
            else:
                yield _read_safetensors(file)
        except OSError:
            raise
        # The readers of headers and of numpy's arrays raise whatever damaged bytes lead to.
        except Exception as error:
            reason = first_line(error)
            if isinstance(error, KeyError):
                reason = f"it has no {reason}"
            raise InputError(
                f"{file} is damaged ({reason}): remove it, and repeat the command that wrote it"
            ) from error


def _read_safetensors(file: Path) -> StoredFeatures:
    # For PyTorch the file is mapped, for NumPy it would be copied.
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() or {}
        arrays = {name: opened.get_tensor(name).numpy() for name in NAMES}
    return _check_features(file, metadata, json.loads(metadata[CHECKSUMS]), arrays)


def _read_tar(tar: Path) -> Iterator[StoredFeatures]:
    members = list_whole_tar(tar)
    with tar.open("rb") as file:

        def read(name: str) -> bytes:
            offset, size = members[name]
            file.seek(offset)
            return file.read(size)

        keys = dict.fromkeys(name.partition(".")[0] for name in members)
        for key in keys:
            metadata = json.loads(read(f"{key}.json"))
            arrays = {}
            for name in NAMES:
                content = io.BytesIO(read(f"{key}.{name}.npy"))
                arrays[name] = np.load(content, allow_pickle=False)
            yield _check_features(tar, metadata, metadata[CHECKSUMS], arrays)


def _check_features(
    file: Path, metadata: dict[str, Any], expected: dict[str, int], arrays: Arrays
) -> StoredFeatures:
    """Return what was read; raise ValueError if a checksum differs."""
    for name, checksum in compute_checksums(arrays, metadata).items():
        if expected[name] != checksum:
            raise ValueError(f"the checksum of its {name or 'metadata'} differs")
    features = torch.from_numpy(arrays["features"])
    return StoredFeatures(file, metadata, features, arrays["frames"], arrays["times"])
