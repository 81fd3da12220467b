"""Who decodes what: PyAV, or DALI as videos or as pictures. What DALI does not take, or has failed at, is PyAV's."""

import math
import os
import sys
from collections.abc import Sequence
from typing import Literal

import torch

from common.errors import InputError
from common.logging import log
from pipeline.config import DataConfig
from pipeline.decoding.graph import CPU_CODECS, dali_is_installed
from pipeline.decoding.nvdec import Limits, NvdecError, read_limits
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice, pictures

Way = Literal["videos", "images"]  # of DALI


class DecoderPolicy:
    """Safe to use from many threads."""

    def __init__(self, dataset: ShardDataset, device: torch.device, config: DataConfig) -> None:
        """Raises InputError if the configuration insists on DALI, and DALI does not know the codec on this device."""
        self._dataset = dataset
        self._limits = _known_codecs(dataset, device, config)
        self._is_plain: dict[int, bool] = {}  # of the copied samples that have been looked at
        # Samples that DALI has failed at, and the batch from which on PyAV has them; None: all of them.
        self._kept_since: dict[int | None, int] = {}
        self._failed: set[int] = set()  # batches
        self._shares = [(0, 1.0)]  # first batch, and how many of the clips that suit DALI it decodes from there on
        engines = max((limits.num_decoders for limits in self._limits.values()), default=0)
        self.dali_threads = config.dali_threads or engines or config.threads

    @property
    def share(self) -> float:
        """Of the clips that suit DALI, how many it decodes in the last batches that it was told of."""
        return self._shares[-1][1]

    def give_dali(self, share: float, since: int = 0) -> None:
        """Have DALI decode so many of the clips that suit it, from batch number `since` on."""
        self._shares = [(first, before) for first, before in self._shares if first < since] + [(since, share)]

    @property
    def without_dali(self) -> bool:
        return not self._limits or not self.share

    def may_use_dali(self, sample: int, batch: int, turn: int) -> bool:
        """Whether DALI is to decode a video in batch number `batch`, as far as that is known before it is read.

        `turn`: number of the decode in the run, so that a run that goes on shares them as before.
        """
        if self.has_left(batch) or batch in self._failed:
            return False
        return self._is_dalis(turn, batch) and self.suits(sample) is not None

    def way(self, sample: int, cut: VideoSlice, batch: int) -> Way | None:
        """How DALI decodes what has been read of a video; None: PyAV does."""
        if batch >= self._kept_since.get(sample, math.inf):
            return None
        way = self.suits(sample)
        if way == "images":
            return way if pictures(cut) else None
        return way if way and self._numbers_as_dali_does(sample, cut) else None

    def suits(self, sample: int) -> Way | None:
        """How DALI decodes a video, as far as codec and sides tell."""
        video = self._dataset.samples[sample]
        limits = self._limits.get(video.codec)
        if limits is None:
            return None
        if video.codec == "mjpeg" and self._dataset.gops(sample) is not None:
            return "images"
        return "videos" if limits.admit(video.width, video.height) else None

    def ban_from_dali(self, samples: Sequence[int] | None, failed: int, since: int) -> None:
        """Have PyAV decode batch number `failed`, and these videos, or, None, all, from batch number `since` on."""
        self._failed.add(failed)
        for sample in [None] if samples is None else samples:
            self._kept_since.setdefault(sample, since)

    def has_left(self, batch: int) -> bool:
        """Whether PyAV decodes all of batch number `batch`."""
        return self.without_dali or batch >= self._kept_since.get(None, math.inf)

    def _is_dalis(self, turn: int, batch: int) -> bool:
        """Evenly spread, whatever the size of a batch."""
        share = next(share for first, share in reversed(self._shares) if first <= batch)
        return math.floor((turn + 1) * share) > math.floor(turn * share)

    def _numbers_as_dali_does(self, sample: int, cut: VideoSlice) -> bool:
        """Shards made by re-encoding hold nothing that decoders disagree about; videos copied into them may."""
        if not self._dataset.holds_copies or self._dataset.gops(sample) is not None:
            return True
        if sample not in self._is_plain:
            from pipeline.decoding.video import is_plain  # PyAV, which may be missing where DALI takes all

            self._is_plain[sample] = is_plain(cut.data, cut.num_frames)
        return self._is_plain[sample]


def may_share(device: torch.device, config: DataConfig) -> bool:
    """Whether clips are to be shared between DALI and PyAV by what each makes; on a CPU, both take the same cores, and
    PyAV is the faster one for every codec."""
    return config.decoder == "hybrid" or (config.decoder == "auto" and device.type == "cuda")


def _known_codecs(dataset: ShardDataset, device: torch.device, config: DataConfig) -> dict[str, Limits]:
    """What DALI decodes here, nothing if it is not to; raises InputError if it is to, and does not know all."""
    if config.decoder == "pyav" or (config.decoder == "auto" and device.type != "cuda"):
        return {}
    known, reason = _known_to_dali(dataset, device)
    held = dataset.info.codecs.keys()
    unknown = ", ".join(sorted(held - known.keys()))
    if not unknown:
        return known
    sentence = f"DALI does not decode {unknown} on {device.type}{reason}, and {dataset.folder} holds it"
    if config.decoder == "dali" or (config.decoder == "hybrid" and not held & known.keys()):
        raise InputError(f"{sentence}: set data.decoder to auto")
    if config.decoder == "auto":
        notice(f"{sentence}: PyAV does, on {config.threads} CPU threads", once_a_node=True)
    return known if held & known.keys() else {}


def _known_to_dali(dataset: ShardDataset, device: torch.device) -> tuple[dict[str, Limits], str]:
    """Codecs, and where one is missing, perhaps a reason."""
    if not dali_is_installed():
        return {}, ", since nvidia-dali is not installed"
    if device.type == "cpu":
        return dict.fromkeys(CPU_CODECS, Limits()), ""
    # nvJPEG needs no NVDEC, but pictures that are to be had one by one.
    images = {"mjpeg": Limits()} if "mjpeg" in dataset.info.codecs and dataset.column("num_gops").any() else {}
    try:
        return read_limits(device) | images, ""
    except NvdecError as error:
        return images, f", since {error}"


def notice(sentence: str, once_a_node: bool = False) -> None:
    """Tell the user of something that costs speed but stops nothing."""
    if not once_a_node or os.environ.get("LOCAL_RANK", "0") == "0":
        log(f"note: {sentence}", sys.stderr)
