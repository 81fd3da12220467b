"""Clips of shards for any training loop: PyTorch's, Lightning's, Hugging Face's."""

import inspect
from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.loader import Batch, ClipLoader
from adamae.pipeline.planning.plan import TrainingPlan
from adamae.pipeline.shards.dataset import ShardDataset


class ClipDataset(IterableDataset[Batch]):
    """Yields the batches that train.py gets, endlessly; `state_dict` and `load_state_dict` resume exactly.

    Rank and number of processes are torch.distributed's, once that is initialized. Reading and decoding have workers of
    their own, so give it to no DataLoader or to one with `batch_size=None, num_workers=0`.
    """

    def __init__(
        self,
        shards: str | Path,
        *,
        num_frames: int = 16,
        image_size: int | list[int] = 224,
        batch_size: int = 8,
        seed: int = 0,
        device: str | torch.device = "cpu",
        quarantine: str | Path | None = None,
        **data: Any,
    ) -> None:
        """batch_size: clips per process; device: where clips are put; quarantine: file that gets a line for every video
        that cannot be decoded; data: options of DataConfig (frame_stride, crop, flip, decoder, ...).

        Raise InputError for shards that cannot be read and for options out of range.
        """
        known = [
            *inspect.signature(ClipDataset).parameters,
            *(field.name for field in fields(DataConfig)),
        ]
        for name in data.keys() - set(known):
            similar = get_close_matches(name, known, n=1)
            raise InputError(
                f"ClipDataset has no option {name}{f': did you mean {similar[0]}?' if similar else ''}"
            )
        self._config = DataConfig(shards=str(shards), **data)
        self._dataset = ShardDataset.open(self._config)
        self._clips = dict[str, Any](
            num_frames=num_frames, image_size=image_size, batch_size=batch_size, seed=seed
        )
        self._device, self._quarantine = (
            torch.device(device),
            Path(quarantine) if quarantine else None,
        )
        self._next_batch = 0
        self._plan()  # which may refuse the options

    @property
    def classes(self) -> list[str]:
        """Names of the labels in batches."""
        return self._dataset.info.classes

    @property
    def batches_per_epoch(self) -> float:
        """How many batches of a process show every video once."""
        plan = self._plan()
        return plan.clips_per_epoch / (plan.batch_size * _count_processes())

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise InputError(
                "clips have workers of their own, and others would repeat them: set num_workers=0"
            )
        with ClipLoader(
            self._dataset, self._plan(), self._device, self._config, self._quarantine
        ) as loader:
            for batch in loader.batches(self._next_batch):
                self._next_batch += (
                    1  # before it is used: a state that is saved meanwhile resumes behind it
                )
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return what tells the next batch; the same on all ranks."""
        return {"next_batch": self._next_batch, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raise InputError if its clips were others."""
        wanted = self._identity()
        if other := [name for name in wanted if state.get(name) != wanted[name]]:
            raise InputError(
                f"the state is of clips with another {', '.join(other)}: give what it was saved with"
            )
        self._next_batch = state["next_batch"]

    def _identity(self) -> dict[str, Any]:
        return {**self._clips, "shards": self._dataset.digest, "processes": _count_processes()}

    def _plan(self) -> TrainingPlan:
        rank = dist.get_rank() if _count_processes() > 1 else 0
        return TrainingPlan(
            self._dataset, self._config, **self._clips, rank=rank, world_size=_count_processes()
        )


def _count_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
