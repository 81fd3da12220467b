"""AdamW, its parameter groups, and the learning rate as a function of the step."""

import math
from dataclasses import dataclass

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.probe import Probe
from training.config import OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then half a cosine: the learning rate is a function of the step, so nothing has to be resumed."""

    peak_lr: float
    min_lr: float
    warmup_lr: float
    warmup_steps: int
    total_steps: int

    @classmethod
    def of(cls, config: OptimizerConfig, global_batch: int, steps_per_epoch: float, total_steps: int) -> "Schedule":
        scale = global_batch / 256
        return cls(
            config.base_lr * scale,
            config.min_lr * scale,
            config.warmup_lr * scale,
            round(config.warmup_epochs * steps_per_epoch),
            total_steps,
        )

    def lr(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.warmup_lr + (self.peak_lr - self.warmup_lr) * step / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.min_lr + (self.peak_lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def make_optimizer(
    model: AdaMAE | VideoClassifier | Probe, config: OptimizerConfig, layer_decay: float = 1.0
) -> torch.optim.Optimizer:
    """Fused AdamW: one kernel a step on CUDA, and able to skip an update without asking the host (`update`).

    With state_bits 8 torchao's, whose moments are quantized in blocks of 256 (Dettmers et al. 2022).
    layer_decay: of a VideoClassifier, each block's learning rate as a share of the next one's.
    """
    decay, never = config.weight_decay, model.no_weight_decay()
    if layer_decay == 1:
        groups = param_groups_weight_decay(model, decay, no_weight_decay_list=never)
    else:
        groups = param_groups_layer_decay(model, decay, never, layer_decay=layer_decay)
    betas = (config.beta1, config.beta2)
    if config.state_bits == 32:
        return torch.optim.AdamW(groups, lr=config.base_lr, betas=betas, fused=True)
    from torchao.optim import AdamW8bit  # 4 s to import

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=config.base_lr, betas=betas)
    return optimizer


def update(optimizer: torch.optim.Optimizer, lr: float, clip_grad_norm: float | None) -> Tensor:
    """One optimizer step with this learning rate; returns the gradient's norm, on the device.

    A gradient that is not finite changes nothing: fused AdamW reads `found_inf` on the device, so there is no host
    synchronisation, and the caller sees the norm when it logs. torchao's AdamW cannot: there the host waits to see it.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if clip_grad_norm is not None:
        factor = (clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    if isinstance(optimizer, torch.optim.AdamW) or norm.isfinite():
        _set_lr(optimizer, lr)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):  # torchao's, which its compiled update reads without compiling again
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
