"""Features of a whole dataset: `python -m model.features SHARDS OUT --model RUN`.

OUT gets `features.json`, what was done, and `features-00000.safetensors`, ... with the tensors `pooled` [n, D] fp32,
`labels` [n] int64 (-1: none) and, with --tokens, `tokens` [n, N, D] fp16; the videos' keys are JSON in the metadata
under `keys`. One clip a video: its middle, centre crop. Started again, the command goes on with the next file.
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.atomic_io import atomic_write, write_json
from common.devices import choose_device, explain_out_of_memory
from common.errors import InputError, run_command
from common.logging import log
from common.progress import progress_bar
from model.encoder import VideoEncoder
from model.weights.pretrained import find_file, trained_stride
from model.weights.weight_files import save_tensors
from pipeline.config import DataConfig
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.plan import EvaluationPlan
from pipeline.shards.dataset import ShardDataset


@explain_out_of_memory("lower --batch-size")
def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    output = Path(options.output)
    device = choose_device(options.device)
    asked = {name: getattr(options, name) for name in ("num_frames", "image_size") if getattr(options, name)}
    encoder = VideoEncoder.from_pretrained(options.model, **asked).to(device)
    dataset = ShardDataset.open(options.shards)
    stride = options.frame_stride or trained_stride(Path(options.model))
    data = DataConfig(shards=options.shards, frame_stride=stride)
    plan = EvaluationPlan(
        dataset, data, num_frames=encoder.config.num_frames, image_size=encoder.config.image_size,
        batch_size=options.batch_size,
    )  # fmt: skip
    per_file = max(1, options.videos_per_file // options.batch_size)  # batches
    described = {
        "model": str(find_file(Path(options.model)).resolve()),
        "shards": [shard.sha256 for shard in dataset.info.shards],
        "frame_stride": stride,
        "tokens": options.tokens,
        "videos": len(plan),
        "videos_per_file": per_file * options.batch_size,
        **asked,
    }
    begin(output, described)

    files = [output / f"features-{i:05d}.safetensors" for i in range(-(-len(plan) // (per_file * options.batch_size)))]
    done = next((i for i, file in enumerate(files) if not file.exists()), len(files))
    with (
        ClipLoader(dataset, plan, device, data, quarantine=None) as loader,
        progress_bar(
            unit="video", total=len(plan), initial=min(done * per_file * options.batch_size, len(plan))
        ) as progress,
    ):
        batches = loader.batches(first=done * per_file)
        for file in files[done:]:
            parts: list[dict[str, Tensor]] = []
            keys: list[str] = []
            for batch in islice(batches, per_file):
                parts.append(features_of(encoder, batch, options.tokens))
                keys += batch.keys
                progress.update(len(batch.keys))
            tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            with atomic_write(file) as aside:
                save_tensors(aside, tensors, {"keys": json.dumps(keys)})
    log(f"{len(plan)} videos' features are in {output}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m model.features", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", metavar="SHARDS", help="a folder that shard_tools/make_shards.py has written")
    parser.add_argument("output", metavar="OUT", help="folder for the features")
    parser.add_argument("--model", required=True, help="run folder, checkpoint, export or published file")
    parser.add_argument("--frame-stride", type=int, metavar="N", help="source frames; default: the run's, else 4")
    parser.add_argument(
        "--num-frames", type=int, metavar="T", help="of a clip; default: what the model was trained with"
    )
    parser.add_argument("--image-size", type=int, nargs="+", metavar="PIXELS", help="likewise; or height and width")
    parser.add_argument("--batch-size", type=int, default=8, metavar="B", help="clips at a time (default 8)")
    parser.add_argument("--videos-per-file", type=int, default=1024, metavar="V", help="(default 1024)")
    parser.add_argument("--tokens", action="store_true", help="also the features of every token, in fp16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    options = parser.parse_args(arguments)
    for name in ("batch_size", "videos_per_file", "frame_stride", "num_frames"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(options, name)}: give at least 1")
    return options


def begin(output: Path, described: dict[str, Any]) -> None:
    """Say in OUT what is done there; raises InputError if it is something else than what was begun."""
    file = output / "features.json"
    if not file.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_json(file, described)
    elif (before := json.loads(file.read_text(encoding="utf-8"))) != described:
        names = described | before
        other = ", ".join(name for name in names if before.get(name) != described.get(name))
        raise InputError(f"{output} holds features made with another {other}: choose another OUT, or remove it")


@torch.no_grad()
def features_of(encoder: VideoEncoder, batch: Batch, with_tokens: bool) -> dict[str, Tensor]:
    device = batch.clip.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        features = encoder.encode(batch.clip)
    found = {"pooled": features.pooled.float().cpu(), "labels": batch.labels.cpu()}
    return found | ({"tokens": features.tokens.half().cpu()} if with_tokens else {})


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]), resumable=True)
