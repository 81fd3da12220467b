"""Extract features along videos: `python extract_features.py INPUT OUT --model RUN [--stride 8]`.

INPUT is a dataset of shards, or the folder with train/ and validation/, or what make_shards.py
takes: a video, a folder, a list, tars, with all subsets. Windows of --window frames slide over each
video by --stride frames; both count sampled frames, which are --frame-stride source frames apart
or, with --fps, 1/fps seconds. A window has the frames of a training clip that begins where it does,
and the center crop. A video that is shorter than a window repeats its last frame, and what is left
after the last whole window is not covered. With --pad, windows end at the first frame and at every
--stride-th after it, and see nothing later: the first frame is repeated before them; --pad --stride
1 is a vector a frame.

Each video, segment or episode gets a file, OUT/<its path in INPUT>.safetensors, with the tensors
`features` [W, D] fp32, means over the tokens of each window; `frames` [W, 2] int64 and `times` [W,
2] fp64, of its first and last frame: its number, counted in source frames since the first one of
the video, segment or episode, and its own time in seconds in the source, where that begins at
`offset`; and with --tokens `tokens` [W, t, h, w, D] fp16. The metadata are its key, source,
segment, episode, offset, label, `fields` (what else a list says of it, as JSON) and `incomplete`:
why the rest of a damaged video is missing. With --format parquet, files have a row per window, with
the metadata, `first_frame`, `last_frame`, `start` and `end` (seconds) as columns. With --format
webdataset, OUT has tars of up to 1,000 videos, each with its arrays as .npy and its metadata as
.json. What is there already is skipped. OUT may be a URL in object storage, where each file of the
first two formats is as soon as it is made.

The exit code is 1 if a video could not be read to its end.
"""

import argparse
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between, parse_part
from adamae.common.errors import InputError, parse_early, run_command


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("input", metavar="INPUT", help="shards, videos, or a list of videos")
    add("output", metavar="OUT", help="folder or URL for the features")
    add(
        "--model",
        required=True,
        help="run, checkpoint, export, another project's file or folder, or hf://user/name",
    )
    add(
        "--columns",
        metavar="ROLE=COLUMN,…",
        help="what the columns of a list hold, as for make_shards.py (docs/shards.md)",
    )
    add("--window", type=between(1), metavar="T", help="frames per window; default: as trained")
    add(
        "--stride",
        type=between(1),
        metavar="N",
        help="frames from window to window; default: a whole window",
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--frame-stride",
        type=between(1),
        metavar="N",
        help="source frames; default: the run's, else 4",
    )
    rate.add_argument(
        "--fps", type=between(1, kind=float), help="sampled frames per second; some may repeat"
    )
    add(
        "--pad",
        action="store_true",
        help="windows end at the first frame and at every --stride-th after it",
    )
    add(
        "--image-size",
        type=int,
        nargs="+",
        metavar="PIXELS",
        help="side of a clip, or height and width; as trained",
    )
    add(
        "--batch-size",
        type=between(1),
        default=8,
        metavar="B",
        help="windows per forward pass (default 8)",
    )
    add("--tokens", action="store_true", help="also the features of every token, in fp16")
    add(
        "--format",
        choices=("safetensors", "parquet", "webdataset"),
        default="safetensors",
        help="a file per video, or tars of many (default safetensors)",
    )
    add(
        "--part",
        type=parse_part,
        default=(1, 1),
        metavar="I/N",
        help="only every Nth video, from the Ith: one per GPU",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    options = parser.parse_args(arguments)
    if options.tokens and options.format == "parquet":
        raise InputError(
            "--format parquet is for features alone: choose safetensors or webdataset with --tokens"
        )
    return options


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

from adamae.common.commands import command_line, log_next
from adamae.common.devices import choose_device, explain_out_of_memory
from adamae.common.locations import is_remote
from adamae.common.logging import format_count, log
from adamae.model.encoders.open_encoder import open_encoder
from adamae.training.extraction import ExtractionOptions, extract_features
from adamae.training.remote_run import local_run


@explain_out_of_memory("lower --batch-size")
def main(options: argparse.Namespace) -> int:
    is_on_hub = options.model.startswith("hf://")
    encoder = open_encoder(
        options.model if is_on_hub else local_run(options.model),
        num_frames=options.window,
        image_size=options.image_size,
    )
    encoder = encoder.to(choose_device(options.device))
    extraction = ExtractionOptions(
        stride=options.stride,
        frame_stride=options.frame_stride,
        fps=options.fps,
        pad=options.pad,
        tokens=options.tokens,
        format=options.format,
        part=options.part,
        batch_size=options.batch_size,
        columns=options.columns,
    )
    summary = extract_features(options.input, options.output, encoder, options.model, extraction)
    line = f"wrote features of {format_count(summary.num_written, 'video')} to {options.output}"
    if summary.num_earlier:
        line += f", where those of {summary.num_earlier} were already"
    if summary.num_incomplete:
        videos = format_count(summary.num_incomplete, "video")
        line += f"; {videos} could not be read to the end (exit code 1)"
    log(line)
    file = None
    if not is_remote(options.output):
        file = next(Path(options.output).rglob("*.safetensors"), None)
    if file is not None:
        log_next(command_line("search", options.output, file, "--index", 0))
    return 1 if summary.num_incomplete else 0


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS), resumable=True)
