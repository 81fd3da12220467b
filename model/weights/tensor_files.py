"""Reads and writes files of weights, safetensors and PyTorch's; files may be damaged or malicious.

What comes out are named, dense, finite tensors that take no more memory than the file does. No code
in a file is run.
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
from adamae.model.weights.integrity import check_checkpoint_file, check_tensors

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# In what PyTorch wrote before 1.6: bytes at a file's start, before the numbers.
MAX_LEGACY_PICKLE = 2**24
# Under what files have their weights: `model` and the like alone, and the others beside optimizers
# and further networks (V-JEPA 2). Of several, the first is taken: the average over the training.
WRAPPERS = ("model", "module", "state_dict", "ema_encoder", "target_encoder", "encoder")
# What torch.compile, DistributedDataParallel, FSDP and activation checkpointing put into names,
# where they wrap a module.
MODULE_WRAPPERS = re.compile(
    r"(^|(?<=\.))(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)


def read_state_dict(file: Path) -> tuple[StateDict, dict[str, str]]:
    """Read the tensors of a file, on the CPU, and its metadata, which safetensors alone have.

    Names lose the prefixes of wrappers. Raise InputError if the file is damaged, or holds anything
    else than weights. Hashes tell damage in checkpoints and in safetensors that `pretrained.save`
    has written, checksums in PyTorch's files.
    """
    check_checkpoint_file(file)
    is_safetensors = file.suffix == ".safetensors"
    metadata = read_metadata(file) if is_safetensors else {}
    with _explain_damage(file):
        if not is_safetensors:
            _check_parts(file)
        contents: Any = load_file(file) if is_safetensors else _read_pytorch(file)
    tensors = _unwrap(contents, file)
    check_tensors(file, tensors, metadata)
    for name, value in tensors.items():
        fault = _describe_fault(value)
        if fault:
            raise InputError(f"{file} cannot be used: {name} {fault}")
    state = _strip_prefixes(tensors, file)
    num_bytes = sum(value.nbytes for value in state.values())
    if num_bytes > file.stat().st_size:
        raise InputError(
            f"{file} cannot be used: its tensors share memory, and are larger than the file is"
        )
    return state, metadata


def read_shapes(file: Path) -> StateDict:
    """Read names and shapes of the tensors of a file, as tensors on the meta device.

    Their numbers are neither read nor checked, except in what PyTorch wrote before 1.6. Raise
    InputError if the file is damaged, or holds anything else than weights.
    """
    with _explain_damage(file):
        if file.suffix == ".safetensors":
            contents: Any = _read_header(file)
        else:
            contents = _read_pytorch(file)
    tensors = _unwrap(contents, file)
    for name, value in tensors.items():
        fault = _describe_structure_fault(value)
        if fault:
            raise InputError(f"{file} cannot be used: {name} {fault}")
    shapes = {name: torch.empty(value.shape, device="meta") for name, value in tensors.items()}
    return _strip_prefixes(shapes, file)


def _read_header(file: Path) -> StateDict:
    """Read the header of a safetensors file, as tensors that all are views of a single zero."""
    tensors: StateDict = {}
    # For PyTorch, the whole file would be mapped as writable memory, which a machine with less
    # refuses.
    with safe_open(file, framework="np") as opened:
        # It is no mapping, and cannot be iterated over.
        for name in opened.keys():  # noqa: SIM118
            entry = opened.get_slice(name)
            # Which type of float it is makes no difference to the shape.
            dtype = torch.int64 if entry.get_dtype() == "I64" else torch.float32
            zero = torch.zeros((), dtype=dtype, device="cpu")
            tensors[name] = zero.expand(entry.get_shape())
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
        raise InputError(f"{file} cannot be read as weights: {first_line(error)}") from error


def _unwrap(contents: Any, file: Path) -> StateDict:
    """Return the tensors of a file, by name, alone or under one of WRAPPERS."""
    for wrapper in WRAPPERS:
        if isinstance(contents, dict) and isinstance(contents.get(wrapper), dict):
            contents = contents[wrapper]
    if isinstance(contents, dict):
        has_names = all(isinstance(name, str) for name in contents)
        if has_names and all(isinstance(value, Tensor) for value in contents.values()):
            return contents
    raise InputError(
        f"{file} is no state dict: give a file of named tensors, alone or under `model` or `module`"
    )


def _strip_prefixes(tensors: StateDict, file: Path) -> StateDict:
    """Remove wrappers: `module.encoder._orig_mod.norm.weight` becomes `encoder.norm.weight`."""
    state: StateDict = {}
    for prefixed, value in tensors.items():
        name = MODULE_WRAPPERS.sub("", prefixed)
        if name in state:
            raise InputError(
                f"{file} cannot be used: it holds {name} twice, with and without a prefix"
            )
        state[name] = value
    return state


def read_metadata(file: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file; raise InputError if it cannot be read."""
    try:
        with safe_open(file, framework="np") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} cannot be read as weights: {first_line(error)}") from error


