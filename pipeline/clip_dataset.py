"""Clips of shards for any training loop: PyTorch's, Lightning's, Hugging Face's."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.loader import Batch, ClipLoader
from adamae.pipeline.planning.plan import EvaluationPlan, TrainingPlan
from adamae.pipeline.shards.dataset import ShardDataset

# What an evaluation does not do: clips are neither sampled nor augmented.
TRAINING_OPTIONS = (
    "weights",
    "class_balance",
    "crop",
    "crop_min_area",
    "flip",
    "rand_augment",
    "rand_augment_magnitude",
    "random_erasing",
    "repeats",
    "views_apart_s",
    "shuffle_shards",
    "canonical_nodes",
    "max_bad_fraction",
)


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
        _require_options(data, ClipDataset.__init__)
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

    @staticmethod
    def validation(shards: str | Path, **options: Any) -> "ValidationClips":
        """Return every video of a dataset once; the options are those of `ValidationClips`."""
        return ValidationClips(shards, **options)

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
        _refuse_workers()
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
        if not isinstance(state, dict) or "next_batch" not in state:
            raise InputError(f"{state!r:.100} is no state: give what state_dict() returned")
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
        return TrainingPlan(
            self._dataset,
            self._config,
            **self._clip_options,
            rank=_find_rank(),
            world_size=_count_processes(),
        )


class ValidationClips(IterableDataset[Batch]):
    """Yields the batches that evaluate.py gets: every video once, the same in each pass.

    Ranks get different videos, and all of them together each video once, so one rank may have a
    batch less. A video that does not decode raises InputError. The views of a video are neighbors
    in a batch or in the next one, with the same key: average over them by `batch.keys`.
    """

    def __init__(
        self,
        shards: str | Path,
        *,
        num_frames: int = 16,
        image_size: int | list[int] = 224,
        batch_size: int = 8,
        clips: int = 1,
        crops: int = 1,
        device: str | torch.device = "cpu",
        **data: Any,
    ) -> None:
        """Open a dataset of shards, a folder or a URL.

        batch_size: clips per process. clips: evenly spread along a video; one is from its middle.
        crops: of each clip, along its longer side; one is the center. data: options of DataConfig
        that concern no training (frame_stride, fps, decoder, ...).

        Raise InputError for shards that cannot be read and for options that do not exist, are out
        of range or do nothing here.
        """
        _require_options(data, ValidationClips.__init__)
        useless = sorted(data.keys() & set(TRAINING_OPTIONS))
        if useless:
            raise InputError(f"an evaluation has no {', '.join(useless)}: leave it out")
        self._config = DataConfig(shards=str(shards), **data)
        self._dataset = ShardDataset.open(self._config)
        self._device = torch.device(device)
        self._plan = EvaluationPlan(
            self._dataset,
            self._config,
            num_frames=num_frames,
            image_size=image_size,
            batch_size=batch_size,
            num_temporal=clips,
            num_spatial=crops,
            rank=_find_rank(),
            world_size=_count_processes(),
        )

    @property
    def classes(self) -> list[str]:
        """Return the names of the labels in batches."""
        return self._dataset.info.classes

    def __len__(self) -> int:
        """Return the number of batches of this process."""
        return sum(1 for _ in takewhile(self._plan.positions, count()))

    def __iter__(self) -> Iterator[Batch]:
        _refuse_workers()
        with ClipLoader(self._dataset, self._plan, self._device, self._config, None) as loader:
            yield from loader.batches(0)


def _refuse_workers() -> None:
    if get_worker_info() is not None:
        raise InputError(
            "clips have workers of their own, and others would repeat them: set num_workers=0"
        )


def _find_rank() -> int:
    return dist.get_rank() if _count_processes() > 1 else 0


def _require_options(data: dict[str, Any], function: Callable[..., None]) -> None:
    """Raise InputError if a keyword is no option of DataConfig, and suggest one that is."""
    options = [*inspect.signature(function).parameters]
    options += [option.name for option in fields(DataConfig)]
    for name in data.keys() - set(options):
        similar = get_close_matches(name, options, n=1)
        suggestion = f": did you mean {similar[0]}?" if similar else ""
        raise InputError(f"ClipDataset has no option {name}{suggestion}")


def _count_processes() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1
