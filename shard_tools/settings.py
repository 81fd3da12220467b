"""What can be chosen about shards, and the presets behind `--for`."""

from dataclasses import asdict, dataclass
from typing import Any

from common.errors import InputError
from shard_tools.encoding.codecs import CODECS

COPY = "copy"
CHECKS = ("sample", "full")
PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow")

ENCODING = ("frame_stride", "fps", "short_side", "gop", "quality", "preset", "max_seconds")  # no effect on copied bytes
MINIMA = {"frame_stride": 1, "gop": 1, "samples_per_shard": 1, "min_shards": 1, "short_side": 16, "seed": 0}


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides the bytes of a dataset, besides the videos themselves."""

    encode: str = "h264"  # a codec of CODECS, or copy: keep the bytes as they are
    frame_stride: int = 4  # store every n-th source frame
    fps: float | None = None  # instead of frame_stride: per video, the stride that comes nearest to this rate
    short_side: int | None = 256  # maximum in pixels; None: as it comes
    gop: int = 8  # frames from one key frame to the next
    quality: int | None = None  # CRF or quantizer, lower is better; None: the codec's default
    preset: str = "veryfast"  # x264's and x265's effort
    max_seconds: float | None = None  # longer videos are split into samples of this length
    check: str | None = None  # of a copied video decode all, or (None too) the first quarter of every GOP
    seed: int = 0  # of the shuffle
    samples_per_shard: int = 256  # maximum
    shard_mb: float | None = None  # instead of samples_per_shard: megabytes of source video in a shard
    min_shards: int = 1  # as far as there are videos

    def __post_init__(self) -> None:
        for name, minimum in MINIMA.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise InputError(f"--{name.replace('_', '-')} must be at least {minimum}, not {value}")
        for name in ("fps", "max_seconds", "shard_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"--{name.replace('_', '-')} must be above 0, not {value}")
        if self.quality is not None and not 0 <= self.quality <= 63:
            raise InputError(f"--quality must be between 0 (best) and 63, not {self.quality}")
        if self.check is not None and self.encode != COPY:
            raise InputError("--check is for --encode copy: what is encoded is always decoded completely, remove it")

    def to_json(self) -> dict[str, Any]:
        """Return what `dataset.json` records: with the defaults filled in, without what has no effect."""
        values = asdict(self)
        if self.encode == COPY:
            kept = ("encode", "seed", "samples_per_shard", "shard_mb", "min_shards")
            return {name: values[name] for name in kept} | {"check": self.check or "sample", "frame_stride": 1}
        values["quality"] = CODECS[self.encode].default_quality if self.quality is None else self.quality
        del values["check"]
        return values


# What `--for` stands for; every value can still be set by its own option.
PURPOSES: dict[str, dict[str, Any]] = {
    # 16 frames at stride 4 is what AdaMAE is trained on: nothing else is ever decoded.
    "pretrain": {},
    # Segment-based sampling and dense test views want every second frame, and labels deserve better pictures.
    "finetune": {"frame_stride": 2, "quality": 20},
    # To create other shards from later: every frame, larger, with long GOPs since nobody reads it at random.
    "archive": {"frame_stride": 1, "quality": 18, "short_side": 480, "gop": 48, "preset": "medium"},
}
