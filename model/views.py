"""Views of a video: their features are drawn together, and those of other videos are kept apart.

The views are the clips that the loader makes of one decoded video (data.repeats), each with frames,
a crop and visible tokens of its own. They are neighbors in the batch. That features of few tokens
need no pixels to be predicted is shown by LeVJEPA (arXiv 2608.27395).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from adamae.model.config import ModelConfig
from adamae.model.registry import VIEWS_LOSSES, find_class

# Widths of the projector, which is dropped after pre-training: features before it are better ones
# (SimCLR, arXiv 2002.05709 §4.2).
HIDDEN_WIDTH = 512
PROJECTION_WIDTH = 128
# Of SimCLR, too.
TEMPERATURE = 0.1


class Views(nn.Module):
    """Computes the loss of features whose videos have several views."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_views = config.views
        self.compare = find_class(VIEWS_LOSSES, config.views_loss)
        # Set by parallelize(): only ranks of a run compute the same steps at the same time.
        self.compares_ranks = False
        self.projector = make_projector(config.dimensions.encoder_width)

    def forward(self, features: Float[Tensor, "B K D"]) -> Float[Tensor, ""]:
        """Return the loss of the encoded visible tokens of B clips, in fp32."""
        # Averaged before ranks exchange them: K times fewer values travel.
        pooled = features.float().mean(dim=1)
        if self.compares_ranks:
            pooled = gather_over_ranks(pooled)
        with torch.autocast(features.device.type, enabled=False):
            projections = self.projector(pooled)
            return self.compare(projections.unflatten(0, (-1, self.num_views)))


def make_projector(width: int) -> nn.Sequential:
    """Make an MLP. Its BatchNorm, over all clips, keeps projections from becoming equal."""
    layers: list[nn.Module] = []
    for _ in range(2):
        layers.append(nn.Linear(width, HIDDEN_WIDTH, bias=False))
        # Running statistics would be for evaluation, where nothing is projected.
        layers.append(nn.BatchNorm1d(HIDDEN_WIDTH, track_running_stats=False))
        layers.append(nn.GELU())
        width = HIDDEN_WIDTH
    return nn.Sequential(*layers, nn.Linear(width, PROJECTION_WIDTH))


def compute_infonce(projections: Float[Tensor, "S V P"]) -> Float[Tensor, ""]:
    """Compute how hard it is to tell the V views of a video from those of S - 1 other videos.

    For each pair of views of a video, in both orders, the cosine similarity of the two competes
    with those of the first one to all views of other videos (InfoNCE, arXiv 1807.03748); the loss
    is the mean cross-entropy. If all projections were equal, each pair would be one of 1 + (S - 1)
    V, and the loss the logarithm of that.
    """
    num_videos, num_views = projections.shape[:2]
    flat = F.normalize(projections.flatten(0, 1), dim=1)
    scores = flat @ flat.T / TEMPERATURE
    video = torch.arange(len(flat), device=flat.device) // num_views
    is_same_video = video[:, None] == video
    others = scores.masked_fill(is_same_video, -torch.inf).logsumexp(dim=1, keepdim=True)
    losses = F.softplus(others - scores)
    # Filled, not selected: the number of selected values would have to be read by the host.
    is_pair = is_same_video.clone().fill_diagonal_(False)
    num_pairs = num_videos * num_views * (num_views - 1)
    return losses.masked_fill(~is_pair, 0).sum() / num_pairs


def gather_over_ranks(rows: Float[Tensor, "B D"]) -> Float[Tensor, "RB D"]:
    """Return the rows of all R ranks, which must have equally many, in the order of the ranks.

    Every rank computes the same loss of all rows. Gradients reach this rank's own rows only, R
    times as large, since DistributedDataParallel divides the sum over ranks by R.
    """
    num_ranks = dist.get_world_size()
    constant = rows.detach()
    gathered = [torch.empty_like(constant) for _ in range(num_ranks)]
    dist.all_gather(gathered, constant)
    # The difference is 0, and has the gradient.
    gathered[dist.get_rank()] = constant + num_ranks * (rows - constant)
    return torch.cat(gathered)
