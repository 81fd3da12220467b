"""Measure features of whole videos beside a plain loop over Hugging Face's VideoMAE, with the same weights.

    python benchmarks/feature_speed.py VIDEOS [--size small] [--stride 8] [--rounds 2] [--output FOLDER]

VIDEOS is a folder, or a list as extract_features.py takes it. Windows have 16 frames, every 4th of the file, and begin
--stride sampled frames apart. The plain loop decodes a video once by PyAV, in FFmpeg's own threads, has transformers'
processor make clips of 8 windows at a time, and encodes them. First, both must find the same features of the same clip;
then, as many windows in every video. Each has a process of its own in every round; loading the weights counts.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

import extract_features
from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import Report, Row, in_fresh_process, noise_clip, print_table, require
from benchmarks.pipeline_throughput import cpu_seconds
from common.devices import choose_device
from common.errors import InputError, run_command
from export import export_huggingface
from model.adamae import AdaMAE
from model.config import SIZES, ModelConfig
from model.weights.models import load_encoder
from model.weights.pretrained import ENCODER_PARTS, Weights
from pipeline.decoding.containers import open_video
from shard_tools.inputs import read_inputs

FRAME_STRIDE, BATCH_SIZE = 4, 8
TOLERANCE = 1e-4  # of a feature, relative to the largest


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("videos", type=Path, help="a folder or a list of videos")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--stride", type=at_least(1), default=8, help="sampled frames from window to window")
    parser.add_argument("--rounds", type=at_least(1), default=2)
    options = parser.parse_args(arguments)
    device = choose_device()
    report = Report("feature_speed", options.output, device, (), ("av", "transformers"), model=options.size)
    config = ModelConfig(size=options.size, masking="random")
    with TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"
        state = {name: values for name, values in AdaMAE(config).state_dict().items() if name.startswith(ENCODER_PARTS)}
        export_huggingface(Weights(state, config, []), weights)
        check_features(weights, config, device)
        implementations = {"ours": run_ours, "plain loop": run_plain}
        found: dict[str, list[Row]] = {name: [] for name in implementations}
        for number in range(options.rounds):
            for name, run in implementations.items():
                output = Path(folder) / f"{name}-{number}"
                found[name].append(in_fresh_process(measure, run, options.videos, weights, options.stride, output))
    theirs = found["plain loop"][0]["windows"]
    for key, windows in found["ours"][0]["windows"].items():
        require(f"windows of {key}", windows == theirs.get(key), f"{windows} and {theirs.get(key)}")
    rows = [summarize(name, rounds) for name, rounds in found.items()]
    for row in rows:
        row["relative_to_plain"] = round(rows[-1]["cpu_ms_per_window"] / row["cpu_ms_per_window"], 2)
    report.write(rows)
    print_table(rows)


def check_features(weights: Path, config: ModelConfig, device: torch.device) -> None:
    """Require the same features of the same clip."""
    torch.manual_seed(0)
    clip = noise_clip(config, 1, device)
    ours = load_encoder(weights).to(device).encode(clip).pooled
    model, processor = load_plain(weights, device)
    pixels = processor(list(clip[0].cpu().numpy()), return_tensors="pt")["pixel_values"].to(device)
    off = (encode_plain(model, pixels) - ours).abs().max().item() / ours.abs().max().item()
    require("features of the same clip are the same", off < TOLERANCE, f"they differ by {off:.1e} of the largest")


def measure(run: Any, videos: Path, weights: Path, stride: int, output: Path) -> Row:
    cpu, started = cpu_seconds(), time.perf_counter()
    run(videos, weights, stride, output)
    cpu, seconds = cpu_seconds() - cpu, time.perf_counter() - started
    files = sorted(output.rglob("*.npy"))
    windows = {file.relative_to(output).with_suffix("").as_posix(): len(np.load(file)) for file in files}
    return {"seconds": seconds, "cpu_seconds": cpu, "windows": windows}


def run_ours(videos: Path, weights: Path, stride: int, output: Path) -> None:
    given = [f"--model={weights}", f"--stride={stride}", f"--frame-stride={FRAME_STRIDE}", "--format=npy"]
    extract_features.main(extract_features.parse_arguments([str(videos), str(output), *given]))


@torch.no_grad()
def run_plain(videos: Path, weights: Path, stride: int, output: Path) -> None:
    device = choose_device()
    model, processor = load_plain(weights, device)
    length = model.config.num_frames
    for item in read_inputs(str(videos)):
        with open_video(Path(str(item.location))) as container:
            container.streams.video[0].thread_type = "AUTO"
            decoded = enumerate(container.decode(video=0))
            frames = [frame.to_ndarray(format="rgb24") for number, frame in decoded if number % FRAME_STRIDE == 0]
        frames += [frames[-1]] * (length - len(frames))
        windows = [frames[first : first + length] for first in range(0, len(frames) - length + 1, stride)]
        found = []
        for first in range(0, len(windows), BATCH_SIZE):
            pixels = processor(windows[first : first + BATCH_SIZE], return_tensors="pt")["pixel_values"]
            found.append(encode_plain(model, pixels.to(device)).cpu())
        file = output / f"{extract_features.make_file_name(item)}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, torch.cat(found).numpy())


def load_plain(weights: Path, device: torch.device) -> tuple[Any, Any]:
    try:
        from transformers import AutoImageProcessor, VideoMAEModel
    except ImportError as error:
        raise InputError("Hugging Face's VideoMAE is not installed: pip install -e '.[dev]'") from error
    processor: Any = AutoImageProcessor.from_pretrained(weights)
    model: Any = VideoMAEModel.from_pretrained(weights)
    return model.to(device).eval(), processor


@torch.no_grad()
def encode_plain(model: Any, pixels: Tensor) -> Tensor:
    features: Tensor = model(pixels).last_hidden_state.mean(dim=1)
    return features


def summarize(name: str, rounds: list[Row]) -> Row:
    """Take the round with the least CPU time, which other programs have disturbed least."""
    best, windows = min(rounds, key=lambda row: row["cpu_seconds"]), sum(rounds[0]["windows"].values())
    milliseconds = {"cpu_ms_per_window": best["cpu_seconds"], "ms_per_window": best["seconds"]}
    row: Row = {"implementation": name, "videos": len(rounds[0]["windows"]), "windows": windows}
    return row | {column: round(seconds / windows * 1e3, 1) for column, seconds in milliseconds.items()}


if __name__ == "__main__":
    run_command(main)
