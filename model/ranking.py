"""What a sampler learns from the order of the errors alone, however little they differ."""

from jaxtyping import Float, Int
from torch import Tensor


def ranking_loss(
    log_probs: Float[Tensor, "B N"], ids: Int[Tensor, "B M"], errors: Float[Tensor, "B M"]
) -> Float[Tensor, ""]:
    """- mean log-probability with which draws one after the other, without replacement, take the hardest tokens first.

    That is Plackett and Luce's law, after which Gumbel-top-k draws, and says of any two tokens that i comes before j
    with P_i / (P_i + P_j). Errors may be scaled or shifted without an effect; HPM's loss for images (Wang et al. 2023)
    is alike. `errors` are constants.
    """
    hardest_first = errors.argsort(dim=1, descending=True, stable=True)
    scores = log_probs.gather(1, ids.gather(1, hardest_first))
    still_there = scores.flip(1).logcumsumexp(dim=1).flip(1)
    return (still_there - scores).mean()
