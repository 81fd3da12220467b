"""What a user may say about the data; every choice is checked here, with one sentence on what is wrong."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import InputError
from pipeline.reading.store import Cache

Decoder = Literal["auto", "hybrid", "dali", "pyav"]


@dataclass
class DataConfig:
    """Where clips come from and how they are cut; the defaults are the paper's pre-training on Kinetics."""

    shards: str | list[str] = ""
    """dataset folder or URL (s3://…, or file://… to be copied to data.cache_dir); a list mixes several"""
    validation_shards: str = ""
    """never learnt from: at every review of pre-training their loss under fixed masks, k-NN accuracy and RankMe"""
    weights: list[float] | None = None
    """share of each of the mixed datasets; null: by their number of videos"""
    subset: int | None = None
    """only this many videos, always the same ones and nested; null: all"""
    subset_seed: int = 0
    """of data.subset: another number chooses other videos"""
    frame_stride: int = 4
    """of strided clips, in frames of the source video: 4 for Kinetics, 2 for SSv2"""
    sampling: Literal["strided", "segments"] = "strided"
    """strided: every frame_stride-th frame; segments: one frame from each of num_frames parts (TSN)"""
    crop: Literal["multiscale", "random_resized"] = "multiscale"
    """multiscale: a square of one of four sizes; random_resized: of any area and shape, made square"""
    crop_min_area: float = 0.5
    """share of the frame that random_resized shows at least; 0.08 for fine-tuning"""
    flip: bool = True
    """mirror every other clip; off for SSv2, whose labels know left from right"""
    rand_augment: int = 0
    """operations of RandAugment, for fine-tuning; half of them take place"""
    rand_augment_magnitude: float = 9.0
    """of RandAugment's operations, of 10"""
    random_erasing: float = 0.0
    """share of the clips in which a box is erased"""
    repeats: int = 1
    """clips cut from one decode, with the same frames and crops of their own"""
    shuffle_shards: int = 16
    """shards whose videos are shuffled together"""
    canonical_nodes: int = 1
    """pieces of a step that read shards of their own; many nodes on an object store: see docs/clusters.md"""

    decoder: Decoder = "auto"
    """auto: hybrid on a GPU, PyAV on a CPU; hybrid: both at once, each as fast as it is; dali, pyav: that one alone"""
    # On 2 cores one batch ahead makes 10 % fewer clips than two to six do, and more threads than cores make none more
    # (benchmarks/data/loader_settings.py); the third is for DALI, which decodes one batch while the next one is read.
    num_threads: int | None = None
    """decoding threads; null: this process's share of the cores"""
    dali_threads: int | None = None
    """of DALI beside those; null: as many as the GPU has decoders, on a CPU num_threads"""
    prefetch: int = 3
    """batches ready or in the making beyond the one in use: reading, decoding, done"""
    prefetch_mib: int = 2048
    """bound on decoded frames waiting; one batch is always let through"""
    cache_dir: str = ""
    """folder for shards of an object store, or of a slow disk (file://…); "": the user's own, ~/.cache/adamae"""
    cache_gib: float = 50.0
    """the most that the cache keeps; removed shards that are read yet stay open, as much again at most"""
    download_timeout_s: float = 60.0
    """an object store that brings less than 1 MiB in so long is asked anew"""
    cached_batch: bool = False
    """the first batch again and again: what a step takes then, the loader costs nothing of"""
    max_bad_fraction: float = 0.1
    """stop when more than this share of the clips could not be decoded"""
    decode_timeout_s: float = 60.0
    """a decode that takes longer counts as hung"""

    def __post_init__(self) -> None:
        for name in ("frame_stride", "repeats", "shuffle_shards", "canonical_nodes", "prefetch", "prefetch_mib"):
            self._require(name, getattr(self, name) >= 1, "give a whole number of at least 1")
        for name in ("subset", "num_threads", "dali_threads"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "give a whole number of at least 1, or null")
        for name in ("cache_gib", "download_timeout_s", "decode_timeout_s"):
            self._require(name, 0 < getattr(self, name) < math.inf, "give a finite number above 0")
        self._require("crop_min_area", 0 < self.crop_min_area <= 1, "give a share above 0 and up to 1")
        self._require("rand_augment", self.rand_augment >= 0, "give a whole number of at least 0")
        self._require("rand_augment_magnitude", 0 <= self.rand_augment_magnitude <= 10, "give a number from 0 to 10")
        self._require("random_erasing", 0 <= self.random_erasing <= 1, "give a share from 0 to 1")
        self._require("max_bad_fraction", 0 <= self.max_bad_fraction < 1, "give a share from 0 to below 1")
        if self.weights is not None:
            fits = isinstance(self.shards, list) and len(self.weights) == len(self.shards)
            positive = all(0 < weight < math.inf for weight in self.weights)
            self._require("weights", fits and positive, "give one finite number above 0 for each of data.shards")

    def _require(self, name: str, fine: bool, advice: str) -> None:
        if not fine:
            raise InputError(f"data.{name} is {getattr(self, name)}: {advice}")

    @property
    def shard_cache(self) -> Cache:
        return Cache(Path(self.cache_dir) if self.cache_dir else None, self.cache_gib, self.download_timeout_s)

    @property
    def threads(self) -> int:
        """Decoding threads of this process: as asked, or the cores it may use shared among the node's processes."""
        if self.num_threads is not None:
            return self.num_threads
        return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
