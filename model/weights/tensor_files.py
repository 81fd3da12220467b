"""Reads and writes files of weights, safetensors and PyTorch's; files may be damaged or malicious.

What comes out are named, dense, finite tensors that take no more memory than the file does; no code in a file is run.
"""

import argparse
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from adamae.common.errors import InputError
from adamae.model.state_dict import StateDict

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# In what PyTorch wrote before 1.6: bytes at a file's start, before the numbers.
MAX_LEGACY_PICKLE = 2**24
# What torch.compile and DistributedDataParallel put before every name.
PREFIXES = re.compile(r"^((_orig_mod|module)\.)+")


def read_state_dict(file: Path) -> tuple[StateDict, dict[str, str]]:
    """Read the tensors of a safetensors or PyTorch file, without wrappers, and the former's metadata, on the CPU.

    Raise InputError if the file is damaged, or holds anything else than weights.
    """
    is_safetensors = file.suffix == ".safetensors"
    metadata = read_metadata(file) if is_safetensors else {}
    with _explain_damage(file):
        contents: Any = load_file(file) if is_safetensors else _read_pytorch(file)
    tensors = _unwrap(contents, file)
    for name, value in tensors.items():
        fault = _describe_fault(value)
        if fault:
            raise InputError(f"{file} cannot be used: {name} {fault}")
    state = _strip_prefixes(tensors, file)
    if sum(value.nbytes for value in state.values()) > file.stat().st_size:
        raise InputError(
            f"{file} cannot be used: its tensors share memory, and are larger than the file is"
        )
    return state, metadata


def read_shapes(file: Path) -> StateDict:
    """Read names and shapes of the tensors of a safetensors or PyTorch file, as tensors on the meta device.

    Their numbers are neither read nor checked, except in what PyTorch wrote before 1.6. Raise InputError if the file is
    damaged, or holds anything else than weights.
    """
    with _explain_damage(file):
        if file.suffix == ".safetensors":
            contents: Any = _read_header(file)
        else:
            contents = _read_pytorch(file, mmap=zipfile.is_zipfile(file))
    tensors = _unwrap(contents, file)
    for name, value in tensors.items():
        fault = _describe_structure_fault(value)
        if fault:
            raise InputError(f"{file} cannot be used: {name} {fault}")
    shapes = {name: torch.empty(value.shape, device="meta") for name, value in tensors.items()}
    return _strip_prefixes(shapes, file)


def _read_header(file: Path) -> StateDict:
    """Read the header of a safetensors file as tensors of zeros, all of which are views of a single one."""
    tensors: StateDict = {}
    # For PyTorch, the whole file would be mapped as writable memory, which a machine with less refuses.
    with safe_open(file, framework="np") as opened:
        for name in opened.keys():  # noqa: SIM118  # it is no mapping
            entry = opened.get_slice(name)
            # Which type of float it is makes no difference to the shape.
            dtype = torch.int64 if entry.get_dtype() == "I64" else torch.float32
            tensors[name] = torch.zeros((), dtype=dtype).expand(entry.get_shape())
    return tensors


@contextmanager
def _explain_damage(file: Path) -> Iterator[None]:
    """Turn what is raised by reading a file of tensors into an InputError."""
    try:
        yield
    except UnpicklingError as error:
        # Its own text explains how to run the code in the file.
        reason = "it is damaged, or holds objects besides tensors, which might be code"
        raise InputError(f"{file} cannot be read as weights: {reason}") from error
    except Exception as error:
        # A damaged pickle raises whatever its bytes lead to.
        raise InputError(f"{file} cannot be read as weights: {_first_line(error)}") from error


def _unwrap(contents: Any, file: Path) -> StateDict:
    """Return the tensors that lie alone in a file or under `model`, `module` or `state_dict`, by name."""
    for wrapper in ("model", "module", "state_dict"):
        if isinstance(contents, dict) and isinstance(contents.get(wrapper), dict):
            contents = contents[wrapper]
    is_state_dict = isinstance(contents, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in contents.items()
    )
    if not is_state_dict:
        raise InputError(
            f"{file} is no state dict: give a file of named tensors, alone or under `model` or `module`"
        )
    return contents


