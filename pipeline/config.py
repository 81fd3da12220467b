"""Configuration of the data: which clips, how they are cut, and how they are read and decoded."""

import math
import os
from dataclasses import dataclass
from typing import Literal

from adamae.common.config_fields import check_ranges, option
from adamae.common.cpus import count_cpus
from adamae.common.errors import InputError
from adamae.common.locations import local_path

Decoder = Literal["auto", "dali", "pyav"]
# The paper's for Kinetics.
DEFAULT_STRIDE = 4


@dataclass
class DataConfig:
    """Where clips come from and how they are cut.

    The defaults are the paper's pre-training on Kinetics.
    """

    shards: str | list[str] = option("", free=True)
    """dataset folder or URL (s3://…, or file://… to be copied to data.cache_dir); a list mixes
    several"""
    weights: list[float] | None = None
    """sampling weight of each of the mixed datasets; null: by number of videos"""
    subset: int | None = option(None, at_least=1)
    """train on a fixed subset of this many videos, nested; null: all"""
    subset_seed: int = 0
    """seed of data.subset"""
    frame_stride: int | None = option(None, at_least=1)
    """source frames between clip frames: 4 for Kinetics, 2 for SSv2; null: 4, or by time if
    there is data.fps"""
    fps: float | None = option(None, above=0)
    """clip frames per second: the nearest frames, whatever the video's own rate is; instead of
    frame_stride"""
    sampling: Literal["strided", "segments"] = "strided"
    """strided: by frame_stride or fps; segments: one frame from each of num_frames parts (TSN)"""
    class_balance: float = option(0.0, at_least=0, at_most=1)
    """0: classes come as often as they are; 1: equally often; between: by size to the power of 1
    - class_balance"""
    fields: list[str] = option([], free=True)
    """other fields of the samples, such as captions, that batches bring along: Batch.fields"""
    crop: Literal["multiscale", "random_resized"] = "multiscale"
    """multiscale: a square of one of four sizes; random_resized: any area and aspect ratio,
    resized to a square"""
    crop_min_area: float = option(0.5, above=0, at_most=1)
    """minimum area of random_resized crops as a fraction of the frame; 0.08 for fine-tuning"""
    flip: bool = True
    """random horizontal flip, p = 0.5; off for SSv2, whose labels distinguish left and right"""
    rand_augment: int = option(0, at_least=0)
    """RandAugment operations, for fine-tuning; each is applied with p = 0.5"""
    rand_augment_magnitude: float = option(9.0, at_least=0, at_most=10)
    """magnitude of RandAugment's operations, of 10"""
    random_erasing: float = option(0.0, at_least=0, at_most=1)
    """probability of erasing a box from a clip"""
    repeats: int = option(1, at_least=1)
    """clips per decoded video (repeated sampling), each with a crop of its own"""
    views_apart_s: float = option(0.0, at_least=0)
    """seconds that clips of one decoded video may begin apart; 0: they have the same frames"""
    shuffle_shards: int = option(16, at_least=1)
    """shards whose videos are shuffled together"""
    canonical_nodes: int = option(1, at_least=1)
    """disjoint shard streams per step, for many nodes on object storage: see docs/clusters.md"""

    decoder: Decoder = option("pyav", free=True)
    """pyav: FFmpeg, on CPU cores; dali: a GPU's JPEG engines for MJPEG, NVDEC for other codecs,
    and PyAV for videos that do not suit it; auto: PyAV, and DALI for whole batches where the
    decode workers fall behind"""
    # On 2 cores a prefetch of 1 costs 10 % of the speed, 2 to 6 are equally fast, and so are more
    # workers than cores. The third batch is for DALI, which decodes one while the next is read.
    num_workers: int | None = option(None, at_least=1, free=True)
    """decode workers, which are processes; null: this rank's share of the cores, or of a
    container's quota"""
    prefetch: int = option(3, at_least=1, free=True)
    """batches that are read, decoded or ready, beyond the one in use"""
    prefetch_mib: int = option(2048, at_least=1, free=True)
    """limit on decoded batches in memory; one is always let through"""
    cache_dir: str = option("", free=True)
    """cache folder for shards in object storage or on slow disks (file://…); "": the user's,
    ~/.cache/adamae"""
    cache_gib: float = option(50.0, above=0, free=True)
    """maximum size of the cache; removed shards that are still being read stay open, as much
    again at most"""
    download_timeout_s: float = option(60.0, above=0, free=True)
    """object storage must deliver 8 MiB within this time; otherwise the request is repeated"""
    max_bad_fraction: float = option(0.1, at_least=0, below=1, free=True)
    """stop when more than this fraction of the clips could not be decoded"""
    decode_timeout_s: float = option(60.0, above=0, free=True)
    """a decode that takes longer counts as hung"""

    def __post_init__(self) -> None:
        """Raise InputError for options that are out of range or contradict each other."""
        check_ranges(self, "data")
        local_path(self.cache_dir, "data.cache_dir")
        if self.fps is None:
            self.frame_stride = self.frame_stride or DEFAULT_STRIDE
        elif self.frame_stride is not None:
            raise InputError(
                f"data.fps is {self.fps:g} and data.frame_stride {self.frame_stride}: set one of"
                " them to null"
            )
        elif self.sampling == "segments":
            raise InputError("data.fps does nothing with data.sampling=segments: remove it")
        if self.views_apart_s > 0:
            self._check_views()
        if self.weights is not None:
            is_one_each = isinstance(self.shards, list) and len(self.weights) == len(self.shards)
            are_positive = all(0 < weight < math.inf for weight in self.weights)
            if not is_one_each or not are_positive:
                raise InputError(
                    f"data.weights is {self.weights}: must be one number above 0 for each of"
                    " data.shards"
                )

    def _check_views(self) -> None:
        if self.repeats == 1:
            raise InputError(
                f"data.views_apart_s is {self.views_apart_s:g}, but data.repeats=1 makes one clip"
                " of each decoded video: raise data.repeats"
            )
        if self.sampling == "segments":
            raise InputError(
                "data.views_apart_s does nothing with data.sampling=segments, which spreads every"
                " clip over the whole video: remove it"
            )

    @property
    def workers(self) -> int:
        """Return how many decode workers this process has.

        Without data.num_workers, the cores that it may use are divided among the node's processes.
        """
        if self.num_workers is not None:
            return self.num_workers
        # As torchrun sets it.
        num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, count_cpus() // num_processes)
