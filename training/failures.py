"""Explain failures of a step in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from adamae.common.devices import explain_out_of_memory
from adamae.common.errors import InputError
from adamae.kernels.gumbel_topk import LOGITS_NOT_FINITE
from adamae.training.config import TrainConfig

DEVICE_ASSERTION = (
    "device-side assert triggered"  # in CUDA's words; what it was about is on stderr already
)


class DivergedError(InputError):
    """Losses, gradients or weights are not finite any more; the message says which."""


@contextmanager
def explain_failures(config: TrainConfig) -> Iterator[None]:
    """Raise InputError where a GPU's memory does not suffice, DivergedError where a run diverges."""
    checkpointing = (
        "" if config.task != "pretrain" else " or set model.activation_checkpointing=true"
    )
    with explain_out_of_memory(
        f"set global_batch to the clips of a step, and lower batch_size{checkpointing};"
        f" `python benchmarks/memory_vs_ratio.py --config {config.run}/config.yaml` predicts what a step needs"
    ):
        try:
            yield
        except RuntimeError as error:
            if LOGITS_NOT_FINITE in str(error) or DEVICE_ASSERTION in str(error):
                where = (
                    ""
                    if LOGITS_NOT_FINITE in str(error)
                    else ", if the lines above do not name another assertion"
                )
                raise DivergedError(
                    f"the run has diverged: the sampler's logits are not finite{where}"
                ) from error
            raise