def _strip_prefixes(tensors: StateDict, file: Path) -> StateDict:
    """Remove the prefixes of wrappers from names: `module.encoder.norm.weight` becomes `encoder.norm.weight`."""
    state: StateDict = {}
    for prefixed, value in tensors.items():
        name = PREFIXES.sub("", prefixed)
        if name in state:
            raise InputError(
                f"{file} cannot be used: it holds {name} twice, with and without a prefix"
            )
        state[name] = value
    return state


def read_metadata(file: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file; raises InputError."""
    try:
        with safe_open(file, framework="np") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} cannot be read as weights: {_first_line(error)}") from error


def read_json(source: str | Path, where: Path, kind: Any) -> Any:
    """Parse JSON of this type, text inside weights or a file beside them; raises InputError."""
    try:
        text = (
            source
            if isinstance(source, str)
            else source.read_text(encoding="utf-8", errors="replace")
        )
        return msgspec.convert(json.loads(text), kind)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise InputError(f"{where} is damaged ({_first_line(error)}): take another copy") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, the same bytes for the same contents: safetensors varies the order of the metadata from
    process to process, so it is sorted here. Raises OSError where the disk fails."""
    data = memoryview(
        save({name: value.contiguous() for name, value in tensors.items()}, dict(metadata))
    )
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:end]))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.writelines((data[:8], text.ljust(end - 8), data[end:]))


def save_pickle(path: Path, value: Any) -> None:
    """Write a file in PyTorch's format; raises OSError where the disk fails, which PyTorch hides as well."""
    with path.open("wb") as file:  # of a path, the name would be written into the file
        try:
            torch.save(value, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _read_pytorch(file: Path, mmap: bool = False) -> Any:
    """Unpickle tensors, and the command line that the authors' files hold, but nothing that grows when it is read.

    PyTorch neither compresses its zip files nor puts a bytearray into them, which torch.load makes as large as it is
    told to, 3 GiB from 400 bytes. mmap: leave numbers in the file until they are used.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as opened:
            if sum(part.file_size for part in opened.infolist()) > file.stat().st_size:
                raise ValueError("it is compressed, or its parts overlap")
            pickled = b"".join(
                opened.read(name) for name in opened.namelist() if name.endswith(".pkl")
            )
    else:
        with file.open("rb") as legacy:
            pickled = legacy.read(MAX_LEGACY_PICKLE)
    if b"bytearray" in pickled:
        raise ValueError("it holds objects besides tensors")
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def _describe_fault(value: Tensor) -> str:
    """Describe what keeps a tensor from being weights; "" if nothing does."""
    fault = _describe_structure_fault(value)
    if fault:
        return fault
    if value.nbytes > value.untyped_storage().nbytes():
        return f"has the shape {tuple(value.shape)}, for which the file holds too few numbers"
    if not all(bound.isfinite() for bound in value.aminmax()):
        return "holds NaN or infinity: its training has diverged, or the file is damaged"
    return ""


def _describe_structure_fault(value: Tensor) -> str:
    """Describe what keeps a tensor from being weights besides its numbers; "" if nothing does."""
    if (
        value.layout != torch.strided
        or value.is_quantized
        or value.is_nested
        or value.device.type != "cpu"
    ):
        return "is sparse, quantized, nested or empty: save it as a dense tensor of float32"
    # How many batches a BatchNorm has seen is an integer.
    if value.dtype == torch.int64 and value.dim() == 0:
        return ""
    if value.dtype not in FLOATS:
        return f"is of {str(value.dtype).removeprefix('torch.')}: save it as float32, float16 or bfloat16"
    if value.dim() == 0 or value.numel() == 0:
        return f"has the shape {tuple(value.shape)}, which no weights have"
    return ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
