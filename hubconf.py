"""Entry points of torch.hub: `torch.hub.load(REPOSITORY, "video_encoder", "user/name")`; see docs/weights.md."""

from model.weights.load_model import load_adamae, load_encoder

dependencies = ["torch", "einops", "huggingface_hub", "jaxtyping", "msgspec", "safetensors", "timm"]
adamae, video_encoder = load_adamae, load_encoder
