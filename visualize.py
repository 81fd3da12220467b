"""What a model makes of videos: `python visualize.py RUN VIDEO... [--output FOLDER]`.

Writes for each video the paper's figure (frames, reconstruction, error, probability, mask) as PNG and GIF. A VIDEO is a
file, a folder of files or a folder of shards; RUN is a run folder, one of its checkpoints, or any file of weights that
model/weights/pretrained.py reads.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import common.openmp  # noqa: F401

import torch
from PIL import Image

from common.atomic_io import atomic_write, write_text
from common.errors import InputError, run_command
from common.logging import escape, log
from common.progress import progress_bar
from figures import drawing
from figures.clips import Clip, read_clips
from figures.drawing import Row
from figures.report import Sheet, page
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.maps import Maps
from model.weights.pretrained import find_file, run_of, trained_stride
from training.checkpoint import existing, step_of
from training.remote_run import local_run

REPORT_RATIOS = (0.5, 0.75, 0.85, 0.9, 0.95, 0.98)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    run = Path(options.run)
    model = AdaMAE.from_pretrained(run, **({} if options.mask_ratio is None else {"mask_ratio": options.mask_ratio}))
    config = model.config
    output = Path(options.output or figures_of(run))
    output.mkdir(parents=True, exist_ok=True)
    stride = options.frame_stride or trained_stride(run)
    clips = read_clips(
        [Path(video) for video in options.videos], config.num_frames, config.image_size, stride, options.clips
    )
    report = []
    for clip in progress_bar(clips, unit="clip", desc="figures"):
        rows = drawing.figure_rows(reconstruct(model, clip, options.seed))
        write_figure(output / clip.name, rows, config, clip)
        if options.strategies:
            rows = strategy_rows(model, clip, options.seed)
            write_picture(output / f"{clip.name}.strategies.png", rows, config, clip)
        if options.checkpoints:
            rows = checkpoint_rows(run, config, clip, options.seed)
            write_picture(output / f"{clip.name}.checkpoints.png", rows, config, clip)
        if options.beside:
            rows = run_rows([run, *options.beside], model, clip, options)
            write_picture(output / f"{clip.name}.runs.png", rows, config, clip)
        if options.html:
            report.append((clip.name, list(sheets(model, clip, options.seed))))
    if report:
        write_text(output / "report.html", page(f"AdaMAE: {run}", report, drawing.note_on(config)))
    log(f"figures are in {output}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=local_run, metavar="RUN", help="run folder, checkpoint or file of weights")
    parser.add_argument("videos", metavar="VIDEO", nargs="+", help="video file, folder of videos, folder of shards")
    parser.add_argument("--output", metavar="FOLDER", help="default: figures/ in the run folder")
    parser.add_argument("--mask-ratio", type=float, metavar="R", help="share to hide; default: the one trained with")
    parser.add_argument(
        "--frame-stride", type=int, metavar="N", help="frames of the source; default: the run's, else 4"
    )
    parser.add_argument("--clips", type=int, default=8, metavar="N", help="videos shown of each folder (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the masks")
    parser.add_argument("--strategies", action="store_true", help="also the masking strategies below each other")
    parser.add_argument("--checkpoints", action="store_true", help="also the same clip over the run's checkpoints")
    parser.add_argument("--beside", type=Path, action="append", metavar="RUN", help="also this run, below RUN")
    parser.add_argument("--html", action="store_true", help="also report.html, with sliders over frames and ratios")
    options = parser.parse_args(arguments)
    for name in ("frame_stride", "clips"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}: give a whole number of at least 1")
    return options


def figures_of(run: Path) -> Path:
    """Where figures go: not into a checkpoint, which is deleted when there are newer ones."""
    return (run_of(find_file(run)) or (run if run.is_dir() else Path())) / "figures"


def reconstruct(model: AdaMAE, clip: Clip, seed: int) -> Maps:
    return model.reconstruct(clip.frames[None], seed)


def strategy_rows(model: AdaMAE, clip: Clip, seed: int) -> list[Row]:
    """One model under each way of masking, at the model's ratio; ways that hide the same tokens share their rows."""
    ratio = model.config.mask_ratio
    found: dict[str, Maps] = {}
    for masking in ("adaptive", "random", "tube", "frame"):
        if masking == "adaptive" and not model.token_sampler.looks:
            continue
        # Of frames, at least one token frame has to stay.
        share = min(ratio, 1 - 1 / model.config.grid[0]) if masking == "frame" else ratio
        maps = reconstruct(model.remasked(masking=masking, mask_ratio=share), clip, seed)
        same = next((title for title, other in found.items() if torch.equal(other.is_masked, maps.is_masked)), None)
        if same is None:
            found[masking] = maps
        else:
            found = {f"{title} = {masking}" if title == same else title: other for title, other in found.items()}
    rows = [drawing.frames_row(next(iter(found.values())))]
    for title, maps in found.items():
        rows += labelled(
            title, [drawing.mask_row(maps), drawing.reconstruction_rows(maps)[-1], drawing.error_row(maps)]
        )
    return rows


