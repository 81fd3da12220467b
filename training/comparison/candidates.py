"""Extract what is compared: features of encoders, and features made by hand."""

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from adamae.common.atomic_io import write_json
from adamae.common.devices import get_device_name
from adamae.common.logging import log
from adamae.model.config import ModelConfig
from adamae.model.encoder import VideoEncoder
from adamae.model.encoders.encoder import Encoder
from adamae.model.encoders.images import FrameEncoder
from adamae.model.encoders.open_encoder import open_encoder
from adamae.model.encoders.own import OwnEncoder
from adamae.model.weights import pretrained
from adamae.model.weights.find_weights import find_file, run_of
from adamae.pipeline.config import DataConfig
from adamae.training.comparison.entries import Kind, Speed
from adamae.training.comparison.splits import Splits
from adamae.training.extraction import ExtractionOptions, encode_clips
from adamae.training.feature_settings import FILE, read_settings
from adamae.training.logger import peak_memory_gib
from adamae.training.remote_run import local_run
from adamae.training.timing import time_calls
from adamae.training.video_features import (
    CoarseEncoder,
    Vectors,
    describe_by_hand,
    extract_vectors,
)

# The rate of hand-made features and of the untrained encoder: 1/8 s from frame to frame. Where
# fewer frames are stored, all of them are taken and none is repeated, as repeated frames do not
# differ; but a single slow video does not lower the rate below MIN_FPS.
DEFAULT_FPS = 8.0
MIN_FPS = 4.0
UNTRAINED = "untrained encoder"
# Tiny, as it only tells what an architecture sees before it has learned anything.
UNTRAINED_CONFIG = ModelConfig("tiny", num_frames=16, image_size=64, patch_size=8)


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and how; compare.py explains the options."""

    models: Sequence[str]
    measures: Sequence[str]
    output: Path
    extraction: ExtractionOptions
    device: torch.device
    neighbors: int | None = None
    labels: Sequence[int] = ()
    group: str = "group"


@dataclass
class Candidate:
    """A row of the comparison that has features, before they are classified."""

    name: str
    kind: Kind
    # Of the training and of the validation videos.
    vectors: tuple[Vectors, Vectors]
    model: str = ""
    # Where the tokens of both splits are; empty: it has none of its own.
    folders: list[Path] = field(default_factory=list)
    speed: Speed | None = None


class Extractor:
    """Extracts features below OUTPUT/features, where a later command finds them."""

    def __init__(self, splits: Splits, options: CompareOptions) -> None:
        self._splits = splits
        self._options = options
        self._folder = options.output / "features"
        # Of what has no rate of its own.
        self._at_default_rate = options.extraction
        if not (options.extraction.fps or options.extraction.frame_stride):
            self._at_default_rate = replace(options.extraction, fps=choose_default_fps(splits))

    def describe_by_hand(self) -> tuple[Vectors, Vectors]:
        """Return the hand-made features of both splits, those of a video concatenated."""
        extraction = self._at_default_rate
        rate = DataConfig(frame_stride=extraction.frame_stride, fps=extraction.fps)
        vectors = []
        for split in self._splits:
            log(f"{split.name}: features made by hand", sys.stderr)
            folder = self._folder / "hand-made" / split.name
            vectors.append(describe_by_hand(split.dataset, folder, rate))
        return vectors[0], vectors[1]

    def encode_untrained(self) -> Candidate:
        """Encode all videos with random weights, which are the same every time."""
        file = self._options.output / "untrained.safetensors"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            channels = self._splits.training.dataset.channels
            config = replace(UNTRAINED_CONFIG, in_channels=channels)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                state = VideoEncoder(config).state_dict()
            metadata = pretrained.make_metadata(config, rate={"fps": DEFAULT_FPS})
            pretrained.save(file, state, metadata)
        folder = self._folder / "untrained"
        (candidate,) = self._encode(
            str(file), open_encoder(file), folder, extraction=self._at_default_rate
        )
        candidate.name = UNTRAINED
        candidate.kind = "untrained"
        return candidate

    def encode(self, model: str, encoder: Encoder) -> list[Candidate]:
        """Encode all videos, unless they are, and return a row; of an image model two.

        The second row of an image model has the mean difference of neighboring frames, too.
        """
        folder = self._folder / name_folder(model)
        return self._encode(model, encoder, folder, extraction=self._options.extraction)

    def _encode(
        self, model: str, encoder: Encoder, folder: Path, *, extraction: ExtractionOptions
    ) -> list[Candidate]:
        kind = find_kind(model, encoder)
        width = encoder.dim
        is_of_images = isinstance(encoder, FrameEncoder)
        if isinstance(encoder, FrameEncoder):
            encoder.frames = "difference"
        folders = [folder / split.name for split in self._splits]
        extraction = replace(extraction, tokens=self._takes_tokens(folders))
        if extraction.tokens:
            encoder = CoarseEncoder(encoder)
        encoder = encoder.to(self._options.device)
        extracted = []
        for split, output in zip(self._splits, folders, strict=True):
            log(f"{split.name}: features of {model}", sys.stderr)
            extracted.append(extract_vectors(split.location, output, encoder, model, extraction))
        vectors = (extracted[0], extracted[1])
        speed = self._measure_speed(encoder, folder / "speed.json")
        if not is_of_images:
            return [Candidate(model, kind, vectors, model, folders, speed)]
        of_frames = (cut_vectors(extracted[0], width), cut_vectors(extracted[1], width))
        return [
            Candidate(model, kind, of_frames, model, folders, speed),
            Candidate(f"{model} + differences", kind, vectors, model, [], speed),
        ]

    def _takes_tokens(self, folders: Sequence[Path]) -> bool:
        """Return whether tokens are measured, or were stored by an earlier comparison."""
        if "attentive" in self._options.measures:
            return True
        begun = [folder for folder in folders if (folder / FILE).is_file()]
        return any(read_settings(folder)["tokens"] for folder in begun)

    def _measure_speed(self, encoder: Encoder, file: Path) -> Speed:
        """Time an encoder on a batch of noise, unless `file` has its speed on this device."""
        device = self._options.device
        name = get_device_name(device)
        if file.is_file():
            stored = json.loads(file.read_text(encoding="utf-8"))
            if stored["device"] == name:
                return Speed(stored["frames_per_second"], stored["gib"])
        batch_size = self._options.extraction.batch_size
        shape = (batch_size, encoder.num_frames, *encoder.image_size, encoder.channels)
        clips = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        (milliseconds,) = time_calls(lambda: encode_clips(encoder, clips), device, 1, 1)
        num_frames = batch_size * encoder.num_frames
        speed = Speed(num_frames / milliseconds * 1e3, peak_memory_gib(device))
        write_json(file, {"device": name, **speed._asdict()})
        return speed


def choose_default_fps(splits: Splits) -> float:
    """Return DEFAULT_FPS or, down to MIN_FPS, the frame rate of the slowest stored video."""
    samples = chain(splits.training.samples, splits.validation.samples)
    slowest = min(sample.fps for sample in samples)
    return min(DEFAULT_FPS, max(MIN_FPS, slowest))


def find_kind(model: str, encoder: Encoder) -> Kind:
    """Return whether an encoder is of a run of the user's, or of somebody else."""
    if isinstance(encoder, OwnEncoder) and run_of(find_file(local_run(model))) is not None:
        return "own"
    return "published"


def cut_vectors(vectors: Vectors, width: int) -> Vectors:
    """Return the part of an image model's vectors that the order of frames does not change.

    The vector of a video is the mean and the deviation over windows of a mean over frames, `width`
    numbers, and a mean difference, as many.
    """
    cut = {}
    for key, vector in vectors.items():
        cut[key] = torch.cat((vector[:width], vector[2 * width : 3 * width]))
    return cut


def name_folder(model: str) -> str:
    """Return the name of a model's folder: runs/mine is runs_mine-1a2b3c4d.

    The digits tell it from the file runs_mine.
    """
    digest = hashlib.sha256(model.encode()).hexdigest()
    readable = re.sub(r"[^\w.-]+", "_", model).strip("_.")
    return f"{readable[-80:]}-{digest[:8]}"
