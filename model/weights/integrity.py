"""Tells damaged weights: hashes of tensors, and of the files of a checkpoint."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from adamae.common.atomic_io import hash_file
from adamae.common.errors import InputError

# In a checkpoint: what is known of it, with the hash of each other file. See training.checkpoint.
STATE_FILE = "train_state.json"
# The name of the hash in the metadata of a safetensors file.
HASH = "sha256"


class CheckpointHashes(msgspec.Struct):
    """What train_state.json says of the other files of a checkpoint."""

    sha256: dict[str, str]


def hash_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Compute the SHA-256 of tensors and metadata, which depends on neither order nor device."""
    names = sorted(tensors)
    # Hashing releases the GIL. It takes a second per GB where CPUs have instructions for it, else
    # four.
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = list(pool.map(_hash_tensor, (tensors[name] for name in names)))
    description = {"tensors": dict(zip(names, digests, strict=True))}
    description["metadata"] = dict(metadata or {})
    # It does not describe itself.
    description["metadata"].pop(HASH, None)
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _hash_tensor(value: Tensor) -> str:
    digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    on_cpu = value.detach().cpu().contiguous()
    # NumPy has no bf16.
    as_bytes = on_cpu.reshape(-1).view(torch.uint8)
    digest.update(as_bytes.numpy().data)
    return digest.hexdigest()


def check_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Raise InputError if tensors or metadata of a file do not have the hash that it names.

    Files of other projects name none.
    """
    expected = metadata.get(HASH)
    if expected is not None and hash_tensors(tensors, metadata) != expected:
        raise InputError(
            f"{file} is damaged (its tensors or metadata do not have the hash that it names): take"
            " another copy, or export it again"
        )


def check_checkpoint_file(file: Path) -> None:
    """Raise InputError if a file in a checkpoint has another hash than train_state.json says."""
    state_file = file.with_name(STATE_FILE)
    if not state_file.is_file():
        return
    try:
        hashes = msgspec.json.decode(state_file.read_bytes(), type=CheckpointHashes).sha256
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError(
            f"{state_file} is damaged ({error}): take another checkpoint of the run, or another"
            " copy"
        ) from error
    expected = hashes.get(file.name)
    if expected is None or hash_file(file) != expected:
        raise InputError(
            f"{file} is damaged (its hash is not the one in {STATE_FILE}): take another checkpoint"
            " of the run, or another copy"
        )
