"""Pre-training: predict masked tokens, learn which to mask (arXiv 2211.09120 §3), compare views."""

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adamae.common.logging import log as log_line
from adamae.model.adamae import AdaMAE, Output
from adamae.model.encoders.teacher import hash_teacher, make_teacher
from adamae.model.maps import reconstruct
from adamae.model.targets import make_target
from adamae.model.weights import pretrained
from adamae.model.weights.warm_start import warm_start
from adamae.pipeline.loader import Batch
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import TrainConfig
from adamae.training.distributed import Distributed
from adamae.training.held_out import HeldOut
from adamae.training.logger import Logger
from adamae.training.optimizer import parameter_groups
from adamae.training.remote_run import local_run
from adamae.training.tasks.task import Task

if TYPE_CHECKING:
    from adamae.figures.clips import Clip

# Clips of which every checkpoint logs a figure.
NUM_PLOTTED = 2
# In pixels. TensorBoard keeps the figures of all checkpoints.
PLOT_WIDTH = 1000


class Pretraining(Task):
    """An AdaMAE, its losses under masks that are a function of (seed, position), and its plots."""

    def __init__(
        self, config: TrainConfig, dataset: ShardDataset | None, dist: Distributed
    ) -> None:
        """dataset: None for a task that is only timed or measured."""
        self.config = config
        self.dist = dist
        target = make_target(config.model, make_teacher(config.model))
        self.model: AdaMAE = AdaMAE(config.model, target).to(dist.device)
        self.target_digest = hash_teacher(config.model)
        self.metadata = pretrained.make_metadata(config.model)
        self.held_out: HeldOut | None = None
        if config.evaluation.shards and dataset is not None:
            self.held_out = HeldOut(config, dataset)
        # The clips of `plot`, once they have been read.
        self.plotted: list[Clip] | None = None

    def parameter_groups(self) -> list[dict[str, Any]]:
        return parameter_groups(self.model, self.config.optimizer.weight_decay)

    def init_weights(self, source: str) -> None:
        if source:
            report = warm_start(self.model, local_run(source))
            if self.dist.is_main:
                log_line(report, sys.stderr)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        device = batch.clip.device
        # Filled on the device: a copy from the host would wait for the device, and an int would be
        # compiled into the graph, again at every step.
        seed = torch.full((), self.config.seed, dtype=torch.int64, device=device)
        offset = torch.full((), batch.positions[0], dtype=torch.int64, device=device)
        output: Output = model(batch.clip, seed, offset)
        scalars = {"loss": output.loss}
        if self.model.decoder is not None:
            scalars["reconstruction_loss"] = output.reconstruction_loss
            scalars["sampling_loss"] = output.sampling_loss
        if self.model.views is not None:
            scalars["views_loss"] = output.views_loss
        if output.log_probs is not None:
            entropy = -(output.log_probs.exp() * output.log_probs).sum(-1)
            scalars["sampler_entropy"] = entropy.mean()
        return output.loss, scalars

    def evaluate(self, step: int, log: Logger) -> None:
        if self.held_out is not None:
            log.write_evaluation(step, self.held_out.evaluate(self.model, self.dist))

    def plot(self, step: int, log: Logger) -> None:
        if self.model.decoder is None:
            # Nothing is predicted that could be shown.
            return
        # Matplotlib and the readers of users' videos: in rank 0 alone.
        from adamae.figures.clips import read_clips
        from adamae.figures.reconstruction import make_rows, render_figure

        if self.plotted is None:
            data = self.config.data
            model = self.config.model
            dataset = ShardDataset.open(self.config.evaluation.shards or data, data)
            self.plotted = list(
                read_clips([dataset], model.num_frames, model.image_size, data, limit=NUM_PLOTTED)
            )
        for clip in self.plotted:
            # A graph for a single clip without gradient would take longer to compile than it saves.
            with torch.compiler.set_stance("force_eager"):
                maps = reconstruct(self.model, clip.frames[None].to(self.dist.device))
            rows = make_rows(maps, clip.title)
            figure = render_figure([*rows.values()], self.config.model, clip.times, PLOT_WIDTH)
            log.write_image(step, clip.name, figure)
