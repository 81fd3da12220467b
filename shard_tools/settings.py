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

# Options of the encoder. Copied bytes do not depend on them, so --encode copy refuses them.
ENCODING = ("frame_stride", "fps", "short_side", "gop", "quality", "preset", "tune", "clip_seconds")


def _option(default: Any, text: str, **argument: Any) -> Any:
    """Declare a field that is an option of make_shards too; `argument` goes to add_argument."""
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
        "minimum frames per second to store, by the largest such stride of each video (1 percent"
        " less is taken, as 23.976 counts as 24); for folders of frames also their frame rate",
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
        "decode", "make h264 and hevc fast to decode, or small (default decode)", choices=TUNES
    )
    clip_seconds: float | None = _positive(
        None, "cut videos into samples of this length; segments of a list are kept as they are"
    )
    seed: int = _count(0, "seed of the global shuffle (default 0)", type=between(0))
    samples_per_shard: int = _count(256, "maximum samples per shard (default 256)")

    def to_json(self) -> dict[str, Any]:
        """Return what `dataset.json` records: with all defaults, without what has no effect."""
        values = asdict(self)
        if self.encode == COPY:
            for name in ENCODING:
                del values[name]
            # Readers need a stride for the times of frames, and a copy has all frames.
            values["frame_stride"] = 1
            return values
        codec = CODECS[self.encode]
        if self.quality is None:
            values["quality"] = codec.default_quality
            if self.tune == "decode" and codec.decode_quality is not None:
                values["quality"] = codec.decode_quality
        if not codec.decode_options:
            del values["tune"]
        return values


# What `--for` stands for. Every value can still be overridden by its own option.
PURPOSES: dict[str, dict[str, Any]] = {
    # AdaMAE is trained on 16 frames at stride 4: the frames between are never decoded.
    "pretrain": {},
    # Segment-based sampling and dense test views need every second frame, and labeled videos are
    # few enough to be stored at a higher quality.
    "finetune": {"frame_stride": 2, "quality": 20},
    # The source of other shards: every frame, at a larger size, with long GOPs since it is not
    # read at random.
    "archive": {
        "frame_stride": 1,
        "quality": 18,
        "short_side": 480,
        "gop": 48,
        "preset": "medium",
        "tune": "size",
    },
}
