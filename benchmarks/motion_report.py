"""Measure how well a pre-trained model's sampling follows motion: `python benchmarks/motion_report.py RUN VIDEOS`.

Prints three metrics over the videos (one clip each: the middle, center crop) and writes them to motion.json in RUN:

reconstruction loss   of masked tokens; 1.0 is the loss of predicting the per-patch mean (normalized targets)
correlation           Pearson, of the sampling probability with the motion map over a clip's tokens; mean over clips
moving tokens         their fraction among the visible tokens (100 samples per clip), and among all tokens

The motion map is the fraction of a token that moving objects cover, for videos with the sidecar file that
shard_tools/synthetic_videos.py writes. For other videos it is the mean change of brightness between neighboring frames,
which is not ground truth: noise and camera shake count too. Moving tokens are those that a moving object touches; by
change of brightness, the 20 % that change most.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import common.openmp  # noqa: F401

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from common.atomic_io import write_json
from common.errors import InputError, run_command
from figures.clips import Clip, read_clips
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.maps import explain_bad_logits
from model.weights.pretrained import find_file, run_of, trained_rate
from pipeline.config import DataConfig

# Masks per clip; one mask of 6 tokens for each of 200 clips would leave a fraction of .20 known to ± .011.
NUM_SAMPLES = 100


class Motion(NamedTuple):
    amount: Float[Tensor, " N"]
    is_moving: Bool[Tensor, " N"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory or checkpoint, with adaptive masking")
    parser.add_argument("videos", type=Path, metavar="VIDEOS", help="videos that the model was not trained on")
    options = parser.parse_args()
    model = AdaMAE.from_pretrained(options.run)
    config = model.config
    if not model.token_sampler.learns:
        masking = config.masking
        raise InputError(f"{options.run} uses {masking} masking; only learned masking has sampling probabilities")
    data = DataConfig(**trained_rate(options.run))
    clips = list(read_clips([options.videos], config.num_frames, config.image_size, data, limit=10**9))
    report = measure(model, clips)
    file = find_file(options.run)
    write_json((run_of(file) or file.parent) / "motion.json", report)
    print(
        f"{report['num_clips']} clips; motion by {report['motion']}\n"
        f"reconstruction loss              {report['reconstruction_loss']:.3f}  (1.0: predicting the per-patch mean)\n"
        f"correlation with motion          {report['correlation']:.3f}  (of the sampling probability)\n"
        f"moving tokens among the visible  {report['moving_fraction_visible']:.1%}"
        f"  (of all tokens: {report['moving_fraction_all']:.1%})"
    )


@explain_bad_logits()
@torch.no_grad()
def measure(model: AdaMAE, clips: list[Clip]) -> dict[str, Any]:
    """Return the three metrics, of masking that is not learned only the loss, as of clips without motion."""
    has_truth = all(sidecar(clip.video).is_file() for clip in clips)
    losses, correlations, visible, everywhere = [], [], [], []
    for position, clip in enumerate(clips):
        output = model(clip.frames[None], seed=0, offset=position)
        losses.append(output.reconstruction_loss)
        if not model.token_sampler.learns:
            continue
        motion = (true_motion if has_truth else brightness_change)(clip, model.config)
        if motion.amount.std() > 0 and motion.is_moving.any():
            correlations.append(torch.corrcoef(torch.stack((output.log_probs[0].exp(), motion.amount)))[0, 1])
            masks = model.token_sampler.sample(
                output.log_probs.expand(NUM_SAMPLES, -1), seed=0, offset=position * NUM_SAMPLES
            )
            visible.append(motion.is_moving[masks.visible_ids].float().mean())
            everywhere.append(motion.is_moving.float().mean())
    metrics = {"reconstruction_loss": losses}
    if model.token_sampler.learns:
        if not correlations:
            raise InputError("nothing moves in these videos")
        metrics |= {"correlation": correlations, "moving_fraction_visible": visible, "moving_fraction_all": everywhere}
    about = {"motion": "moving objects" if has_truth else "change of brightness", "num_clips": len(clips)}
    return about | {name: torch.stack(values).mean().item() for name, values in metrics.items()}


def sidecar(video: Path) -> Path:
    return video.with_suffix(".motion.json")


def true_motion(clip: Clip, config: ModelConfig) -> Motion:
    """Map the boxes of moving objects through the same scaling and center crop as the frames (figures/clips.py)."""
    recorded = json.loads(sidecar(clip.video).read_text(encoding="utf-8"))
    side = min(recorded["width"], recorded["height"])
    left, top = (recorded["width"] - side) / 2, (recorded["height"] - side) / 2
    moving = torch.zeros(config.num_frames, side, side)
    for frame, number in enumerate(clip.numbers):
        for box in recorded["moving_boxes"][number]:
            edges = zip(box, (left, top, left, top), strict=True)
            x0, y0, x1, y1 = (max(0, round(edge - offset)) for edge, offset in edges)
            moving[frame, y0:y1, x0:x1] = 1
    amount = average_per_token(torch.nn.functional.interpolate(moving[None], config.frame_size, mode="area")[0], config)
    return Motion(amount, amount > 0)


def brightness_change(clip: Clip, config: ModelConfig) -> Motion:
    brightness = clip.frames.float().mean(dim=-1)
    change = (brightness[1:] - brightness[:-1]).abs()
    amount = average_per_token(torch.cat((change[:1], change)), config)
    return Motion(amount, amount > amount.quantile(0.8))


def average_per_token(frames: Float[Tensor, "T H W"], config: ModelConfig) -> Float[Tensor, " N"]:
    """Average the pixels of each token, in (t, h, w) order."""
    sizes = {"pt": config.tubelet_size, "ph": config.patch_size, "pw": config.patch_size}
    return reduce(frames, "(t pt) (h ph) (w pw) -> (t h w)", "mean", **sizes)


if __name__ == "__main__":
    run_command(main)
