"""Measure what pre-trained models know of motion: `python benchmarks/motion_report.py RUN [RUN ...] VIDEOS`.

A row per run or checkpoint, over up to 320 of the videos (one clip each: the middle, center crop):

reconstruction_loss   of masked tokens; 1.0 is the loss of predicting the per-patch mean (normalized targets)
error_moving_*        of masked moving tokens, and error_static_* of the others, under masks with as many visible ones:
                      the run's own, random, and oracle masks with none or half of the visible tokens moving
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
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import reduce, repeat
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from benchmarks.arguments import ArgumentParser
from benchmarks.harness import Report, Row, print_table
from common.devices import choose_device
from common.errors import InputError, run_command
from figures.clips import Clip, read_clips
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.maps import explain_bad_logits
from model.weights.pretrained import trained_rate
from pipeline.config import DataConfig

NUM_CLIPS = 320
# Masks per clip; one mask of 6 tokens for each of 200 clips would leave a fraction of .20 known to ± .011.
NUM_SAMPLES = 100
TEST_MASKS: dict[str, Row] = {
    "own": {},
    "random": {"masking": "random"},
    "static_visible": {"masking": "oracle", "oracle_share": 0.0},
    "moving_visible": {"masking": "oracle", "oracle_share": 0.5},
}


class Motion(NamedTuple):
    amount: Float[Tensor, " N"]
    is_moving: Bool[Tensor, " N"]
    displacement: Float[Tensor, "N 2"] | None  # in stored pixels and frames, where the truth is known


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories or checkpoints")
    parser.add_argument("videos", type=Path, metavar="VIDEOS", help="videos that the models were not trained on")
    options = parser.parse_args()
    rows: list[Row] = []
    for run in options.runs:
        model = AdaMAE.from_pretrained(run)
        masks = {"masking": model.config.masking, "mask_ratio": model.config.mask_ratio}
        rows.append({"run": run.name, **masks, **measure(model, options.videos, DataConfig(**trained_rate(run)))})
    Report("motion_report", options.output, choose_device()).write(rows)
    print_table(rows)


@explain_bad_logits()
@torch.no_grad()
def measure(model: AdaMAE, videos: Path, data: DataConfig, limit: int = NUM_CLIPS) -> Row:
    """Measure what is defined for the model's masking and for these videos, of which `limit` are read."""
    shape = model.config.num_frames, model.config.image_size
    clips = list(read_clips([videos], *shape, data, limit))
    if model.config.motion_channel:
        clips = [clip._replace(frames=clip.frames[..., :-1]) for clip in clips]
    has_truth = all(find_sidecar(clip.video).is_file() for clip in clips)
    motions = [(read_true_motion if has_truth else measure_brightness_change)(clip, model.config) for clip in clips]
    if not any(motion.is_moving.any() for motion in motions):
        raise InputError(f"nothing moves in {videos}: choose other videos")
    model = model.with_masking(motion_channel=True)
    inputs = [add_motion_map(clip, motion, model.config) for clip, motion in zip(clips, motions, strict=True)]
    row: Row = {"num_clips": len(clips), "motion": "moving objects" if has_truth else "change of brightness"}
    row |= measure_errors(model, inputs, motions)
    if model.token_sampler.learns:
        row |= measure_sampling(model, inputs, motions)
        ratio, visible = row["error_moving_random"] / row["error_static_random"], 1 - model.config.mask_ratio
        row["moving_fraction_predicted"] = predict_moving_fraction(ratio, row["moving_fraction_all"], visible)
    if has_truth:
        row |= probe_densely(torch.cat([model.encode(clip).tokens for clip in inputs]), motions)
    return row


def measure_errors(model: AdaMAE, inputs: list[Tensor], motions: list[Motion]) -> Row:
    """Measure the errors of moving and of static tokens under each of TEST_MASKS."""
    row: Row = {}
    for name, masking in TEST_MASKS.items():
        masked = model.with_masking(**masking)
        errors, moving = [], []
        for position, (clip, motion) in enumerate(zip(inputs, motions, strict=True)):
            output = masked(clip, seed=0, offset=position)
            errors.append(output.loss_per_token[0])
            moving.append(motion.is_moving[output.masked_ids[0]])
        error, is_moving = torch.cat(errors), torch.cat(moving)
        if name == "own":
            row["reconstruction_loss"] = error.mean().item()
        row[f"error_moving_{name}"] = error[is_moving].mean().item()
        row[f"error_static_{name}"] = error[~is_moving].mean().item()
    return row


def measure_sampling(model: AdaMAE, inputs: list[Tensor], motions: list[Motion]) -> Row:
    """Measure how well the sampling probability follows motion, over the clips in which something moves."""
    correlations, visible, everywhere = [], [], []
    for position, (clip, motion) in enumerate(zip(inputs, motions, strict=True)):
        if motion.amount.std() == 0:
            continue
        log_probs = model(clip, seed=0, offset=position).log_probs
        assert log_probs is not None
        correlations.append(torch.corrcoef(torch.stack((log_probs[0].exp(), motion.amount)))[0, 1])
        masks = model.token_sampler.sample(log_probs.expand(NUM_SAMPLES, -1), seed=0, offset=position * NUM_SAMPLES)
        visible.append(motion.is_moving[masks.visible_ids].float().mean())
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


def probe_densely(features: Float[Tensor, "V N D"], motions: list[Motion]) -> Row:
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


def add_motion_map(clip: Clip, motion: Motion, config: ModelConfig) -> UInt8[Tensor, "1 T H W C"]:
    """Add the channel that masking=oracle reads, 255 where a token moves."""
    t, h, w = config.grid
    sizes = {"t": t, "h": h, "w": w, "pt": config.tubelet_size, "ph": config.patch_size, "pw": config.patch_size}
    is_moving = repeat(motion.is_moving.byte(), "(t h w) -> (t pt) (h ph) (w pw) 1", **sizes) * 255
    return torch.cat((clip.frames, is_moving), dim=-1)[None]


if __name__ == "__main__":
    run_command(main)