def read_json(source: str | Path, where: Path, kind: Any) -> Any:
    """Parse JSON of a type, a text inside weights or a file beside them.

    Raise InputError if it is damaged, which names `where`.
    """
    try:
        if isinstance(source, Path):
            source = source.read_text(encoding="utf-8", errors="replace")
        return msgspec.convert(json.loads(source), kind)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise InputError(f"{where} is damaged ({first_line(error)}): take another copy") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, equal bytes for equal contents; raise OSError if the disk fails."""
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    data = memoryview(save(contiguous, dict(metadata)))
    # A file is the header's size in 8 bytes, the header as JSON, padded with spaces, and the
    # tensors.
    size = data[:8]
    end = 8 + int.from_bytes(size, "little")
    header = json.loads(bytes(data[8:end]))
    # safetensors varies the order of the metadata from process to process.
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(size)
        file.write(text.ljust(end - 8))
        file.write(data[end:])


def save_pickle(path: Path, value: Any) -> None:
    """Write a file in PyTorch's format; raise OSError if the disk fails."""
    # An open file: of a path, PyTorch would write the name into the file.
    with path.open("wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            # PyTorch hides what the disk reports behind an error of its own.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _check_parts(file: Path) -> None:
    """Raise ValueError if a part of a PyTorch file has another checksum than it says.

    torch.load compares none. Files from before PyTorch 1.6 have none.
    """
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as opened:
        damaged_part = opened.testzip()
    if damaged_part is not None:
        raise ValueError(f"it is damaged: the checksum of {damaged_part} differs")


def _read_pytorch(file: Path) -> Any:
    """Unpickle tensors, and the command line that the authors' files hold, but nothing that grows.

    A file of 400 bytes can ask torch.load for a bytearray of 3 GiB, and a compressed one for more;
    PyTorch itself writes neither. Numbers stay in the file until they are used: optimizers and
    other networks beside the weights would fill the memory. Raise ValueError if the file holds such
    things, and whatever torch.load raises if it is damaged.
    """
    is_zip = zipfile.is_zipfile(file)
    if is_zip:
        with zipfile.ZipFile(file) as opened:
            unpacked_size = sum(part.file_size for part in opened.infolist())
            if unpacked_size > file.stat().st_size:
                raise ValueError("it is compressed, or its parts overlap")
            pickled = b""
            for name in opened.namelist():
                if name.endswith(".pkl"):
                    pickled += opened.read(name)
    else:
        with file.open("rb") as legacy:
            pickled = legacy.read(MAX_LEGACY_PICKLE)
    if b"bytearray" in pickled:
        raise ValueError("it holds objects besides tensors")
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)


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
    is_dense = value.layout == torch.strided and not value.is_quantized and not value.is_nested
    if not is_dense or value.device.type != "cpu":
        return "is sparse, quantized, nested or empty: save it as a dense tensor of float32"
    # How many batches a BatchNorm has seen is an integer.
    if value.dtype == torch.int64 and value.dim() == 0:
        return ""
    if value.dtype not in FLOATS:
        dtype = str(value.dtype).removeprefix("torch.")
        return f"is of {dtype}: save it as float32, float16 or bfloat16"
    if value.dim() == 0 or value.numel() == 0:
        return f"has the shape {tuple(value.shape)}, which no weights have"
    return ""


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type if there is none."""
    lines = str(error).splitlines()
    if lines and lines[0]:
        return lines[0]
    return type(error).__name__
