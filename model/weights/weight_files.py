"""Reads and writes files of weights, safetensors and PyTorch's; files may be damaged or malicious.

What comes out are named, dense, finite tensors that take no more memory than the file does; no code in a file is run.
"""

import argparse
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from common.errors import InputError
from model.state_dict import StateDict

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_LEGACY_PICKLE = 2**24  # bytes at a file's start, before the numbers, in what PyTorch wrote before 1.6
PREFIXES = re.compile(r"^((_orig_mod|module)\.)+")  # of torch.compile and DistributedDataParallel, on every name


def read_state_dict(file: Path) -> tuple[StateDict, dict[str, str]]:
    """Read the tensors of a safetensors or PyTorch file, without wrappers, and the former's metadata, on the CPU.

    Raises InputError where the file is damaged, or holds anything else than weights.
    """
    is_safetensors = file.suffix == ".safetensors"
    metadata = read_metadata(file) if is_safetensors else {}
    try:
        raw: Any = load_file(file) if is_safetensors else _read_pytorch(file)
    except UnpicklingError as error:  # whose own text explains how to run the code in it
        reason = "it is damaged, or holds objects besides tensors, which might be code"
        raise InputError(f"{file} cannot be read as weights: {reason}") from error
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise InputError(f"{file} cannot be read as weights: {_first_line(error)}") from error
    for wrapper in ("model", "module", "state_dict"):
        if isinstance(raw, dict) and isinstance(raw.get(wrapper), dict):
            raw = raw[wrapper]
    if not isinstance(raw, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in raw.items()):
        raise InputError(f"{file} is no state dict: give a file of named tensors, alone or under `model` or `module`")
    state: StateDict = {}
    for name, value in raw.items():
        if fault := _describe_fault(value):
            raise InputError(f"{file} cannot be used: {name} {fault}")
        name = PREFIXES.sub("", name)
        if name in state:
            raise InputError(f"{file} cannot be used: it holds {name} twice, with and without a prefix")
        state[name] = value
    if sum(value.nbytes for value in state.values()) > file.stat().st_size:
        raise InputError(f"{file} cannot be used: its tensors share memory, and are larger than the file is")
    return state, metadata


def read_metadata(file: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file; raises InputError."""
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} cannot be read as weights: {_first_line(error)}") from error


def read_json(source: str | Path, where: Path, kind: Any) -> Any:
    """Parse JSON of this type, text inside weights or a file beside them; raises InputError."""
    try:
        text = source if isinstance(source, str) else source.read_text(encoding="utf-8", errors="replace")
        return msgspec.convert(json.loads(text), kind)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise InputError(f"{where} is damaged ({_first_line(error)}): take another copy") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, the same bytes for the same contents: safetensors varies the order of the metadata from
    process to process, so it is sorted here. Raises OSError where the disk fails."""
    data = memoryview(save({name: value.contiguous() for name, value in tensors.items()}, dict(metadata)))
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


def _read_pytorch(file: Path) -> Any:
    """Unpickle tensors, and the command line that the authors' files hold, but nothing that grows when it is read.

    PyTorch neither compresses its zip files nor puts a bytearray into them, which torch.load makes as large as it is
    told to, 3 GiB from 400 bytes.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as opened:
            if sum(part.file_size for part in opened.infolist()) > file.stat().st_size:
                raise ValueError("it is compressed, or its parts overlap")
            pickled = b"".join(opened.read(name) for name in opened.namelist() if name.endswith(".pkl"))
    else:
        with file.open("rb") as legacy:
            pickled = legacy.read(MAX_LEGACY_PICKLE)
    if b"bytearray" in pickled:
        raise ValueError("it holds objects besides tensors")
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(file, map_location="cpu", weights_only=True)


def _describe_fault(value: Tensor) -> str:
    """Describe what keeps a tensor from being weights; "" where nothing does."""
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.device.type != "cpu":
        return "is sparse, quantized, nested or empty: save it as a dense tensor of float32"
    if value.dtype == torch.int64 and value.dim() == 0:
        return ""  # how many batches a BatchNorm has seen
    if value.dtype not in FLOATS:
        return f"is of {str(value.dtype).removeprefix('torch.')}: save it as float32, float16 or bfloat16"
    if value.dim() == 0 or value.numel() == 0:
        return f"has the shape {tuple(value.shape)}, which no weights have"
    if value.nbytes > value.untyped_storage().nbytes():
        return f"has the shape {tuple(value.shape)}, for which the file holds too few numbers"
    if not all(bound.isfinite() for bound in value.aminmax()):
        return "holds NaN or infinity: its training has diverged, or the file is damaged"
    return ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
