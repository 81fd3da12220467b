"""TimeSformer (arXiv 2102.05095) in transformers' layout."""

from pathlib import Path

from einops import rearrange

from adamae.common.errors import InputError
from adamae.model.channels import Clip
from adamae.model.encoder import Features
from adamae.model.encoders.encoder import Encoder, check_fixed_shape, count_patches
from adamae.model.encoders.normalization import Processor
from adamae.model.encoders.transformers_models import load_model, read_model_config


class TimesformerEncoder(Encoder):
    """Takes clips of the shape that it was trained on.

    A clip's vector is the class token, which its classifiers read.
    """

    def __init__(
        self, path: Path, num_frames: int | None, image_size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        processor = Processor(path)
        self.normalize = processor.make_normalization()
        config = read_model_config("TimesformerConfig", path)
        if config.attention_type == "space_only":
            raise InputError(
                f"{path} is a TimeSformer without attention over time, which gives no tokens of"
                " frames: take one with divided attention"
            )
        self.num_frames = config.num_frames
        self.image_size = processor.image_size(config.image_size)
        check_fixed_shape(self, "a TimeSformer", num_frames, image_size)
        patch = (1, config.patch_size, config.patch_size)
        self.grid = count_patches(self.num_frames, self.image_size, patch)
        self.dim = config.hidden_size
        self.model = load_model("TimesformerModel", path, config)

    def encode(self, clip: Clip) -> Features:
        tokens = self.model(self.normalize(clip)).last_hidden_state
        # Behind the class token, all frames of a patch follow each other.
        by_frame = rearrange(tokens[:, 1:], "b (n t) d -> b (t n) d", t=self.num_frames)
        return Features(tokens[:, 0], by_frame)
