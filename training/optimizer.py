"""AdamW, its parameter groups and its update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adamae.training.config import OptimizerConfig

# Matrices without weight decay: learned positions of the token sampler, and the query of an
# attentive probe.
NOT_DECAYED = (".positions", ".latent")


def parameter_groups(
    model: nn.Module, weight_decay: float, scale_lr: Callable[[str], float] | None = None
) -> list[dict[str, Any]]:
    """Group the trained parameters by weight decay and by the factor `lr_scale`.

    Vectors (biases, norms, the mask token) and NOT_DECAYED have no weight decay. scale_lr: returns
    the factor of the learning rate for a parameter's name; None: 1 for all.

    timm.optim has the same for models of its own, and takes seconds to import.
    """
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_decayed = parameter.ndim > 1 and not name.endswith(NOT_DECAYED)
        decay = weight_decay if is_decayed else 0.0
        lr_scale = scale_lr(name) if scale_lr else 1.0
        group = groups.setdefault(
            (decay, lr_scale), {"params": [], "weight_decay": decay, "lr_scale": lr_scale}
        )
        group["params"].append(parameter)
    return list(groups.values())


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make a fused AdamW.

    It takes one kernel per step on CUDA, and can skip an update without asking the host (`update`).
    """
    return torch.optim.AdamW(
        groups, lr=config.base_lr, betas=(config.beta1, config.beta2), fused=True
    )


def update(optimizer: torch.optim.Optimizer, lr: float, clip_grad_norm: float | None) -> Tensor:
    """Take one optimizer step with this learning rate; return the gradient's norm, on the device.

    A gradient that is not finite changes nothing: fused AdamW reads `found_inf` on the device, so
    the host need not wait for the norm, and the caller sees it when it logs.
    """
    gradients = []
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        gradients += [p.grad for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if clip_grad_norm is not None:
        # torch.nn.utils.clip_grad_norm_ would compute the norm a second time.
        torch._foreach_mul_(gradients, (clip_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
