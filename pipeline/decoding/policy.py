"""Which decoder takes a video: DALI (NVDEC on a GPU) or PyAV (FFmpeg on the CPU)."""

import math
from collections.abc import Sequence
from contextlib import suppress

import torch

from common.errors import InputError
from common.logging import log_note
from pipeline.config import DataConfig
from pipeline.decoding.dali import CPU_CODECS, GPU_CODECS, find_dali_fault, try_decoding
from pipeline.decoding.video import is_plain
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import SIDE_STEP
from pipeline.shards.gops import VideoSlice
from pipeline.video_error import VideoError

PROBED_SAMPLES = 1000  # the first ones of a dataset, among which one of each codec is looked for
PROBES = 3  # videos of a codec that are tried: one may be corrupt


class DecoderPolicy:
    """Decides video by video; thread-safe.

    The same videos go to the same decoder in every run with the same configuration, except after failures of DALI,
    which a resumed run does not remember.
    """

    def __init__(self, dataset: ShardDataset, device: torch.device, config: DataConfig) -> None:
        """Raise InputError if data.decoder is dali and DALI lacks a codec of these shards on this device."""
        self._dataset = dataset
        self._side_step = SIDE_STEP if device.type == "cuda" else 1  # see SIDE_STEP
        self._is_plain: dict[int, bool] = {}  # of copied samples
        self._banned_since: dict[int | None, int] = {}  # sample (None: all) -> first batch that DALI does not decode
        share = config.dali_share
        if share is None:
            share = 1.0 if config.decoder == "dali" else 0.0
        self.dali_share = 0.0 if config.decoder == "pyav" else share
        self._codecs = _find_dali_codecs(dataset, device, config) if self.dali_share else frozenset()

    def uses_dali(self, sample: int, decode: int, batch: int, video: VideoSlice) -> bool:
        """Return whether DALI decodes a video that has been read; otherwise PyAV does."""
        if not self.may_use_dali(sample, decode, batch):
            return False
        if not self._dataset.holds_copies or self._dataset.gops[sample] is not None:
            return True  # re-encoded for training: decoders agree about it
        if sample not in self._is_plain:
            self._is_plain[sample] = is_plain(video.data, video.num_frames)
        return self._is_plain[sample]

    def may_use_dali(self, sample: int, decode: int, batch: int) -> bool:
        """Return whether DALI decodes a video, as far as that can be told before it is read.

        decode: number of the decode in the run, over which DALI's share is spread evenly.
        """
        if batch >= min(self._banned_since.get(sample, math.inf), self._banned_since.get(None, math.inf)):
            return False
        if math.floor((decode + 1) * self.dali_share) == math.floor(decode * self.dali_share):
            return False
        found = self._dataset.samples[sample]
        return found.codec in self._codecs and found.width % self._side_step == found.height % self._side_step == 0

    def ban_from_dali(self, samples: Sequence[int | None], since: int) -> None:
        """Have PyAV decode these samples (None: all) from batch number `since` on."""
        for sample in samples:
            self._banned_since.setdefault(sample, since)


def _find_dali_codecs(dataset: ShardDataset, device: torch.device, config: DataConfig) -> frozenset[str]:
    """Return which codecs of a dataset DALI decodes."""
    held = dataset.info.codecs.keys()
    reason = ""
    if fault := find_dali_fault():
        known, reason = frozenset[str](), f", since it cannot be imported ({fault})"
    elif device.type == "cpu":
        known = frozenset(held & CPU_CODECS)
    else:
        errors = {codec: _probe_codec(dataset, codec, device) for codec in held & GPU_CODECS}
        known = frozenset(codec for codec, error in errors.items() if not error)
        reason = "".join(f" ({codec}: {error})" for codec, error in sorted(errors.items()) if error)
    unknown = ", ".join(sorted(held - known))
    if unknown:
        sentence = f"DALI cannot decode {unknown} on {device.type}{reason}, which {dataset.folder} contains"
        if config.decoder == "dali":
            raise InputError(f"{sentence}: set data.decoder to auto")
        log_note(f"{sentence}: PyAV decodes it, on {config.threads} CPU threads", once_per_node=True)
    return known


def _probe_codec(dataset: ShardDataset, codec: str, device: torch.device) -> str:
    """Decode samples of a codec with DALI until one succeeds. Return the error if none does, otherwise ""."""
    if (codec, device) in _PROBED:
        return _PROBED[codec, device]
    error, tried, reader = "", 0, Reader(dataset)
    for index in range(min(PROBED_SAMPLES, len(dataset.samples))):
        sample = dataset.samples[index]
        if sample.codec == codec and not sample.width % SIDE_STEP and not sample.height % SIDE_STEP:
            with suppress(VideoError):
                error = try_decoding(reader.clip(index, (0,)), device)
                tried += 1
                if not error or tried == PROBES:
                    break
    _PROBED[codec, device] = error
    return error


_PROBED: dict[tuple[str, torch.device], str] = {}  # a run opens several loaders
