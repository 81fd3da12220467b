"""What stops a step in the middle of a run, said in one sentence."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

from common.devices import explain_out_of_memory
from common.errors import InputError
from kernels.gumbel_topk import LOGITS_NOT_FINITE
from training.checkpoint import whole
from training.config import TrainConfig
from training.run_dir import local_path

DEVICE_ASSERTION = "device-side assert triggered"  # in CUDA's own words; what it was about stands on stderr already
CALM = "take a lower optimizer.base_lr or set optimizer.clip_grad_norm"


class DivergedError(InputError):
    """The numbers of a run have run away; the message says which."""


def way_back_explained(train: Callable[[TrainConfig], None]) -> Callable[[TrainConfig], None]:
    """Let the sentence on a run that has diverged end in what to go on from, and how."""

    @wraps(train)
    def explained(config: TrainConfig) -> None:
        try:
            train(config)
        except DivergedError as error:
            raise InputError(f"{error}; {_way_back(config)}") from error

    return explained


def _way_back(config: TrainConfig) -> str:
    saved = [folder.name for folder in whole(local_path(config.run) / "checkpoints")]
    if not saved:
        return f"{CALM}, in another run folder"
    older = f", or after removing newer ones from {' or '.join(reversed(saved[:-1]))}" if saved[:-1] else ""
    return (
        f"what was saved is finite: copy {config.run} to another folder, {CALM} in the config.yaml there, and"
        f" `train.py --config THERE/config.yaml run=THERE` goes on from {saved[-1]}{older}"
    )


@contextmanager
def failures_explained() -> Iterator[None]:
    """Raises InputError for a GPU that is too small and for numbers that have run away; lets all else pass."""
    with explain_out_of_memory(
        "lower batch_size (and, without global_batch, raise accumulate by as much), or set"
        " model.activation_checkpointing=true"
    ):
        try:
            yield
        except RuntimeError as error:
            if LOGITS_NOT_FINITE in str(error):
                raise DivergedError("the run has diverged: the sampler's logits are not finite any more") from error
            if DEVICE_ASSERTION in str(error):
                raise DivergedError(
                    "a check on the GPU has failed; the lines above name it, and if it is about logits, the run has"
                    " diverged"
                ) from error
            raise
