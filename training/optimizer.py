"""AdamW, its parameter groups and its update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from training.config import OptimizerConfig


def parameter_groups(
    model: nn.Module, weight_decay: float, no_decay: set[str], scale_lr: Callable[[str], float] = lambda name: 1.0
) -> list[dict[str, Any]]:
    """Group parameters by weight decay, which biases, norms and those in `no_decay` have none of, and by the factor
    `lr_scale` of their learning rate. timm.optim has the same for models of its own, and takes seconds to import."""
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = 0.0 if parameter.ndim <= 1 or name.endswith(".bias") or name in no_decay else weight_decay
            key = decay, scale_lr(name)
            group = groups.setdefault(key, {"params": [], "weight_decay": key[0], "lr_scale": key[1]})
            group["params"].append(parameter)
    return list(groups.values())


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make fused AdamW: one kernel per step on CUDA, and able to skip an update without asking the host (`update`).

    With state_bits 8 torchao's, whose moments are quantized in blocks of 256 (Dettmers et al. 2022).
    """
    betas = (config.beta1, config.beta2)
    if config.state_bits == 32:
        return torch.optim.AdamW(groups, lr=config.base_lr, betas=betas, fused=True)
    from torchao.optim import AdamW8bit  # 4 s to import

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=config.base_lr, betas=betas)
    return optimizer


def update(optimizer: torch.optim.Optimizer, lr: float, clip_grad_norm: float | None) -> Tensor:
    """Take one optimizer step with this learning rate; return the gradient's norm, on the device.

    A gradient that is not finite changes nothing: fused AdamW reads `found_inf` on the device, so there is no host
    synchronization, and the caller sees the norm when it logs. torchao's AdamW cannot: there the host waits to see it.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if clip_grad_norm is not None:
        torch._foreach_mul_(gradients, (clip_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    is_fused = isinstance(optimizer, torch.optim.AdamW)
    if is_fused:
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    if is_fused or norm.isfinite():
        for group in optimizer.param_groups:
            group_lr = lr * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], Tensor):  # torchao's, which its compiled update reads without compiling again
                group["lr"].fill_(group_lr)
            else:
                group["lr"] = group_lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
