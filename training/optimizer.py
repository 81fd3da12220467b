"""AdamW, its parameter groups and its update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adamae.training.config import OptimizerConfig

NOT_DECAYED = (".positions", ".latent")  # of the token sampler, and the query of an attentive probe


def parameter_groups(
    model: nn.Module, weight_decay: float, scale_lr: Callable[[str], float] = lambda name: 1.0
) -> list[dict[str, Any]]:
    """Group parameters by weight decay, which vectors (biases, norms, the mask token) and NOT_DECAYED have none of, and
    by the factor `lr_scale` of their learning rate. timm.optim has the same for models of its own, and takes seconds to
    import."""
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = 0.0 if parameter.ndim <= 1 or name.endswith(NOT_DECAYED) else weight_decay
            key = decay, scale_lr(name)
            group = groups.setdefault(
                key, {"params": [], "weight_decay": key[0], "lr_scale": key[1]}
            )
            group["params"].append(parameter)
    return list(groups.values())


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make fused AdamW: one kernel per step on CUDA, and able to skip an update without asking the host (`update`)."""
    return torch.optim.AdamW(
        groups, lr=config.base_lr, betas=(config.beta1, config.beta2), fused=True
    )


def update(optimizer: torch.optim.Optimizer, lr: float, clip_grad_norm: float | None) -> Tensor:
    """Take one optimizer step with this learning rate; return the gradient's norm, on the device.

    A gradient that is not finite changes nothing: fused AdamW reads `found_inf` on the device, so there is no host
    synchronization, and the caller sees the norm when it logs.
    """
    gradients = [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    norm = nn.utils.get_total_norm(gradients)
    if clip_grad_norm is not None:
        torch._foreach_mul_(gradients, (clip_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
