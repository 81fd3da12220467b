"""The loss that teaches the token sampler to mask what is hard to reconstruct.

arXiv 2211.09120 §3.3.
"""

from jaxtyping import Float, Int
from torch import Tensor

from adamae.kernels.launch import check, check_ids, check_shape


def sampling_loss(
    log_probs: Float[Tensor, "B N"],
    masked_ids: Int[Tensor, "B M"],
    loss_per_token: Float[Tensor, "B M"],
) -> Float[Tensor, ""]:
    """Return the mean of -log P_i · loss_i over all masked tokens i of all clips, in fp32.

    Only log_probs gets a gradient: loss_per_token is taken as a constant. With P of 0.5 and 0.25 at
    two masked tokens, and losses of 2 and 4, it is (0.693 · 2 + 1.386 · 4) / 2 = 3.466. Raise
    InputError if shapes do not fit, or no token is masked.
    """
    check_shape("log_probs", log_probs, "B", "N")
    check_ids("masked_ids", masked_ids, log_probs)
    check(masked_ids.numel() > 0, "masked_ids are empty: there is no loss without a masked token")
    check_shape("loss_per_token", loss_per_token, *masked_ids.shape)
    masked_log_probs = log_probs.gather(1, masked_ids)
    # A Triton kernel would save an eager step five small launches, and a compiled one nothing.
    return -(masked_log_probs * loss_per_token.detach()).mean()
