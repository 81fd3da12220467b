"""What can be chosen about shards, and the presets behind `--for`."""

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from adamae.common.arguments import between
from adamae.shard_tools.codecs import CODECS, TUNES

COPY = "copy"
PRESETS = (
    "ultrafast",
    "superfast",
    "veryfast",
    "faster",
    "fast",
    "medium",
    "slow",
    "slower",
    "veryslow",
)

# No effect on copied bytes.
ENCODING = ("frame_stride", "fps", "short_side", "gop", "quality", "preset", "tune", "clip_seconds")


def _option(default: Any, text: str, **argument: Any) -> Any:
    """Declare a field that is an option of the command; `argument`: argparse's."""
    return field(default=default, metadata={"help": text, **argument})


_count = partial(_option, type=between(1), metavar="N")
_positive = partial(_option, type=between(0.001, kind=float))


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides the bytes of a dataset, besides the videos themselves."""

    encode: str = _option(
        "h264", "codec, or copy to keep the bytes (default h264)", choices=[*CODECS, COPY]
    )
    frame_stride: int = _count(4, "store every N-th frame (default 4)")
    fps: float | None = _positive(
        None,
        "frames per second to keep, by the largest stride per video; of folders of frames, their rate",
    )
    short_side: int | None = _count(
        256, "maximum short side (default 256)", type=between(16), metavar="PIXELS"
    )
    gop: int = _count(8, "frames per group of pictures (default 8)")
    quality: int | None = _count(
        None, "CRF or quantizer, lower is better (default for h264: 22)", type=between(0, 63)
    )
    preset: str = _option(
        "veryfast", "effort of the h264 and hevc encoders (default veryfast)", choices=PRESETS
    )
    tune: str = _option(
        "decode", "make h264 and hevc decode fast, or small (default decode)", choices=TUNES
    )
    clip_seconds: float | None = _positive(
        None, "cut videos into samples of this length; segments of a list stay as they are"
    )
    seed: int = _count(0, "seed of the global shuffle (default 0)", type=between(0))
    samples_per_shard: int = _count(256, "maximum samples per shard (default 256)")

    def to_json(self) -> dict[str, Any]:
        """Return what `dataset.json` records: with the defaults filled in, without what has no effect."""
        values = asdict(self)
        if self.encode == COPY:
            return {name: value for name, value in values.items() if name not in ENCODING} | {
                "frame_stride": 1
            }
        codec = CODECS[self.encode]
        if self.quality is None:
            values["quality"] = (
                self.tune == "decode" and codec.decode_quality
            ) or codec.default_quality
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
    "archive": {
        "frame_stride": 1,
        "quality": 18,
        "short_side": 480,
        "gop": 48,
        "preset": "medium",
        "tune": "size",
    },
}
