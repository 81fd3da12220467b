"""Measure how closely a sampler follows motion: `python benchmarks/motion_report.py RUN VIDEOS`.

The middle clip of up to 320 videos is measured, center crop:

loss                  of masked tokens; 1.0 is the loss of predicting the mean of each patch
                      (normalized targets)
correlation           Pearson, of the sampling probability with the motion map over a clip's
                      tokens; mean over clips
tokens that move      of the visible ones (100 masks per clip), and of all

The motion map is the fraction of a token that moving objects cover, for videos with the sidecar
file that shard_tools/synthetic_videos.py writes. For other videos it is the mean change of
brightness between neighboring frames, which is not ground truth: noise and camera shake count too.
Moving tokens are those that are covered by more than half; by change of brightness, the 20 % that
change most.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import Report, Row
from adamae.common.devices import choose_device
from adamae.common.errors import InputError, run_command
from adamae.common.locations import local_path
from adamae.figures.clips import Clip, read_clips
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.load_adamae import load_adamae
from adamae.model.maps import explain_bad_logits
from adamae.model.weights.read_config import trained_rate
from adamae.pipeline.config import DataConfig

NUM_CLIPS = 320
BATCH_SIZE = 16
# Masks per clip. With one mask of 6 tokens for each of 200 clips, a fraction of 0.20 would be known
# to ± 0.011 only, and samplers differ by as little (benchmarks/experiments.md).
NUM_SAMPLES = 100


class Motion(NamedTuple):
    """How much each token of a clip moves, and whether it counts as moving."""

    amount: Float[Tensor, " N"]
    is_moving: Bool[Tensor, " N"]


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("run", type=local_path, metavar="RUN", help="a run directory or checkpoint")
    parser.add_argument(
        "videos", type=local_path, metavar="VIDEOS", help="videos that the model was not trained on"
    )
    options = parser.parse_args()
    device = choose_device()
    model = load_adamae(options.run).to(device)
    row = measure(model, options.videos, DataConfig(**trained_rate(options.run)))
    Report("motion_report", options.output, device).write([{"run": options.run.name, **row}])
    print("\n".join(describe(row)))


def describe(row: Row) -> Iterator[str]:
    """Yield a sentence on the loss and, of a sampler that learns, one on motion."""
    yield (
        f"loss: {row['reconstruction_loss']:.3f} on {row['num_clips']} videos"
        " (1: the mean of each patch)"
    )
    if "correlation" in row:
        yield (
            f"correlation with motion: {row['correlation']:.2f}"
            f" (0: uniform sampler; motion by {row['motion']});"
            f" {row['moving_fraction_visible']:.0%} of the visible tokens move,"
            f" of all {row['moving_fraction_all']:.0%}"
        )


@explain_bad_logits()
@torch.no_grad()
def measure(model: AdaMAE, videos: Path, data: DataConfig) -> Row:
    """Measure a model on its device. Raise InputError where nothing moves, or as read_clips."""
    config = model.config
    device = next(model.parameters()).device
    clips = list(read_clips([videos], config.num_frames, config.image_size, data, NUM_CLIPS))
    # If one video has no sidecar file, no truth is used: the two measures cannot be averaged.
    has_truth = all(find_sidecar(clip.video).is_file() for clip in clips)
    find_motion = read_true_motion if has_truth else measure_brightness_change
    motions = [find_motion(clip, config) for clip in clips]
    if not any(motion.is_moving.any() for motion in motions):
        raise InputError(f"nothing moves in {videos}: choose other videos")
    batches = torch.stack([clip.frames for clip in clips]).to(device).split(BATCH_SIZE)
    # The offset counts clips over all batches, so that each has random numbers of its own.
    outputs = []
    for index, batch in enumerate(batches):
        outputs.append(model(batch, seed=0, offset=index * BATCH_SIZE))
    losses = torch.cat([output.loss_per_token for output in outputs])
    row: Row = {
        "num_clips": len(clips),
        "motion": "moving objects" if has_truth else "change of brightness",
        "reconstruction_loss": losses.mean().item(),
    }
    # Other samplers have no probabilities that could follow motion.
    if model.token_sampler.learns:
        log_probs = torch.cat([output.log_probs for output in outputs])
        row |= compare_with_motion(model, log_probs, motions)
    return row


def compare_with_motion(
    model: AdaMAE, log_probs: Float[Tensor, "V N"], motions: list[Motion]
) -> Row:
    """Measure how well the sampling probability follows motion, where something moves."""
    correlations = []
    fractions_visible = []
    fractions_all = []
    for index, (motion, log_p) in enumerate(zip(motions, log_probs, strict=True)):
        # Where all tokens move alike, no correlation is defined.
        if motion.amount.std() == 0:
            continue
        copies = log_p.expand(NUM_SAMPLES, -1)
        masks = model.token_sampler.sample(copies, seed=0, offset=index * NUM_SAMPLES)
        pair = torch.stack((log_p.cpu().exp(), motion.amount))
        correlations.append(torch.corrcoef(pair)[0, 1].item())
        is_moving = motion.is_moving.float()
        fractions_visible.append(is_moving[masks.visible_ids.cpu()].mean().item())
        fractions_all.append(is_moving.mean().item())
    return {
        "correlation": mean(correlations),
        "moving_fraction_visible": mean(fractions_visible),
        "moving_fraction_all": mean(fractions_all),
    }


def find_sidecar(video: Path) -> Path:
    return video.with_suffix(".motion.json")


def read_true_motion(clip: Clip, config: ModelConfig) -> Motion:
    """Paint the boxes of moving objects, cropped as figures/clips.py crops the frames."""
    recorded = json.loads(find_sidecar(clip.video).read_text(encoding="utf-8"))
    side = min(recorded["width"], recorded["height"])
    left = (recorded["width"] - side) / 2
    top = (recorded["height"] - side) / 2
    painted = torch.zeros(config.num_frames, side, side)
    for index, number in enumerate(clip.numbers):
        for x0, y0, x1, y1, *_ in recorded["moving_boxes"][number]:
            # A negative index would count from the end, so what lies before the crop becomes 0.
            rows = slice(max(0, round(y0 - top)), max(0, round(y1 - top)))
            columns = slice(max(0, round(x0 - left)), max(0, round(x1 - left)))
            painted[index, rows, columns] = 1
    amount = average_per_token(painted, config)
    return Motion(amount, amount > 0.5)


def measure_brightness_change(clip: Clip, config: ModelConfig) -> Motion:
    """Measure how much each token brightens or darkens from frame to frame."""
    brightness = clip.frames.float().mean(dim=-1)
    change = (brightness[1:] - brightness[:-1]).abs()
    # The first frame has none before it, and counts as the second one does.
    amount = average_per_token(torch.cat((change[:1], change)), config)
    # A fifth, since that is how much moves in the synthetic videos, where it is known.
    return Motion(amount, amount > amount.quantile(0.8))


def average_per_token(frames: Float[Tensor, "T h w"], config: ModelConfig) -> Float[Tensor, " N"]:
    """Average the pixels of each token, in (t, h, w) order."""
    return F.adaptive_avg_pool3d(frames[None], config.grid).flatten()


if __name__ == "__main__":
    run_command(main)
