"""Evaluate a model during training on videos it is not trained on: loss, k-NN accuracy and rank of its features."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from common.devices import autocast_to
from figures.clips import read_clips
from figures.reconstruction import figure_rows, render_figure
from model.adamae import AdaMAE
from model.encoder import EncoderModel, encode
from pipeline.loader import ClipLoader
from pipeline.planning.plan import EvaluationPlan
from pipeline.shards.dataset import ShardDataset
from training.config import TrainConfig
from training.distributed import Distributed, sum_over_ranks

MAX_VIDEOS = 1024  # of a large dataset always the same ones: an evaluation must not take as long as training
NUM_NEIGHBORS, TEMPERATURE = 20, 0.07  # of the k-NN classifier, as DINO's (Caron et al. 2021)
MASK_SEED = 0  # masks are the same at every evaluation, and in every run
NUM_PLOTTED = 2
PLOT_WIDTH = 1000  # pixels: there are many of these images in a run


class HeldOut:
    """The held-out videos, one clip each; the same metrics at any number of ranks."""

    def __init__(self, config: TrainConfig) -> None:
        """Raises InputError if evaluation.shards cannot be read."""
        self.config = config
        self.dataset = ShardDataset.open(config.evaluation.shards, config.data)
        subset = min(MAX_VIDEOS, len(self.dataset.samples))
        self.data = replace(config.data, subset=subset, cached_batch=False)

    def evaluate(self, model: EncoderModel, dist: Distributed) -> dict[str, float]:
        """Return reconstruction loss (of an AdaMAE), k-NN top-1 accuracy (where there are labels) and RankMe."""
        losses, features, labels = self._embed(model, dist)
        metrics = {"rankme": rankme(features)}
        if isinstance(model, AdaMAE):
            metrics["reconstruction_loss"] = losses.mean().item()
        if len(self.dataset.info.classes) > 1 and bool((labels >= 0).all()):
            metrics["knn_top1"] = knn_top1(features, labels)
        return metrics

    @torch.no_grad()
    def _embed(
        self, model: EncoderModel, dist: Distributed
    ) -> tuple[Float[Tensor, " V"], Float[Tensor, "V D"], Int[Tensor, " V"]]:
        """Return loss, features and label of every video, on the CPU."""
        shape, config = self.config.model, self.config
        plan = EvaluationPlan(
            self.dataset, self.data, num_frames=shape.num_frames, image_size=shape.image_size,
            batch_size=min(config.batch_size, 32), rank=dist.rank, world_size=dist.world_size,
        )  # fmt: skip
        losses = torch.zeros(len(plan), device=dist.device)
        features = torch.zeros(len(plan), shape.dimensions.encoder_width, device=dist.device)
        labels = torch.zeros(len(plan), dtype=torch.int64, device=dist.device)
        assert isinstance(model, nn.Module)
        was_training = model.training
        model.eval()
        try:
            with ClipLoader(self.dataset, plan, dist.device, self.data, quarantine=None) as loader:
                for batch in loader.batches(first=0):
                    rows = slice(batch.positions[0], batch.positions[-1] + 1)
                    labels[rows] = batch.labels
                    with autocast_to(dist.device, config.precision), torch.compiler.set_stance("force_eager"):
                        if isinstance(model, AdaMAE):
                            losses[rows] = model(batch.clip, MASK_SEED, batch.positions[0]).loss_per_token.mean(dim=1)
                        features[rows] = encode(model, batch.clip).pooled.float()
        finally:
            model.train(was_training)
        return sum_over_ranks(losses).cpu(), sum_over_ranks(features).cpu(), sum_over_ranks(labels).cpu()


def knn_top1(features: Float[Tensor, "V D"], labels: Int[Tensor, " V"]) -> float:
    """Compute leave-one-out 20-NN accuracy by cosine similarity of centered features."""
    directions = F.normalize(features - features.mean(dim=0), dim=1)
    similarity = (directions @ directions.T).fill_diagonal_(-torch.inf)  # a video is not its own neighbor
    nearest = similarity.topk(min(NUM_NEIGHBORS, len(labels) - 1), dim=1)
    votes = F.one_hot(labels[nearest.indices]) * (nearest.values / TEMPERATURE).exp()[..., None]
    return float((votes.sum(dim=1).argmax(dim=1) == labels).float().mean())


def rankme(features: Float[Tensor, "V D"]) -> float:
    """Compute the smooth rank of the features (Garrido et al. 2023): 1 if they are all alike, at most D."""
    values = np.linalg.svd(features.numpy().astype(np.float64), compute_uv=False)
    p = values / max(values.sum(), 1e-12) + 1e-7
    return float(np.exp(-(p * np.log(p)).sum()))


class ReconstructionPlots:
    """The paper's figure of two fixed clips, plotted at every evaluation."""

    def __init__(self, config: TrainConfig) -> None:
        dataset = ShardDataset.open(config.evaluation.shards or config.data, config.data)
        shape = config.model.num_frames, config.model.image_size
        self.clips = list(read_clips([dataset], *shape, config.data.frame_stride, limit=NUM_PLOTTED))

    def plot(self, model: AdaMAE) -> dict[str, Image.Image]:
        """Return an image per clip, by name."""
        device = next(model.parameters()).device
        images = {}
        for clip in self.clips:
            with torch.compiler.set_stance("force_eager"):  # one clip without gradient is no graph worth compiling
                maps = model.reconstruct(clip.frames[None].to(device))
            images[clip.name] = render_figure(figure_rows(maps), model.config, clip.times, PLOT_WIDTH)
        return images
