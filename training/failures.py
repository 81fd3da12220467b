"""What stops a step in the middle of a run, said in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from devices import full_memory_explained
from errors import InputError
from kernels.gumbel_topk import NOTHING_TO_DRAW

DEVICE_ASSERTION = "device-side assert triggered"  # in CUDA's own words; what it was about stands on stderr already
CALM = "take a lower optimizer.base_lr or set optimizer.clip_grad_norm, in another run folder"


@contextmanager
def failures_explained() -> Iterator[None]:
    """Raises InputError for a GPU that is too small and for numbers that have run away; lets all else pass."""
    with full_memory_explained(
        "lower batch_size (and, without global_batch, raise accumulate by as much), or set"
        " model.activation_checkpointing=true"
    ):
        try:
            yield
        except RuntimeError as error:
            if NOTHING_TO_DRAW in str(error):
                raise InputError(
                    f"the run has diverged: the sampler's logits are not finite any more; {CALM}"
                ) from error
            if DEVICE_ASSERTION in str(error):
                raise InputError(
                    "a check on the GPU has failed; the lines above name it, and if it is about logits, the run has"
                    f" diverged; {CALM}"
                ) from error
            raise
