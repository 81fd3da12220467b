"""What can be chosen about shards, and the presets behind `--for`."""

from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from common.errors import InputError
from shard_tools.encoding.codecs import CODECS, TUNES

COPY = "copy"
PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow")

# No effect on copied bytes.
ENCODING = ("frame_stride", "fps", "short_side", "gop", "quality", "preset", "tune", "clip_seconds")


def _option(default: Any, text: str, minimum: int | None = None, **argument: Any) -> Any:
    """Declare a field that is an option of the command; `argument`: argparse's, `minimum` None: above 0, and finite."""
    return field(default=default, metadata={"help": text, "minimum": minimum, **argument})


_count = partial(_option, minimum=1, type=int, metavar="N")


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides the bytes of a dataset, besides the videos themselves."""

    encode: str = _option("h264", "codec, or copy to keep the bytes (default h264)", choices=[*CODECS, COPY])
    frame_stride: int = _count(4, "store every N-th frame (default 4)")
    fps: float | None = _option(
        None, "frames per second to keep, by the largest stride per video; of folders of frames, their rate", type=float
    )
    short_side: int | None = _count(256, "maximum short side in pixels (default 256)", minimum=16, metavar="PIXELS")
    gop: int = _count(8, "frames per group of pictures (default 8)")
    quality: int | None = _count(None, "CRF or quantizer, lower is better (default for h264: 22)", minimum=0)
    preset: str = _option("veryfast", "effort of the h264 and hevc encoders (default veryfast)", choices=PRESETS)
    tune: str = _option("decode", "make h264 and hevc decode fast, or small (default decode)", choices=TUNES)
    clip_seconds: float | None = _option(
        None, "cut videos into samples of this length; segments of a list stay as they are", type=float
    )
    seed: int = _count(0, "seed of the global shuffle (default 0)", minimum=0)
    samples_per_shard: int = _count(256, "maximum samples per shard (default 256)")

    def __post_init__(self) -> None:
        for option in fields(self):
            value, minimum = getattr(self, option.name), option.metadata["minimum"]
            if isinstance(value, int | float):
                name = f"--{option.name.replace('_', '-')}"
                if minimum is None and not 0 < value < float("inf"):
                    raise InputError(f"{name} must be above 0, not {value}")
                if minimum is not None and value < minimum:
                    raise InputError(f"{name} must be at least {minimum}, not {value}")
        if self.quality is not None and self.quality > 63:
            raise InputError(f"--quality must be between 0 (best) and 63, not {self.quality}")

    def to_json(self) -> dict[str, Any]:
        """Return what `dataset.json` records: with the defaults filled in, without what has no effect."""
        values = asdict(self)
        if self.encode == COPY:
            kept = ("encode", "seed", "samples_per_shard")
            return {name: values[name] for name in kept} | {"frame_stride": 1}
        codec = CODECS[self.encode]
        values["quality"] = codec.choose_quality(self.tune) if self.quality is None else self.quality
        if not codec.decode_options:
            del values["tune"]
        return values


# What `--for` stands for; every value can still be set by its own option.
PURPOSES: dict[str, dict[str, Any]] = {
    # 16 frames at stride 4 is what AdaMAE is trained on: nothing else is ever decoded.
    "pretrain": {},
    # Segment-based sampling and dense test views want every second frame, and labels deserve better pictures.
    "finetune": {"frame_stride": 2, "quality": 20},
    # To create other shards from later: every frame, larger, with long GOPs since nobody reads it at random.
    "archive": {"frame_stride": 1, "quality": 18, "short_side": 480, "gop": 48, "preset": "medium", "tune": "size"},
}
