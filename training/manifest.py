"""`train_state.json`, the last file of a checkpoint: where the run was, and the hashes of the other files."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "train_state.json"
MAX_BYTES = 2**20  # ours have some hundred


@dataclass(frozen=True)
class TrainState:
    """Where a run is, and in what."""

    step: int  # optimizer steps done
    global_batch: int  # clips of the global stream per step
    videos: str  # ShardDataset.digest
    execution: str = ""  # of a deterministic run, what decides about the last bits (training/numerics.py)


@dataclass(frozen=True)
class Manifest:
    """What `train_state.json` says."""

    place: TrainState
    sha256: dict[str, str]  # of the checkpoint's other files, by name

    @classmethod
    def read(cls, checkpoint: Path) -> "Manifest":
        """That of a checkpoint's folder. Raises ValueError or OSError, with a reason, where it is not one of ours."""
        file = checkpoint / FILE
        if not checkpoint.is_dir():
            raise ValueError("it is no folder")
        if not file.is_file():
            raise ValueError("it has no train_state.json")
        if file.stat().st_size > MAX_BYTES:
            raise ValueError("its train_state.json is far too large")
        return cls.parse(file.read_bytes())

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        """Raises ValueError where `data` is not what a train_state.json holds."""
        try:
            described = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its train_state.json is no JSON: {error}") from error
        place, digests = _field(described, "place", dict), _field(described, "sha256", dict)
        for name, digest in digests.items():
            if Path(name).name != name or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"sha256 in its train_state.json says {digest!r} of {name!r}"[:200])
        counts = {name: _field(place, name, int) for name in ("step", "global_batch")}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} in its train_state.json is {count}")
        execution = _field(place, "execution", str) if "execution" in place else ""  # before there was such a thing
        return cls(TrainState(**counts, videos=_field(place, "videos", str), execution=execution), digests)


def _field(values: Any, name: str, kind: type) -> Any:
    if not isinstance(values, dict) or name not in values:
        raise ValueError(f"its train_state.json does not say {name}")
    if type(values[name]) is not kind:  # bool is an int to isinstance
        raise ValueError(f"{name} in its train_state.json is {values[name]!r}"[:200])
    return values[name]
