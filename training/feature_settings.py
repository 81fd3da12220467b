"""What the features in a folder were made of and how: its features.json."""

import hashlib
import json
from pathlib import Path
from typing import Any

from adamae.common.atomic_io import remove_partials, write_json
from adamae.common.errors import InputError
from adamae.model.weights.tensor_files import read_json
from adamae.pipeline.shards.dataset import ShardDataset

FILE = "features.json"
# The hash of all other settings in the file.
HASH = "sha256"
# Where weights and videos were: they may have moved. What they are is in `weights` and `dataset`.
LOCATIONS = ("model", "input")


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write features.json, and remove what killed runs were writing in its folder.

    Raise InputError if the folder was begun with other settings.
    """
    file = folder / FILE
    # Features lie in folders below it, as their videos do.
    folder.mkdir(parents=True, exist_ok=True)
    remove_partials(folder)
    if not file.exists():
        write_json(file, settings | {HASH: hash_json(settings)})
        return
    # Nothing in the files of features says which settings they were made with.
    before = read_settings(folder)
    names = [name for name in settings | before if name not in LOCATIONS]
    changed = [name for name in names if before.get(name) != settings.get(name)]
    if changed:
        raise InputError(
            f"{folder} has features made with other settings ({', '.join(changed)}): choose another"
            " folder for these, or remove it"
        )


def read_settings(folder: Path) -> dict[str, Any]:
    """Read features.json; raise InputError if it is missing or damaged."""
    file = folder / FILE
    if not file.is_file():
        raise InputError(f"{folder} has no {FILE}: give a folder that extract_features.py has made")
    settings = read_json(file, file, dict[str, Any])
    expected = settings.pop(HASH, None)
    if hash_json(settings) != expected:
        raise InputError(
            f"{file} is damaged (it does not have the hash that it names): restore it, or extract"
            " the features again to another folder"
        )
    return settings


def hash_datasets(datasets: dict[str, ShardDataset]) -> str:
    """Compute the SHA-256 of shards by their prefixes; return "" for videos, of which may be more.

    Videos may be added to a folder, and the same command then extracts what is missing.
    """
    if not datasets:
        return ""
    return hash_json({prefix: dataset.digest for prefix, dataset in datasets.items()})


def hash_json(value: Any) -> str:
    """Compute the SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
