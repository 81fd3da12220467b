"""V-JEPA 2 (arXiv 2506.09985) in transformers' layout. `vjepa2_1` has the files of V-JEPA 2.1."""

from pathlib import Path

from adamae.common.errors import InputError
from adamae.model.channels import Clip
from adamae.model.encoder import Features
from adamae.model.encoders.encoder import Encoder, count_patches
from adamae.model.encoders.normalization import Processor
from adamae.model.encoders.transformers_models import load_model, read_model_config


class VJepa2Encoder(Encoder):
    """Takes square frames of any size and number that its patches divide.

    A clip's vector is the mean over its tokens.
    """

    def __init__(
        self, path: Path, num_frames: int | None, image_size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        processor = Processor(path)
        self.normalize = processor.make_normalization()
        config = read_model_config("VJEPA2Config", path)
        self.num_frames = num_frames or config.frames_per_clip
        self.image_size = image_size or processor.image_size(config.crop_size)
        height, width = self.image_size
        if height != width:
            raise InputError(
                f"a V-JEPA 2 of transformers takes square frames, not {width}×{height} pixels: its"
                " positions are computed for squares"
            )
        # Positions follow from this side, and not from the clip that comes.
        config.crop_size = height
        patch = (config.tubelet_size, config.patch_size, config.patch_size)
        self.grid = count_patches(self.num_frames, self.image_size, patch)
        self.dim = config.hidden_size
        # Without the predictor, which only pre-training needs.
        self.model = load_model("VJEPA2Model", path, config).encoder

    def encode(self, clip: Clip) -> Features:
        tokens = self.model(self.normalize(clip)).last_hidden_state
        return Features(tokens.mean(dim=1), tokens)
