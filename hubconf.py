"""Entry points of torch.hub: `torch.hub.load(REPOSITORY, "video_encoder", "user/name")`.

See docs/weights.md.
"""

import os
import sys

from adamae.model.load_adamae import load_adamae
from adamae.model.weights.load_model import load_encoder

# torch.hub removes the entry that it has put on sys.path, and fails if it is gone. Importing adamae
# has removed it.
sys.path.insert(0, os.path.dirname(__file__))

# The names are torch.hub's: it checks that these are installed before it calls an entry point.
dependencies = ["torch", "einops", "huggingface_hub", "jaxtyping", "msgspec", "safetensors", "timm"]
adamae = load_adamae
video_encoder = load_encoder
