"""Image models as encoders of clips, frame by frame."""

from abc import abstractmethod
from typing import Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from xxhash import xxh3_128_digest

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
        images = self._encode_once(clip.flatten(0, 1))
        tokens = images.tokens.unflatten(0, clip.shape[:2]).flatten(1, 2)
        vectors = images.pooled.unflatten(0, clip.shape[:2])
        return Features(self._pool_frames(vectors), tokens)

    def _encode_once(self, images: UInt8[Tensor, "B H W 3"]) -> Features:
        """Encode images; on a CPU, those that are the same are encoded once.

        Windows along a video overlap: of 8 windows of 16 frames, each 4 frames after the last one,
        44 of 128 frames differ. On a GPU, to compare them would keep it waiting.
        """
        if images.device.type != "cpu":
            return self.encode_images(images)
        digests = [xxh3_128_digest(image.tobytes()) for image in images.numpy()]
        rows = {digest: row for row, digest in enumerate(dict.fromkeys(digests))}
        firsts = [digests.index(digest) for digest in rows]
        pooled, tokens = self.encode_images(images[firsts])
        repeated = [rows[digest] for digest in digests]
        return Features(pooled[repeated], tokens[repeated])

    def _pool_frames(self, vectors: Float[Tensor, "B T D"]) -> Float[Tensor, "B D2"]:
        mean = vectors.mean(dim=1)
        if self.frames == "mean":
            return mean
        change = vectors.diff(dim=1).abs().mean(dim=1)
        return torch.cat((mean, change), dim=1)
