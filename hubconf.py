"""Entry points of torch.hub: `torch.hub.load(REPOSITORY, "video_encoder", "user/name")`; see docs/weights.md."""

from model.adamae import AdaMAE
from model.encoder import VideoEncoder

dependencies = ["torch", "einops", "huggingface_hub", "jaxtyping", "jsonargparse", "safetensors", "timm"]
adamae, video_encoder = AdaMAE.from_pretrained, VideoEncoder.from_pretrained
