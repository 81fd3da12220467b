"""The clips of every step: as many batches as this process has forward passes, until the run is asked to stop."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from model.config import ModelConfig
from pipeline.loader import Batch
from training.distributed import Agreement, Distributed
from training.interrupt import StopRequest

FILLER_CLIPS = 2  # mixing takes pairs, and one clip has no variance


@dataclass(frozen=True)
class Feed:
    """In several processes, a step is taken by all or by none, and in its last backward pass DDP waits for all.

    A process that has been asked to stop goes through that pass with a few black clips instead of waiting for its own,
    which may never come. Whether one did is asked before the pass and read before the weights would change: the answer
    comes during the pass, and nobody waits for it.
    """

    batches: Iterator[Batch]
    passes: int  # batches of a step, in this process
    global_batch: int  # clips of a step, in all processes
    model: ModelConfig
    process: Distributed
    stop: StopRequest
    agreement: Agreement

    def of_step(self) -> Iterator[tuple[Batch, float, bool]]:
        """Batches; what to divide their losses by, so that the mean over the processes is that over the step's clips;
        and whether the processes are to take that mean now."""
        mean_clips = self.global_batch / self.process.world_size
        left = self.passes
        while left and (batch := self.stop.next_of(self.batches)) is not None:
            left -= 1
            if not left:
                self.agreement.ask(False)
            yield batch, mean_clips / len(batch.positions), not left
            if not left:
                return
        self.agreement.ask(True)
        if self.process.world_size > 1:
            with torch.compiler.set_stance("force_eager"):  # so few clips are no graph worth compiling
                yield self._filler(), 1.0, True

    def of_nothing(self) -> "Feed":
        """The same without clips: its steps are given up."""
        return replace(self, passes=0)

    def given_up(self) -> bool:
        """Whether a process, this one or another, had no clips for the step."""
        return self.agreement.any_yes()

    def _filler(self) -> Batch:
        device = self.process.device
        shape = (FILLER_CLIPS, self.model.num_frames, *self.model.frame_size, self.model.in_channels)
        clip = torch.zeros(shape, dtype=torch.uint8, device=device)
        labels = torch.zeros(FILLER_CLIPS, dtype=torch.int64, device=device)
        return Batch(clip, labels, [""] * FILLER_CLIPS, list(range(FILLER_CLIPS)))
