"""VideoPrism (arXiv 2402.13217) in transformers' layout."""

from pathlib import Path

from adamae.model.channels import Clip
from adamae.model.encoder import Features
from adamae.model.encoders.encoder import Encoder, count_patches
from adamae.model.encoders.normalization import Processor
from adamae.model.encoders.transformers_models import load_model, read_model_config


class VideoPrismEncoder(Encoder):
    """Takes any number of frames, of any size that its patches divide: positions are interpolated.

    A clip's vector is the mean over its tokens. Of a model of videos and texts (LVT), it is the
    encoder in front of the layers that were trained with texts.
    """

    def __init__(
        self, path: Path, num_frames: int | None, image_size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        processor = Processor(path)
        self.normalize = processor.make_normalization()
        config = read_model_config("VideoPrismVisionConfig", path)
        self.num_frames = num_frames or config.num_frames
        self.image_size = image_size or processor.image_size(config.image_size)
        self.grid = count_patches(self.num_frames, self.image_size, tuple(config.tubelet_size))
        self.dim = config.hidden_size
        renamed = {r"^video_model\.vision_model\.": ""}
        self.model = load_model("VideoPrismVisionModel", path, config, renamed)

    def encode(self, clip: Clip) -> Features:
        output = self.model(self.normalize(clip), interpolate_pos_encoding=True)
        tokens = output.last_hidden_state
        return Features(tokens.mean(dim=1), tokens)
