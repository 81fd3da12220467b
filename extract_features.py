"""Extract features of a dataset: `python extract_features.py SHARDS OUT --model RUN`.

OUT gets `features.json`, the settings, and `features-00000.safetensors`, ... with the tensors `pooled` [n, D] fp32,
`labels` [n] int64 (-1: none) and, with --tokens, `tokens` [n, N, D] fp16; the videos' keys are JSON in the metadata
under `keys`. One clip per video: its middle, center crop. Re-running the command continues with the next file.
"""

import argparse
from pathlib import Path

from common.errors import InputError, parse_early, require_positive, run_command


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", metavar="SHARDS", help="dataset folder made by shard_tools/make_shards.py")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder for the features")
    parser.add_argument("--model", required=True, type=Path, help="run, checkpoint, export or another project's file")
    parser.add_argument("--frame-stride", type=int, metavar="N", help="in source frames; default: the run's, else 4")
    parser.add_argument("--num-frames", type=int, metavar="T", help="frames per clip; default: as trained")
    parser.add_argument(
        "--image-size", type=int, nargs="+", metavar="PIXELS", help="side of a clip, or height and width; as trained"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="B", help="clips per forward pass (default 8)")
    parser.add_argument("--videos-per-file", type=int, default=1024, metavar="V", help="(default 1024)")
    parser.add_argument("--tokens", action="store_true", help="also the features of every token, in fp16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    options = parser.parse_args(arguments)
    require_positive(options, "batch_size", "videos_per_file", "frame_stride", "num_frames")
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import json
from itertools import islice
from typing import Any

import common.openmp  # noqa: F401

import torch
from torch import Tensor

from common.atomic_io import atomic_write, write_json
from common.devices import choose_device, explain_out_of_memory
from common.logging import log
from common.progress import progress_bar
from model.encoder import VideoEncoder
from model.weights.pretrained import find_file, trained_rate
from model.weights.weight_files import save_tensors
from pipeline.config import DataConfig
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.plan import EvaluationPlan
from pipeline.shards.dataset import ShardDataset


@explain_out_of_memory("lower --batch-size")
def main(options: argparse.Namespace) -> None:
    device = choose_device(options.device)
    changes = {name: getattr(options, name) for name in ("num_frames", "image_size") if getattr(options, name)}
    encoder = VideoEncoder.from_pretrained(options.model, **changes).to(device)
    dataset = ShardDataset.open(options.shards)
    rate = {"frame_stride": options.frame_stride} if options.frame_stride else trained_rate(options.model)
    data = DataConfig(shards=options.shards, **rate)
    plan = EvaluationPlan(
        dataset, data, num_frames=encoder.config.num_frames, image_size=encoder.config.image_size,
        batch_size=options.batch_size,
    )  # fmt: skip
    batches_per_file = max(1, options.videos_per_file // options.batch_size)
    videos_per_file = batches_per_file * options.batch_size
    write_settings(options.output, {
        "model": str(find_file(options.model).resolve()),
        "shards": [shard.sha256 for shard in dataset.info.shards],
        **rate,
        "tokens": options.tokens,
        "videos": len(plan),
        "videos_per_file": videos_per_file,
        **changes,
    })  # fmt: skip

    files = [options.output / f"features-{i:05d}.safetensors" for i in range(-(-len(plan) // videos_per_file))]
    done = next((i for i, file in enumerate(files) if not file.exists()), len(files))
    with (
        ClipLoader(dataset, plan, device, data, quarantine=None) as loader,
        progress_bar(unit="video", total=len(plan), initial=min(done * videos_per_file, len(plan))) as progress,
    ):
        batches = loader.batches(first=done * batches_per_file)
        for file in files[done:]:
            parts: list[dict[str, Tensor]] = []
            keys: list[str] = []
            for batch in islice(batches, batches_per_file):
                parts.append(encode_batch(encoder, batch, options.tokens))
                keys += batch.keys
                progress.update(len(batch.keys))
            tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            with atomic_write(file) as partial:
                save_tensors(partial, tensors, {"keys": json.dumps(keys)})
    log(f"wrote features for {len(plan)} videos to {options.output}")


def write_settings(output: Path, settings: dict[str, Any]) -> None:
    """Write features.json; raise InputError if OUT was begun with other settings."""
    file = output / "features.json"
    if not file.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_json(file, settings)
    elif (before := json.loads(file.read_text(encoding="utf-8"))) != settings:
        other = ", ".join(name for name in settings | before if before.get(name) != settings.get(name))
        raise InputError(f"{output} has features made with another {other}: choose another OUT, or remove it")


@torch.no_grad()
def encode_batch(encoder: VideoEncoder, batch: Batch, with_tokens: bool) -> dict[str, Tensor]:
    device = batch.clip.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        features = encoder.encode(batch.clip)
    found = {"pooled": features.pooled.float().cpu(), "labels": batch.labels.cpu()}
    return found | ({"tokens": features.tokens.half().cpu()} if with_tokens else {})


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS), resumable=True)
