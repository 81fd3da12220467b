"""What a pre-trained model makes of motion: `python benchmarks/motion_report.py RUN VIDEOS`.

Prints three figures over the videos (one clip each, from the middle, centre crop) and writes them to motion.json there:

reconstruction loss   of masked tokens; 1.0 is what predicting every patch's mean scores (normalised targets)
correlation           Pearson, of P with the motion map over the tokens of a clip; mean over clips
moving tokens         their share among the visible tokens, over 100 draws a clip, against their share of all

The motion map is the share of a token that moving objects cover, where a video has the sidecar that
shard_tools/synthetic_videos.py writes; elsewhere it is the mean change of brightness between neighbouring frames, which
is no ground truth: it sees noise and camera shake as well. Moving tokens are those that a moving object touches; by
change of brightness, the fifth of the tokens that change most.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

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
from model.maps import damage_explained
from model.token_samplers import SharpDraw
from model.weights.pretrained import find_file, run_of, trained_stride

NUM_DRAWS = 100  # of visible tokens; one of each of 200 clips leaves a share of .20 of 6 tokens open to ± .011


class Motion(NamedTuple):
    amount: Float[Tensor, " N"]
    is_moving: Bool[Tensor, " N"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder or checkpoint, with adaptive masking")
    parser.add_argument("videos", type=Path, metavar="VIDEOS", help="videos that the model has not been trained on")
    options = parser.parse_args()
    model = AdaMAE.from_pretrained(options.run)
    if not model.token_sampler.looks:
        raise InputError(f"{options.run} masks {model.config.masking} tokens: only adaptive masking has a P to look at")
    config = model.config
    clips = list(
        read_clips([options.videos], config.num_frames, config.image_size, trained_stride(options.run), limit=10**9)
    )
    report = measure(model, clips)
    file = find_file(options.run)
    write_json((run_of(file) or file.parent) / "motion.json", report)
    print(describe(report))


@damage_explained()
@torch.no_grad()
def measure(model: AdaMAE, clips: list[Clip]) -> dict[str, float | str]:
    """The three figures; clips in which nothing moves count for the loss only."""
    truth = [sidecar(clip.video).is_file() for clip in clips]
    kind = "moving objects" if all(truth) else "change of brightness"
    draw = SharpDraw(model.config).eval()
    losses, correlations, shown, all_tokens = [], [], [], []
    for place, clip in enumerate(clips):
        output = model(clip.frames[None], seed=0, offset=place)
        losses.append(output.reconstruction_loss)
        motion = true_motion(clip, model.config) if all(truth) else brightness_change(clip, model.config)
        if motion.amount.std() > 0 and motion.is_moving.any():
            pair = torch.stack((output.log_probs[0].exp(), motion.amount))
            correlations.append(torch.corrcoef(pair)[0, 1])
            drawn = draw(output.log_probs.expand(NUM_DRAWS, -1), seed=0, offset=place * NUM_DRAWS)
            shown.append(motion.is_moving[drawn.visible_ids].float().mean())
            all_tokens.append(motion.is_moving.float().mean())
    if not correlations:
        raise InputError("nothing moves in these videos: there is nothing to report")
    return {
        "motion": kind,
        "num_clips": len(clips),
        "reconstruction_loss": mean(losses),
        "correlation": mean(correlations),
        "moving_share_of_visible": mean(shown),
        "moving_share_of_all": mean(all_tokens),
    }


def describe(report: dict[str, float | str]) -> str:
    return "\n".join((
        f"over {report['num_clips']} clips; motion by {report['motion']}",
        f"reconstruction loss              {report['reconstruction_loss']:.3f}  (1.0: every patch's mean)",
        f"correlation of P with motion     {report['correlation']:.3f}",
        f"moving tokens among the visible  {report['moving_share_of_visible']:.1%}"
        f"  (of all tokens: {report['moving_share_of_all']:.1%})",
    ))  # fmt: skip


def sidecar(video: Path) -> Path:
    return video.with_suffix(".motion.json")


def true_motion(clip: Clip, config: ModelConfig) -> Motion:
    """From the boxes of moving objects, through the same scaling and centre crop as the frames (figures/clips.py)."""
    drawn = json.loads(sidecar(clip.video).read_text(encoding="utf-8"))
    side = min(drawn["width"], drawn["height"])
    left, top = (drawn["width"] - side) / 2, (drawn["height"] - side) / 2
    moving = torch.zeros(config.num_frames, side, side)
    for frame, number in enumerate(clip.numbers):
        for x0, y0, x1, y1 in drawn["moving_boxes"][number]:
            rows, columns = (
                slice(max(0, round(a - o)), max(0, round(b - o))) for a, b, o in ((y0, y1, top), (x0, x1, left))
            )
            moving[frame, rows, columns] = 1
    amount = per_token(torch.nn.functional.interpolate(moving[None], config.frame_size, mode="area")[0], config)
    return Motion(amount, amount > 0)


def brightness_change(clip: Clip, config: ModelConfig) -> Motion:
    brightness = clip.frames.float().mean(dim=-1)
    change = (brightness[1:] - brightness[:-1]).abs()
    amount = per_token(torch.cat((change[:1], change)), config)
    return Motion(amount, amount > amount.quantile(0.8))


def per_token(frames: Float[Tensor, "T H W"], config: ModelConfig) -> Float[Tensor, " N"]:
    """Mean over the pixels of each token, in (t, h, w) order."""
    sizes = {"pt": config.tubelet_size, "ph": config.patch_size, "pw": config.patch_size}
    return reduce(frames, "(t pt) (h ph) (w pw) -> (t h w)", "mean", **sizes)


def mean(values: list[Tensor]) -> float:
    return torch.stack(values).mean().item()


if __name__ == "__main__":
    run_command(main)
