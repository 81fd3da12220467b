"""How good a model is while it learns, on videos it does not learn from: loss, k-NN accuracy, rank of its features."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from common.devices import autocast_to
from model.adamae import AdaMAE
from model.encoder import EncoderModel, encode
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.plan import EvaluationPlan
from pipeline.shards.dataset import ShardDataset
from training.config import TrainConfig
from training.distributed import Distributed, sum_over_processes

MOST_VIDEOS = 1024  # of a large dataset always the same ones: a look must not take as long as what it looks at
NEIGHBOURS, TEMPERATURE = 20, 0.07  # of the k-NN classifier, as DINO's (Caron et al. 2021)
SEED = 0  # of the masks, which are the same at every look, and in every run


class HeldOut:
    """The videos that a model is looked at with, one clip each; the same figures at any number of processes."""

    def __init__(self, config: TrainConfig, shards: str) -> None:
        """Raises InputError if the shards cannot be read."""
        self.config = config
        self.dataset = ShardDataset.open(shards, config.data)
        subset = min(MOST_VIDEOS, len(self.dataset.samples))
        self.data = replace(config.data, subset=subset, cached_batch=False)

    def figures(self, model: EncoderModel, process: Distributed) -> dict[str, float]:
        """Mean reconstruction loss (of a model that reconstructs), k-NN top-1 (where there are labels) and RankMe."""
        found, labels = self._looked_at(model, process)
        losses, features = found[:, 0], found[:, 1:]
        figures = {"rankme": rankme(features)}
        if isinstance(model, AdaMAE):
            figures["reconstruction_loss"] = losses.mean().item()
        if len(self.dataset.info.classes) > 1 and bool((labels >= 0).all()):
            figures["knn_top1"] = knn_top1(features, labels)
        return figures

    @torch.no_grad()
    def _looked_at(self, model: EncoderModel, process: Distributed) -> tuple[Float[Tensor, "V 1+D"], Int[Tensor, " V"]]:
        """Loss and features of every video, and the labels, on the CPU."""
        shape, config = self.config.model, self.config
        plan = EvaluationPlan(
            self.dataset, self.data, num_frames=shape.num_frames, image_size=shape.image_size,
            batch_size=min(config.batch_size, 32), rank=process.rank, world_size=process.world_size,
        )  # fmt: skip
        seen = torch.zeros(len(plan), 1 + shape.dimensions.encoder_width, device=process.device)
        labels = torch.zeros(len(plan), dtype=torch.int64, device=process.device)
        assert isinstance(model, nn.Module)
        was_training = model.training
        model.eval()
        try:
            with ClipLoader(self.dataset, plan, process.device, self.data, quarantine=None) as loader:
                for batch in loader.batches(first=0):
                    rows = slice(batch.positions[0], batch.positions[-1] + 1)
                    labels[rows] = batch.labels
                    with autocast_to(process.device, config.precision), torch.compiler.set_stance("force_eager"):
                        seen[rows, 0] = _losses(model, batch)
                        seen[rows, 1:] = encode(model, batch.clip).pooled.float()
        finally:
            model.train(was_training)
        return sum_over_processes(seen).cpu(), sum_over_processes(labels).cpu()


def _losses(model: nn.Module, batch: Batch) -> Float[Tensor, " B"] | float:
    if not isinstance(model, AdaMAE):
        return 0.0
    return model(batch.clip, SEED, batch.positions[0]).loss_per_token.mean(dim=1)


def knn_top1(features: Float[Tensor, "V D"], labels: Int[Tensor, " V"]) -> float:
    """Share of the videos whose class is that of their nearest others, by cosine; features are centred before."""
    directions = F.normalize(features - features.mean(dim=0), dim=1)
    alike = (directions @ directions.T).fill_diagonal_(-torch.inf)  # a video is not its own neighbour
    nearest = alike.topk(min(NEIGHBOURS, len(labels) - 1), dim=1)
    votes = F.one_hot(labels[nearest.indices]) * (nearest.values / TEMPERATURE).exp()[..., None]
    return float((votes.sum(dim=1).argmax(dim=1) == labels).float().mean())


def rankme(features: Float[Tensor, "V D"]) -> float:
    """Smooth rank of the features (Garrido et al. 2023): 1 where they are all alike, at most D."""
    values = np.linalg.svd(features.numpy().astype(np.float64), compute_uv=False)
    shares = values / max(values.sum(), 1e-12) + 1e-7
    return float(np.exp(-(shares * np.log(shares)).sum()))
