"""Measure what a pre-trained model knows of motion, over up to 320 videos (one clip each: the middle, center crop).

reconstruction_loss   of masked tokens; 1.0 is the loss of predicting the per-patch mean (normalized targets)
error_moving_*        of masked moving tokens, and error_static_* of the others, under masks with as many visible ones:
                      the run's own and random masks
correlation           Pearson, of the sampling probability with the motion map over a clip's tokens; mean over clips
moving_fraction_*     of the visible tokens (100 samples per clip), of all, and what the sampling loss predicts of the
                      visible ones from the errors under random masks
displacement_r2       the dense probe: one linear layer a token, trained on every other clip and tested on the rest,
moving_iou            predicts the displacement of moving tokens, and which tokens move

The motion map is the fraction of a token that moving objects cover, for videos with the sidecar file that
shard_tools/synthetic_videos.py writes. For other videos, which are not probed, it is the mean change of brightness
between neighboring frames. It is not ground truth: noise and camera shake count too. Moving tokens are those that are
covered by more than half; by change of brightness, the 20 % that change most.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from common.devices import autocast_to
from common.errors import InputError
from figures.clips import Clip, read_clips
from model.adamae import AdaMAE, Output
from model.config import ModelConfig
from model.maps import explain_bad_logits
from pipeline.config import DataConfig
from training.config import TrainConfig

NUM_CLIPS, BATCH_SIZE = 320, 16
# Masks per clip; one mask of 6 tokens for each of 200 clips would leave a fraction of .20 known to ± .011.
NUM_SAMPLES = 100
TEST_MASKS: dict[str, dict[str, Any]] = {
    "own": {},
    "random": {"masking": "random"},
}


class Motion(NamedTuple):
    amount: Float[Tensor, " N"]
    is_moving: Bool[Tensor, " N"]
    displacement: Float[Tensor, "N 2"] | None  # in stored pixels and frames, where the truth is known


@torch.no_grad()
def evaluate_motion(model: AdaMAE, config: TrainConfig) -> dict[str, float]:
    """Measure a model in training on evaluation.motion_videos; every rank measures all of them, and finds the same."""
    device = next(model.parameters()).device
    with torch.compiler.set_stance("force_eager"), autocast_to(device, config.precision):
        row = measure(model.eval(), Path(config.evaluation.motion_videos), config.data)
    model.train()
    return {name: value for name, value in row.items() if isinstance(value, float) and name != "reconstruction_loss"}


@explain_bad_logits()
@torch.no_grad()
def measure(model: AdaMAE, videos: Path, data: DataConfig, limit: int = NUM_CLIPS) -> dict[str, Any]:
    """Measure what is defined for the model's masking and for these videos, of which `limit` are read.

    Raises InputError where nothing moves, and as read_clips does.
    """
    shape, device = (model.config.num_frames, model.config.image_size), next(model.parameters()).device
    clips = list(read_clips([videos], *shape, data, limit))
    has_truth = all(find_sidecar(clip.video).is_file() for clip in clips)
    motions = [(read_true_motion if has_truth else measure_brightness_change)(clip, model.config) for clip in clips]
    if not any(motion.is_moving.any() for motion in motions):
        raise InputError(f"nothing moves in {videos}: choose other videos")
    batches = torch.stack([clip.frames for clip in clips]).to(device).split(BATCH_SIZE)
    row: dict[str, Any] = {"num_clips": len(clips), "motion": "moving objects" if has_truth else "change of brightness"}
    row |= measure_errors(model, batches, torch.stack([motion.is_moving for motion in motions]).to(device))
    if model.token_sampler.learns:
        row |= measure_sampling(model, batches, motions)
        ratio, visible = row["error_moving_random"] / row["error_static_random"], 1 - model.config.mask_ratio
        row["moving_fraction_predicted"] = predict_moving_fraction(ratio, row["moving_fraction_all"], visible)
    if has_truth:
        row |= probe_densely(torch.cat([model.encode(batch).tokens.cpu() for batch in batches]), motions)
    return row


def measure_errors(model: AdaMAE, batches: Sequence[Tensor], is_moving: Bool[Tensor, "V N"]) -> dict[str, float]:
    """Measure the errors of moving and of static tokens under each of TEST_MASKS."""
    row = {}
    for name, masking in TEST_MASKS.items():
        outputs = forward(model.with_masking(**masking), batches)
        errors = torch.cat([output.loss_per_token for output in outputs])
        moves = is_moving.gather(1, torch.cat([output.masked_ids for output in outputs]))
        if name == "own":
            row["reconstruction_loss"] = errors.mean().item()
        row[f"error_moving_{name}"] = errors[moves].mean().item()
        row[f"error_static_{name}"] = errors[~moves].mean().item()
    return row


def forward(model: AdaMAE, batches: Sequence[Tensor]) -> list[Output]:
    return [model(batch, seed=0, offset=number * BATCH_SIZE) for number, batch in enumerate(batches)]


def measure_sampling(model: AdaMAE, batches: Sequence[Tensor], motions: Sequence[Motion]) -> dict[str, float]:
    """Measure how well the sampling probability follows motion, over the clips in which something moves."""
    correlations, visible, everywhere = [], [], []
    log_probs = [log_p for output in forward(model, batches) for log_p in output.log_probs]  # type: ignore[union-attr]
    for position, (motion, log_p) in enumerate(zip(motions, log_probs, strict=True)):
        if motion.amount.std() == 0:
            continue
        masks = model.token_sampler.sample(log_p.expand(NUM_SAMPLES, -1), seed=0, offset=position * NUM_SAMPLES)
        correlations.append(torch.corrcoef(torch.stack((log_p.cpu().exp(), motion.amount)))[0, 1])
        visible.append(motion.is_moving[masks.visible_ids.cpu()].float().mean())
        everywhere.append(motion.is_moving.float().mean())
    metrics = {"correlation": correlations, "moving_fraction_visible": visible, "moving_fraction_all": everywhere}
    return {name: torch.stack(values).mean().item() for name, values in metrics.items()}


def predict_moving_fraction(error_ratio: float, moving: float, visible: float) -> float:
    """Predict which fraction of the visible tokens moves where the paper's sampling loss has converged.

    Its gradient is zero at P ∝ (1 - π)·e, of the chance π of being visible and the error e. Sampled without replacement
    from many tokens, π = 1 - exp(-t·P) (Rosén 1972), so that t·P·exp(t·P) ∝ e.

    error_ratio: of moving to static tokens; moving, visible: the fraction of all tokens that is.
    """
    static = np.linspace(0, 20, 200_001)  # t·P of a static token
    scale = static * np.exp(static)
    shown_moving = moving * -np.expm1(-np.interp(error_ratio * scale, scale, static))
    shown = shown_moving - (1 - moving) * np.expm1(-static)
    return float(np.interp(visible, shown, shown_moving)) / visible


def probe_densely(features: Float[Tensor, "V N D"], motions: Sequence[Motion]) -> dict[str, float]:
    """Fit a linear layer to the tokens of every other clip by least squares, and test it on those of the rest.

    Displacement is fitted to moving tokens, and tested on them. Tokens count as moving above a threshold, which as many
    exceed as move, of those that were fitted.
    """
    x = F.pad(features.double(), (0, 1), value=1.0)
    is_moving = torch.stack([motion.is_moving for motion in motions])
    displacement = torch.stack([motion.displacement for motion in motions if motion.displacement is not None]).double()
    (train, test), (moves, truly_moves) = (x[::2], x[1::2]), (is_moving[::2], is_moving[1::2])
    layer = torch.linalg.lstsq(train.flatten(0, 1), moves.flatten()[:, None].double()).solution
    highest = (train @ layer).flatten().sort(descending=True).values
    predicted = (test @ layer)[..., 0] > highest[moves.sum() - 1 : moves.sum() + 1].mean()
    layer = torch.linalg.lstsq(train[moves], displacement[::2][moves]).solution
    truth = displacement[1::2][truly_moves]
    residual = truth - test[truly_moves] @ layer
    return {
        "displacement_r2": (1 - residual.square().sum() / (truth - truth.mean(dim=0)).square().sum()).item(),
        "moving_iou": ((predicted & truly_moves).sum() / (predicted | truly_moves).sum()).item(),
    }


def find_sidecar(video: Path) -> Path:
    return video.with_suffix(".motion.json")


def read_true_motion(clip: Clip, config: ModelConfig) -> Motion:
    """Map the boxes of moving objects through the same scaling and center crop as the frames (figures/clips.py)."""
    recorded = json.loads(find_sidecar(clip.video).read_text(encoding="utf-8"))
    side = min(recorded["width"], recorded["height"])
    left, top = (recorded["width"] - side) / 2, (recorded["height"] - side) / 2
    painted = torch.zeros(3, config.num_frames, side, side)  # whether it moves, and by how much along x and y
    for frame, number in enumerate(clip.numbers):
        for *box, dx, dy in recorded["moving_boxes"][number]:
            edges = zip(box, (left, top, left, top), strict=True)
            x0, y0, x1, y1 = (max(0, round(edge - offset)) for edge, offset in edges)
            painted[:, frame, y0:y1, x0:x1] = torch.tensor([1, dx, dy])[:, None, None]
    scaled = F.interpolate(painted, config.frame_size, mode="area")
    amount, *steps = (average_per_token(frames, config) for frames in scaled)
    return Motion(amount, amount > 0.5, torch.stack(steps, dim=1) / amount.clamp(min=1e-6)[:, None])


def measure_brightness_change(clip: Clip, config: ModelConfig) -> Motion:
    brightness = clip.frames.float().mean(dim=-1)
    change = (brightness[1:] - brightness[:-1]).abs()
    amount = average_per_token(torch.cat((change[:1], change)), config)
    return Motion(amount, amount > amount.quantile(0.8), None)


def average_per_token(frames: Float[Tensor, "T H W"], config: ModelConfig) -> Float[Tensor, " N"]:
    """Average the pixels of each token, in (t, h, w) order."""
    sizes = {"pt": config.tubelet_size, "ph": config.patch_size, "pw": config.patch_size}
    return reduce(frames, "(t pt) (h ph) (w pw) -> (t h w)", "mean", **sizes)
