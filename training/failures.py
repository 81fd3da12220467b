"""Explain in one sentence why a training step has failed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adamae.common.devices import explain_out_of_memory
from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.kernels.gumbel_topk import LOGITS_NOT_FINITE
from adamae.training.config import TrainConfig

# How CUDA reports any failed assertion of a kernel. Which one it was, CUDA has printed on stderr.
DEVICE_ASSERTION = "device-side assert triggered"


class DivergedError(InputError):
    """Losses, gradients or weights are not finite any more; the message says which."""


@contextmanager
def explain_failures(config: TrainConfig) -> Iterator[None]:
    """Raise InputError where a GPU's memory is too small, DivergedError where a run diverges."""
    advice = "set global_batch to the clips of a step, and lower batch_size"
    if config.task == "pretrain":
        advice += " or set model.activation_checkpointing=true"
    predictor = f"python benchmarks/memory_vs_ratio.py --config {config.run}/config.yaml"
    with explain_out_of_memory(f"{advice}; `{predictor}` predicts what a step needs"):
        try:
            yield
        except RuntimeError as error:
            diverged = "the run has diverged: the sampler's logits are not finite"
            if LOGITS_NOT_FINITE in str(error):
                raise DivergedError(diverged) from error
            if DEVICE_ASSERTION in str(error):
                raise DivergedError(
                    f"{diverged}, if the lines above do not name another assertion"
                ) from error
            raise
        except FileNotFoundError as error:
            if is_remote(config.run) or Path(config.run).is_dir():
                raise
            raise InputError(
                f"{config.run} was deleted while its run wrote to it: the same command begins it"
                " again"
            ) from error
