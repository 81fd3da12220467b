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
    """Yields the batches that train.py gets, endlessly; they can be resumed exactly.

    Rank and number of processes are torch.distributed's, once that is initialized. Reading and
    decoding have workers of their own, so give it to no DataLoader or to one with `batch_size=None,
    num_workers=0`.
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
        """Open a dataset of shards, a folder or a URL.

        batch_size: clips per process. device: where clips are put. quarantine: a file that gets a
        line for every video that cannot be decoded. data: options of DataConfig (frame_stride,
        crop, flip, decoder, ...).

        Raise InputError for shards that cannot be read and for options that do not exist or are out
        of range.
        """
        _require_options(data)
        self._config = DataConfig(shards=str(shards), **data)
        self._dataset = ShardDataset.open(self._config)
        self._clip_options: dict[str, Any] = {
            "num_frames": num_frames,
            "image_size": image_size,
            "batch_size": batch_size,
            "seed": seed,
        }
        self._device = torch.device(device)
        self._quarantine = Path(quarantine) if quarantine else None
        self._next_batch = 0
        # A plan checks the options: a wrong one is to be reported here.
        self._make_plan()

    @property
    def classes(self) -> list[str]:
        """Return the names of the labels in batches."""
        return self._dataset.info.classes

    @property
    def batches_per_epoch(self) -> float:
        """Return how many batches of a process show every video once."""
        plan = self._make_plan()
        return plan.clips_per_epoch / (plan.batch_size * _count_processes())

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise InputError(
                "clips have workers of their own, and others would repeat them: set num_workers=0"
            )
        with ClipLoader(
            self._dataset, self._make_plan(), self._device, self._config, self._quarantine
        ) as loader:
            for batch in loader.batches(self._next_batch):
                # Before the batch is used: a state that is saved meanwhile resumes behind it.
                self._next_batch += 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return what determines the next batch; it is the same on all ranks."""
        return {"next_batch": self._next_batch, **self._identify_clips()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raise InputError if it belongs to other clips."""
        identity = self._identify_clips()
        different = [name for name, value in identity.items() if state.get(name) != value]
        if different:
            raise InputError(
                f"the state is of clips with another {', '.join(different)}: give what it was saved"
                " with"
            )
        self._next_batch = state["next_batch"]

    def _identify_clips(self) -> dict[str, Any]:
        """Return all that the stream of batches is a function of."""
        return {
            **self._clip_options,
            "shards": self._dataset.digest,
            "processes": _count_processes(),
        }

    def _make_plan(self) -> TrainingPlan:
        world_size = _count_processes()
        rank = dist.get_rank() if world_size > 1 else 0
        return TrainingPlan(
            self._dataset, self._config, **self._clip_options, rank=rank, world_size=world_size
        )


def _require_options(data: dict[str, Any]) -> None:
    """Raise InputError if a keyword is no option of DataConfig, and suggest one that is."""
    options = [*inspect.signature(ClipDataset).parameters]
    options += [option.name for option in fields(DataConfig)]
    for name in data.keys() - set(options):
        similar = get_close_matches(name, options, n=1)
        suggestion = f": did you mean {similar[0]}?" if similar else ""
        raise InputError(f"ClipDataset has no option {name}{suggestion}")


def _count_processes() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1
