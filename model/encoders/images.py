"""Image models as encoders of clips, frame by frame."""

from abc import abstractmethod
from typing import Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from adamae.model.channels import Clip
from adamae.model.encoder import Features
from adamae.model.encoders.encoder import Encoder

# How the vectors of frames become one of the clip.
FramePooling = Literal["mean", "difference"]
# As VideoMAE's clips have, and as AdaMAE's.
DEFAULT_FRAMES = 16


class FrameEncoder(Encoder):
    """Base class: an image model encodes each frame by itself.

    A frame's vector is the one that the model's own library pools: the class token of DINOv2,
    DINOv3 and CLIP, the attention pooling of SigLIP, the global pool of timm. That of a clip is
    their mean; with `frames="difference"` the mean absolute difference of neighboring frames is
    appended, which has twice the width and depends on the order of frames.
    """

    frames: FramePooling = "mean"

    @abstractmethod
    def encode_images(self, images: UInt8[Tensor, "B H W 3"]) -> Features:
        """Compute the patch tokens [B, N, D] of images, and one vector [B, D] of each."""

    def encode(self, clip: Clip) -> Features:
        images = self.encode_images(clip.flatten(0, 1))
        tokens = images.tokens.unflatten(0, clip.shape[:2]).flatten(1, 2)
        vectors = images.pooled.unflatten(0, clip.shape[:2])
        return Features(self._pool_frames(vectors), tokens)

    def _pool_frames(self, vectors: Float[Tensor, "B T D"]) -> Float[Tensor, "B D2"]:
        mean = vectors.mean(dim=1)
        if self.frames == "mean":
            return mean
        change = vectors.diff(dim=1).abs().mean(dim=1)
        return torch.cat((mean, change), dim=1)