def checkpoint_rows(run: Path, config: ModelConfig, clip: Clip, seed: int) -> list[Row]:
    """The same clip and the same noise, as training went on."""
    folders = existing(run / "checkpoints")
    if not folders:
        raise InputError(f"{run} has no checkpoints/: --checkpoints needs a run folder")
    rows: list[Row] = []
    for folder in folders:
        maps = reconstruct(AdaMAE.from_pretrained(folder, mask_ratio=config.mask_ratio), clip, seed)
        shown = [] if maps.probability is None else [drawing.probability_row(maps)]
        rows = rows or [drawing.frames_row(maps)]
        rows += labelled(f"step {step_of(folder.name)}", [*shown, drawing.reconstruction_rows(maps)[-1]])
    return rows


def run_rows(runs: list[Path], model: AdaMAE, clip: Clip, options: argparse.Namespace) -> list[Row]:
    """The same clip and the same noise under several models, named after their folders or files."""
    rows = [drawing.frames_row(reconstruct(model, clip, options.seed))]
    for run in runs:
        changes = {} if options.mask_ratio is None else {"mask_ratio": options.mask_ratio}
        other = AdaMAE.from_pretrained(run, **changes)
        if (other.config.num_frames, other.config.frame_size) != (model.config.num_frames, model.config.frame_size):
            raise InputError(f"{run} is for clips of another shape than {runs[0]}: they cannot be shown side by side")
        maps = reconstruct(other, clip, options.seed)
        shown = [] if maps.probability is None else [drawing.probability_row(maps)]
        rows += labelled(run.name, [*shown, drawing.mask_row(maps), drawing.reconstruction_rows(maps)[-1]])
    return rows


def labelled(title: str, rows: list[Row]) -> list[Row]:
    return [row._replace(label=f"{escape(title)}:\n{row.label}") for row in rows]


def sheets(model: AdaMAE, clip: Clip, seed: int) -> Iterator[Sheet]:
    """The five rows at every ratio at which this clip shape leaves something visible."""
    for ratio in sorted({*REPORT_RATIOS, model.config.mask_ratio}):
        try:
            replace(model.config, mask_ratio=ratio)
        except InputError:  # too few tokens, or token frames, for this ratio
            continue
        yield Sheet(ratio, drawing.figure_rows(reconstruct(model.remasked(mask_ratio=ratio), clip, seed)))


def write_figure(stem: Path, rows: list[Row], config: ModelConfig, clip: Clip) -> None:
    write_picture(stem.with_name(stem.name + ".png"), rows, config, clip)
    first, *others = drawing.animation(rows)
    with atomic_write(stem.with_name(stem.name + ".gif")) as aside:
        first.save(aside, "GIF", save_all=True, append_images=others, duration=160, loop=0)


def write_picture(path: Path, rows: list[Row], config: ModelConfig, clip: Clip) -> None:
    picture: Image.Image = drawing.picture(rows, config.tubelet_size, clip.times, drawing.note_on(config))
    with atomic_write(path) as aside:
        picture.save(aside, "PNG")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
