"""Weights of this project, of the authors' AdaMAE, and of VideoMAE in any layout."""

from pathlib import Path
from typing import Any

from adamae.model.channels import Clip
from adamae.model.encoder import Features, encode
from adamae.model.encoders.encoder import Encoder
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.read_config import trained_rate


class OwnEncoder(Encoder):
    """A run, a checkpoint, an export or another project's file, all tokens visible."""

    def __init__(self, path: Path, num_frames: int | None, image_size: list[int] | None) -> None:
        """Load the encoder; raise InputError if it cannot be read or takes no such clips.

        num_frames, image_size: of the clips; None: as it was trained.
        """
        super().__init__()
        changes: dict[str, Any] = {"num_frames": num_frames, "image_size": image_size}
        changes = {name: value for name, value in changes.items() if value is not None}
        self.model = load_encoder(path, **changes)
        config = self.model.config
        self.num_frames = config.num_frames
        self.image_size = config.frame_size
        self.channels = config.in_channels
        self.grid = config.grid
        self.dim = config.dimensions.encoder_width
        self.frame_rate = trained_rate(path)

    def encode(self, clip: Clip) -> Features:
        return encode(self.model, clip)
