"""The loss that teaches the token sampler to hide what is hard to reconstruct."""

from torch import Tensor


def sampling_loss(log_probs: Tensor, masked_ids: Tensor, loss_per_token: Tensor) -> Tensor:
    """log_probs fp32 [B, N], masked_ids int64 [B, M], loss_per_token fp32 [B, M] -> fp32 scalar.

    - mean over clips and masked tokens of log P_i · loss_i; loss_per_token is a constant, it gets no gradient.
    """
    return definition(log_probs, masked_ids, loss_per_token)


def definition(log_probs: Tensor, masked_ids: Tensor, loss_per_token: Tensor) -> Tensor:
    return -(log_probs.gather(1, masked_ids) * loss_per_token.detach()).mean()
