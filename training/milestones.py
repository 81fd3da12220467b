"""What a run does between its steps: reports, checkpoints, reviews, and a last checkpoint when it stops."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

from common.errors import PeerLostError
from training import distributed
from training.config import TrainConfig
from training.interrupt import StopRequest
from training.logger import Logger
from training.manifest import TrainState
from training.report import write_report
from training.saving import Saver
from training.tasks.pretraining import Objective


@dataclass(frozen=True)
class Milestones:
    """All of a run that has something to keep or to say."""

    config: TrainConfig
    start: TrainState
    objective: Objective
    metrics: Logger
    stop: StopRequest
    saver: Saver

    def after(self, step: int) -> None:
        """Do what is due after a step."""
        is_last = step == self.metrics.horizon.total_steps
        review_due = self.objective.review_due(step, is_last)
        saving = review_due or is_last or step % self.config.checkpoint_every == 0
        if saving:
            self.metrics.flush(step)
            self.save(step)
        if review_due:
            self.review(step)
        if saving:
            self.report()

    def going_on(self, step: int) -> None:
        """Make up for a review in which the run was stopped after this step, if it was."""
        if step > 0 and self.objective.review_due(step, is_last=step == self.metrics.horizon.total_steps):
            self.review(step)

    @contextmanager
    def saved_if_left_alone(self, step: int) -> Iterator[None]:
        """The block is the step after this one, which changes nothing if another process fails in the middle of it.

        Of a GPU, whose queue then hangs, nothing can be had any more: what was saved before must do.
        """
        try:
            with distributed.others_awaited():
                yield
        except PeerLostError:
            if self.metrics.dist.device.type == "cpu":
                self.objective.after_none()
                self.save(step)
            raise

    def stopped(self, step: int) -> NoReturn:
        """End the run as it has been asked to; `step` was its last, 0 if it has taken none."""
        self.metrics.flush(step)
        self.save(step)
        self.report()
        self.saver.join()
        distributed.wait_for_all()  # torchrun ends them all as soon as one of them has gone
        raise KeyboardInterrupt

    def save(self, step: int) -> None:
        """Begin to write the checkpoint of a step, in the first process; nothing before the first step."""
        if self.metrics.dist.is_main and step > 0:
            self.saver.save(replace(self.start, step=step), is_learning=self.metrics.idle_steps == 0)

    def report(self) -> None:
        """Begin to draw the run's page anew, in the first process."""
        if self.metrics.dist.is_main:
            folder, steps = self.metrics.run.path, self.metrics.horizon.total_steps
            self.saver.afterwards(lambda: write_report(folder, self.config, steps))

    def review(self, step: int) -> None:
        """What the objective does now and then, once for every step: stopped in it, a run makes up for it at its
        start."""
        done = self.saver.is_reviewed(step)
        # A network's file system may not show it to all at once.
        if distributed.any_process(done, self.metrics.dist.device):
            return
        with self.metrics.paused(), self.stop.at_once():
            self.objective.review(step, self.metrics)
        if self.metrics.dist.is_main:
            self.saver.mark_reviewed(step)
