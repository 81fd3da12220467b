"""ViViT (arXiv 2103.15691) in transformers' layout."""

from pathlib import Path

from adamae.model.channels import Clip
from adamae.model.encoder import Features
from adamae.model.encoders.encoder import Encoder, check_fixed_shape, count_patches
from adamae.model.encoders.normalization import Processor
from adamae.model.encoders.transformers_models import load_model, read_model_config


class VivitEncoder(Encoder):
    """Takes clips of the shape that it was trained on.

    A clip's vector is the class token, which its classifiers read.
    """

    def __init__(
        self, path: Path, num_frames: int | None, image_size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        processor = Processor(path)
        self.normalize = processor.make_normalization()
        config = read_model_config("VivitConfig", path)
        self.num_frames = config.num_frames
        self.image_size = processor.image_size(config.image_size)
        check_fixed_shape(self, "a ViViT", num_frames, image_size)
        self.grid = count_patches(self.num_frames, self.image_size, tuple(config.tubelet_size))
        self.dim = config.hidden_size
        self.model = load_model("VivitModel", path, config, add_pooling_layer=False)

    def encode(self, clip: Clip) -> Features:
        tokens = self.model(self.normalize(clip)).last_hidden_state
        return Features(tokens[:, 0], tokens[:, 1:])
