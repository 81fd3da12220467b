"""Weights of this project, of the authors' AdaMAE, and of VideoMAE in any layout."""

from pathlib import Path
from typing import Any

from adamae.common.devices import is_structure_only
from adamae.common.errors import InputError
from adamae.kernels.patchify import IMAGENET_MEAN, IMAGENET_STD
from adamae.model.channels import Clip
from adamae.model.encoder import Features, encode
from adamae.model.encoders.encoder import Encoder
from adamae.model.encoders.normalization import Normalization, Processor, find_processor
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.read_config import trained_rate


class OwnEncoder(Encoder):
    """A run, a checkpoint, an export or another project's file, all tokens visible."""

    def __init__(
        self, path: Path, num_frames: int | None, image_size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        _check_normalization(path)
        changes: dict[str, Any] = {}
        if num_frames is not None:
            changes["num_frames"] = num_frames
        if image_size is not None:
            changes["image_size"] = list(image_size)
        self.model = load_encoder(path, **changes)
        # All tokens are encoded, and none is selected.
        self.model.token_sampler = None
        config = self.model.config
        self.num_frames = config.num_frames
        self.image_size = config.frame_size
        self.channels = config.in_channels
        self.grid = config.grid
        self.dim = config.dimensions.encoder_width
        self.frame_rate = trained_rate(path)

    def encode(self, clip: Clip) -> Features:
        return encode(self.model, clip)


def _check_normalization(path: Path) -> None:
    """Raise InputError if a folder of transformers says that frames are normalized otherwise."""
    if find_processor(path) is None or is_structure_only():
        return
    processor = Processor(path)
    expected = Normalization(IMAGENET_MEAN, IMAGENET_STD)
    described = processor.make_normalization()
    has_scale = described.scale.allclose(expected.scale)
    if not has_scale or not described.shift.allclose(expected.shift):
        raise InputError(
            f"{processor.file} normalizes frames with another mean and deviation than ImageNet's,"
            " which every published VideoMAE has: set image_mean and image_std to those"
        )
