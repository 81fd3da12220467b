"""Judge features without training: `python -m training.label_propagation RUN FRAMES LABELS`.

Masks or key points of a video's first frame are carried on by nearest features, as in DINO's evaluation on DAVIS (Caron
et al. 2021): each token of a frame takes the labels of the --top-k most similar tokens, no further than --radius tokens
away, in the first frame and in the --context frames before it.

LABELS/NAME/ holds a mask per frame as PNG, whose values are the numbers of objects (DAVIS: Annotations/480p), or
joint_positions.mat (JHMDB), or key_points.npy [F, points, 2], x and y in pixels. FRAMES/NAME/ holds the frames, JPEG or
PNG. Frames are scaled to the model's clips and repeated, so that each has a token frame of its own. Writes results.json
to --output: J and F of objects, as DAVIS has them, or PCK at .1 and .2 of key points; and what they are where labels
stay where they are in the first frame.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image
from torch import Tensor

from common.atomic_io import write_json
from common.devices import autocast_to, choose_device
from common.errors import InputError, require_positive, run_command
from common.logging import log
from common.progress import progress_bar
from model.encoder import VideoEncoder
from model.weights.models import load_encoder
from model.weights.pretrained import find_file, run_of
from training.remote_run import local_run

TEMPERATURE = 0.1  # of similarities, as DINO's
BOUNDARY = 0.008  # of a frame's diagonal: how far boundaries may be apart, in DAVIS
PCK_SHARES = (0.1, 0.2)  # of the body's size, which JHMDB takes as .6 of the diagonal of the box around its key points
KEY_POINT_SIGMA, PEAK_CELLS = 0.5, 5  # tokens: of a key point's map, and how many of the highest give its place


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="run directory (or its URL), checkpoint or file of weights")
    parser.add_argument("frames", type=Path, metavar="FRAMES", help="folder with a folder of frames per video")
    parser.add_argument("labels", type=Path, metavar="LABELS", help="folder with a folder of labels per video")
    parser.add_argument("--list", type=Path, help="file with the names of the videos (default: all in LABELS)")
    parser.add_argument("--image-size", type=int, nargs="+", metavar="PIXELS", help="to scale frames to; as trained")
    parser.add_argument("--context", type=int, default=7, help="frames before, besides the first (default 7)")
    parser.add_argument("--radius", type=int, default=12, help="in tokens (default 12)")
    parser.add_argument("--top-k", type=int, default=5, help="tokens whose labels count (default 5)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    parser.add_argument("--output", type=Path, help="folder (default: label_propagation/ in the run directory)")
    options = parser.parse_args(arguments)
    require_positive(options, "context", "radius", "top_k")
    return options


def main(options: argparse.Namespace) -> None:
    device, run = choose_device(options.device), local_run(options.run)
    changes = {"image_size": options.image_size} if options.image_size else {}
    encoder = load_encoder(run, **changes).to(device)
    found, stays = [], []
    names = list_videos(options.labels, options.list)
    for name in progress_bar(names, unit="video", total=len(names)):
        truth = read_labels(options.labels / name)
        frames = read_frames(options.frames / name, len(truth))
        are_masks = truth.dtype == np.int64
        size = truth.shape[1:] if are_masks else frames[0].shape[:2]
        judge = judge_masks if are_masks else judge_key_points
        features = encode_frames(encoder, frames)
        maps = label_maps(truth[0], encoder.config.grid[1:], size).to(device)
        labels = propagate(features, maps, options.context, options.radius, options.top_k)
        found.append(judge(labels.cpu(), truth, size))
        stays.append(judge(labels[:1].cpu().expand(len(truth), -1, -1, -1), truth, size))
    protocol = {name: getattr(options, name) for name in ("context", "radius", "top_k")}
    results: dict[str, Any] = {"videos": len(names), **average(found), "first_frame_stays": average(stays), **protocol}
    file = find_file(run)
    output = options.output or (run_of(file) or file.parent) / "label_propagation"
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "results.json", results)
    scores = ", ".join(f"{name} {value:.3f}" for name, value in average(found).items())
    log(f"{scores} on {len(names)} videos: {output / 'results.json'}")


def list_videos(labels: Path, names: Path | None) -> list[str]:
    if names is not None:
        if not names.is_file():
            raise InputError(f"{names} does not exist: give a file with the names of the videos")
        return names.read_text(encoding="utf-8").split()
    files = [file for kind in ("*.png", "joint_positions.mat", "key_points.npy") for file in labels.rglob(kind)]
    if not files:
        raise InputError(
            f"{labels} holds neither masks (NAME/*.png) nor key points (NAME/joint_positions.mat or key_points.npy):"
            " give the folder with the labels, such as Annotations/480p of DAVIS"
        )
    return sorted({str(file.parent.relative_to(labels)) for file in files})


def read_labels(folder: Path) -> Int[np.ndarray, "F H W"] | Float[np.ndarray, "F P 2"]:
    if (file := folder / "joint_positions.mat").is_file():
        from scipy.io import loadmat  # of no other use here

        return loadmat(file)["pos_img"].transpose(2, 1, 0) - 1.0  # which counts from 1
    if (file := folder / "key_points.npy").is_file():
        return np.load(file, allow_pickle=False).astype(np.float64)
    masks = [np.asarray(Image.open(file)) for file in sorted(folder.glob("*.png"))]
    if not masks or len({mask.shape for mask in masks}) > 1 or masks[0].ndim != 2 or not masks[0].any():
        raise InputError(
            f"{folder} has no masks of one size with one number per pixel, of which the first marks an object"
        )
    stacked = np.stack(masks)  # objects that the first frame lacks are not judged
    objects = enumerate(np.unique(stacked[0][stacked[0] > 0]), 1)
    return np.sum([(stacked == value) * number for number, value in objects], axis=0).astype(np.int64)


def read_frames(folder: Path, count: int) -> list[UInt8[np.ndarray, "H W 3"]]:
    files = sorted(file for kind in ("*.jpg", "*.jpeg", "*.png") for file in folder.glob(kind))
    if len(files) != count or count < 2:
        raise InputError(
            f"{folder} has {len(files)} frames (*.jpg, *.png), and labels of {count}: they must be as many, at least 2"
        )
    return [np.asarray(Image.open(file).convert("RGB")) for file in files]


@torch.no_grad()
def encode_frames(encoder: VideoEncoder, frames: Sequence[UInt8[np.ndarray, "H W 3"]]) -> Float[Tensor, "F h w D"]:
    """Encode clips in which every frame fills a token frame; the last one repeats its last frame."""
    config, device = encoder.config, encoder.encoder.positions.device
    height, width = config.frame_size
    scaled = [np.asarray(Image.fromarray(frame).resize((width, height))) for frame in frames]
    clip = torch.from_numpy(np.stack([*scaled, *[scaled[-1]] * (-len(scaled) % config.grid[0])]))
    clip = clip.repeat_interleave(config.tubelet_size, dim=0).unflatten(0, (-1, config.num_frames))
    with autocast_to(device, "bf16" if device.type == "cuda" else "fp32"):
        tokens = [encoder.encode(part[None].to(device)).tokens[0].float() for part in clip]
    return torch.cat(tokens).unflatten(0, (-1, *config.grid[1:]))[: len(frames)]


def label_maps(labels: np.ndarray, grid: tuple[int, int], size: tuple[int, int]) -> Float[Tensor, "C h w"]:
    """Make a map of every object, the background first, or of every key point."""
    if labels.dtype == np.int64:
        objects = F.one_hot(torch.from_numpy(labels)).movedim(2, 0).float()
        return F.interpolate(objects[None], grid, mode="area")[0]
    scale = torch.tensor([side / pixels for side, pixels in zip(grid, size, strict=True)]).flip(0)
    places = torch.from_numpy(labels).float() * scale  # x, y in tokens
    y, x = torch.meshgrid(*(torch.arange(side) + 0.5 for side in grid), indexing="ij")
    squared = (x - places[:, :1, None]) ** 2 + (y - places[:, 1:, None]) ** 2
    return (-squared / (2 * KEY_POINT_SIGMA**2)).exp()


def propagate(
    features: Float[Tensor, "F h w D"], first: Float[Tensor, "C h w"], context: int, radius: int, top_k: int
) -> Float[Tensor, "F C h w"]:
    """Carry the label maps of the first frame on, frame by frame."""
    _, height, width, _ = features.shape
    directions = F.normalize(features, dim=-1).flatten(1, 2)
    place = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1).flatten(0, 1)
    is_far = ((place[:, None] - place).abs().amax(dim=-1) > radius).to(features.device)
    labels = [first.flatten(1)]
    for number in range(1, len(features)):
        sources = [0, *range(max(1, number - context), number)]
        similarity = (directions[number] @ directions[sources].transpose(1, 2)) / TEMPERATURE  # [sources, here, there]
        similarity = similarity.masked_fill(is_far, -torch.inf).transpose(0, 1).flatten(1)
        nearest = similarity.topk(min(top_k, similarity.shape[1]), dim=1)
        known = torch.cat([labels[source] for source in sources], dim=1)  # [C, sources × there]
        labels.append((known[:, nearest.indices] * nearest.values.softmax(dim=1)).sum(dim=2))
    return torch.stack(labels).unflatten(2, (height, width))


def judge_masks(
    labels: Float[Tensor, "F C h w"], truth: Int[np.ndarray, "F H W"], size: tuple[int, int]
) -> dict[str, list[float]]:
    """Return J and F of each object, means over the frames but the first and the last, as DAVIS has them."""
    maps = F.interpolate(labels, size, mode="bilinear")
    low, high = maps.amin(dim=(2, 3), keepdim=True), maps.amax(dim=(2, 3), keepdim=True)
    predicted = ((maps - low) / (high - low).clamp_min(1e-12)).argmax(dim=1).numpy()  # each label to [0, 1], as DINO
    scores: dict[str, list[float]] = {"J": [], "F": []}
    for number in range(1, labels.shape[1]):
        pairs = [(predicted[i] == number, truth[i] == number) for i in range(1, max(2, len(truth) - 1))]
        scores["J"].append(float(np.mean([jaccard(*pair) for pair in pairs])))
        scores["F"].append(float(np.mean([boundary_f(*pair) for pair in pairs])))
    return scores


def jaccard(predicted: Bool[np.ndarray, "H W"], truth: Bool[np.ndarray, "H W"]) -> float:
    union = np.count_nonzero(predicted | truth)
    return np.count_nonzero(predicted & truth) / union if union else 1.0


def boundary_f(predicted: Bool[np.ndarray, "H W"], truth: Bool[np.ndarray, "H W"]) -> float:
    """Compute the F-measure of boundaries that may lie a little apart (Perazzi et al. 2016)."""
    edges = [find_boundary(mask) for mask in (predicted, truth)]
    reach = math.ceil(BOUNDARY * math.hypot(*truth.shape))
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disk = torch.from_numpy(x**2 + y**2 <= reach**2)[None, None].float()
    near = [
        F.conv2d(torch.from_numpy(edge)[None, None].float(), disk, padding=reach)[0, 0].numpy() > 0 for edge in edges
    ]
    counts = [np.count_nonzero(edge) for edge in edges]
    if not all(counts):
        return float(not any(counts))
    precision = np.count_nonzero(edges[0] & near[1]) / counts[0]
    recall = np.count_nonzero(edges[1] & near[0]) / counts[1]
    return 2 * precision * recall / max(precision + recall, 1e-12)


def find_boundary(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    padded = np.pad(mask, ((0, 1), (0, 1)), "edge")
    return (mask != padded[1:, :-1]) | (mask != padded[:-1, 1:]) | (mask != padded[1:, 1:])


def judge_key_points(
    labels: Float[Tensor, "F P h w"], truth: Float[np.ndarray, "F P 2"], size: tuple[int, int]
) -> dict[str, list[float]]:
    """Return whether each key point of the frames but the first is found, as videowalk's evaluation of JHMDB has it."""
    height, width = labels.shape[2:]
    peaks = labels.flatten(2).topk(min(PEAK_CELLS, height * width), dim=2)
    weights = peaks.values / peaks.values.sum(dim=2, keepdim=True).clamp_min(1e-12)
    x = ((peaks.indices % width + 0.5) * weights).sum(dim=2) * size[1] / width
    y = ((peaks.indices // width + 0.5) * weights).sum(dim=2) * size[0] / height
    distance = np.linalg.norm(torch.stack((x, y), dim=2).numpy() - truth, axis=2)
    body = 0.6 * np.linalg.norm(np.ptp(truth, axis=1), axis=1, keepdims=True)
    return {f"PCK@{share}": (distance <= share * body)[1:].ravel().astype(float).tolist() for share in PCK_SHARES}


def average(scores: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Average over the objects or key points of all videos."""
    names = dict.fromkeys(name for video in scores for name in video)
    means = {name: float(np.mean([value for video in scores for value in video.get(name, [])])) for name in names}
    return means | ({"J&F": (means["J"] + means["F"]) / 2} if "J" in means else {})


if __name__ == "__main__":
    run_command(lambda: main(parse_arguments()))
