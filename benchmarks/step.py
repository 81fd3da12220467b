"""One pre-training step as `train.py` takes it, on a clip that is at hand: forward, backward, AdamW."""

import torch
from torch import Tensor

from common.devices import autocast_to
from model.adamae import AdaMAE
from model.config import ModelConfig
from training.compiling import Compile, compile_in_place
from training.config import OptimizerConfig
from training.optimizer import make_optimizer, update


def noise_clip(config: ModelConfig, batch_size: int, device: torch.device) -> Tensor:
    """uint8 [B, T, H, W, C]; what it shows matters to no step."""
    shape = (batch_size, config.num_frames, *config.frame_size, config.in_channels)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


class PretrainingStep:
    """Callable on clips uint8 [B, T, H, W, 3] on the model's device."""

    def __init__(self, model: AdaMAE, compiled: Compile = False) -> None:
        self.model = model
        if compiled:
            compile_in_place(model, compiled)
        self.optimizer = make_optimizer(model, OptimizerConfig())
        device = next(model.parameters()).device
        self.seed, self.offset = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))

    def loss(self, clip: Tensor) -> Tensor:
        with autocast_to(clip.device, "bf16"):
            loss: Tensor = self.model(clip, self.seed, self.offset).loss
            return loss

    def update(self) -> None:
        self.offset += 1  # another draw at every step
        update(self.optimizer, lr=1e-4, clip_grad_norm=None)

    def __call__(self, clip: Tensor) -> None:
        self.loss(clip).backward()
        self.update()
