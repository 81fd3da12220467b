"""Find the moments that look most like a query: `python search.py FEATURES QUERY.mp4 --at 12.5`.

FEATURES is a folder that extract_features.py has written (safetensors or webdataset). QUERY is a
video, of which the query is the window of frames around --at, the mean over the windows in
--window, or the mean over all of it; or it is a file of features that the same model has made, with
--index the number of a window in it, from 0. A video is encoded by the model of FEATURES, at the
same frame rate.

The score is the cosine of the angle between features, whose mean is subtracted: 1 for the same
ones, about 0 for moments that have nothing in common. Windows that overlap a better one are left
out. The moments are printed, and written to --output: NAME.csv with their files, times in seconds
and scores, and NAME.png with their frames, where the videos are still in their places.
"""

import argparse
from pathlib import Path

from adamae.common.arguments import ArgumentParser, between
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.locations import local_path


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("features", metavar="FEATURES", type=local_path, help="folder of extract_features.py")
    add("query", metavar="QUERY", help="a video, or a .safetensors file of features")
    moment = parser.add_mutually_exclusive_group()
    moment.add_argument(
        "--at", type=between(0, kind=float), metavar="SECONDS", help="the moment in the video"
    )
    moment.add_argument(
        "--window", type=parse_window, metavar="START,END", help="the part of the video, in seconds"
    )
    moment.add_argument(
        "--index", type=between(0), metavar="N", help="the window in the file of features, from 0"
    )
    add("--top", type=between(1), default=10, metavar="N", help="number of moments (default 10)")
    add("--model", help="where the model of FEATURES is now, if it has moved")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    add(
        "--output",
        type=local_path,
        metavar="DIR",
        help="folder of the results (default FEATURES/search)",
    )
    options = parser.parse_args(arguments)
    is_file_of_features = options.query.endswith(".safetensors")
    if is_file_of_features and options.index is None:
        raise InputError(f"{options.query} has many windows: choose one with --index N")
    if options.index is not None and not is_file_of_features:
        raise InputError("--index is for a .safetensors file of features: give --at to a video")
    return options


def parse_window(text: str) -> tuple[float, float]:
    """Parse START,END in seconds: "10,14" is (10, 14)."""
    start, _, end = text.partition(",")
    try:
        window = float(start), float(end)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not like 10,14") from error
    if not 0 <= window[0] < window[1]:
        raise argparse.ArgumentTypeError(f"{text} does not end after it starts")
    return window


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import math
import sys
from itertools import islice
from typing import Any

import numpy as np

from adamae.common.atomic_io import make_output_folder
from adamae.common.csv_files import write_csv
from adamae.common.devices import choose_device
from adamae.common.logging import log, printable
from adamae.figures.sheet import Layout, Row, render_sheet, save_image
from adamae.model.encoders.encoder import Encoder
from adamae.model.encoders.open_encoder import open_encoder
from adamae.model.weights.integrity import hash_tensors
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning.crops import FrameSize
from adamae.pipeline.shards.arrays import to_rgb
from adamae.training.extraction import encode_clips, stack_images, take_batches
from adamae.training.feature_files import read_feature_files
from adamae.training.feature_search import Moment, Query, find_moments
from adamae.training.feature_settings import read_settings
from adamae.training.remote_run import local_run
from adamae.training.video_windows import WindowReader

# Frames of a moment in the contact sheet.
NUM_COLUMNS = 6
# Windows per forward pass.
BATCH_SIZE = 8


def main(options: argparse.Namespace) -> None:
    settings = read_settings(options.features)
    reader = open_reader(settings)
    images = None
    if options.index is None:
        query, images = encode_query(options, settings, reader)
    else:
        query = read_query(Path(options.query), options.index, settings)
    moments = find_moments(options.features, query, options.top)
    for line in format_table(moments):
        log(line)
    output = options.output or options.features / "search"
    make_output_folder(output)
    name = output / Path(options.query).stem
    write_csv(
        name.with_name(f"{name.name}.csv"),
        ("rank", "score", "source", "key", "start", "end"),
        list_rows(moments),
    )
    log(f"wrote {name}.csv")
    rows = make_sheet(moments, settings["input"], reader)
    if images is not None:
        rows.insert(0, make_row(f"query\n{printable(Path(options.query).name)}", images))
    if rows:
        sheet = render_sheet(rows, range(NUM_COLUMNS), Layout.fit(rows, NUM_COLUMNS))
        save_image(sheet, name.with_name(f"{name.name}.png"))
        log(f"wrote {name}.png")


def open_reader(settings: dict[str, Any]) -> WindowReader:
    """Return the reader of windows like those that features were made of."""
    if "num_frames" not in settings:
        raise InputError("these features were made by hand, of whole videos: extract a model's")
    data = DataConfig(frame_stride=settings["frame_stride"], fps=settings["fps"])
    size = FrameSize(*settings["image_size"])
    return WindowReader(data, size, settings["num_frames"], settings["stride"], settings["pad"])


def open_model(settings: dict[str, Any], model: str | None) -> Encoder:
    """Open the encoder of features; raise InputError if it is another one, or cannot be opened."""
    spec = model or settings["model"]
    try:
        encoder = open_encoder(
            spec if spec.startswith("hf://") else local_run(spec),
            num_frames=settings["num_frames"],
            image_size=settings["image_size"],
            frames=settings["frames"] or "mean",
        )
    except InputError as error:
        raise InputError(
            f"the model of these features cannot be opened ({error}): say where it is with --model"
        ) from error
    if hash_tensors(encoder.state_dict()) != settings["weights"]:
        raise InputError(
            f"{spec} has other weights than the features were made with: say with --model where"
            " those are, or extract the features again"
        )
    return encoder


def encode_query(
    options: argparse.Namespace, settings: dict[str, Any], reader: WindowReader
) -> tuple[Query, np.ndarray]:
    """Encode the moment of a video; return it with the images of its first window."""
    encoder = open_model(settings, options.model).to(choose_device(options.device))
    start, end = options.window or (0.0, math.inf)
    if options.at is not None:
        start = max(0.0, options.at - reader.measure_window(options.query) / 2)
    video = reader.find_segment(options.query, start, end)
    windows = (window for window in reader.read_windows(video) if window.frames)
    num_windows = 1 if options.at is not None else None
    images = None
    features = []
    for batch in take_batches(islice(windows, num_windows), BATCH_SIZE):
        clips = np.stack([stack_images(window) for window in batch])
        features.append(encode_clips(encoder, clips)["features"])
        if images is None:
            images = clips[0]
    if images is None or video.incomplete:
        raise InputError(
            f"{printable(options.query)} cannot be encoded: {video.incomplete or 'it has no frame'}"
        )
    return Query(np.concatenate(features).mean(axis=0)), images


def read_query(file: Path, index: int, settings: dict[str, Any]) -> Query:
    """Return a window of a file of features.

    Raise InputError if there is no such file or window, or another model has made it.
    """
    if not file.is_file():
        raise InputError(f"{file} does not exist: name a .safetensors file in a folder of features")
    for folder in file.resolve().parents:
        if (folder / "features.json").is_file():
            if read_settings(folder).get("weights") != settings["weights"]:
                raise InputError(f"{file} has features of another model: they cannot be compared")
            break
    (video,) = read_feature_files(file)
    if index >= len(video.features):
        last = len(video.features) - 1
        raise InputError(f"{file} has no window {index}: give --index from 0 to {last}")
    start, end = video.times[index].tolist()
    first, last = video.frames[index].tolist()
    key = video.metadata["key"]
    own = Moment(1.0, key, video.metadata["source"], (start, end), (first, last))
    return Query(video.features[index].numpy(), own)


def list_rows(moments: list[Moment]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for rank, moment in enumerate(moments, 1):
        start, end = moment.times
        score = round(moment.score, 6)
        rows.append((rank, score, moment.source, moment.key, round(start, 6), round(end, 6)))
    return rows


def format_table(moments: list[Moment]) -> list[str]:
    lines = [f"{'':>4}  {'score':>6}  {'start s':>9}  {'end s':>9}  video"]
    for rank, moment in enumerate(moments, 1):
        start, end = moment.times
        source = printable(moment.source)
        lines.append(f"{rank:>4}  {moment.score:>6.3f}  {start:>9.2f}  {end:>9.2f}  {source}")
    return lines


def make_sheet(moments: list[Moment], source: str, reader: WindowReader) -> list[Row]:
    """Return the frames of moments; say on stderr whose videos are not there any more."""
    keys = {moment.key for moment in moments}
    try:
        videos = [video for video in reader.list_videos(source) if video.key in keys]
    except InputError as error:
        log(f"no contact sheet of the moments: {error}", sys.stderr)
        return []
    images: dict[tuple[str, tuple[int, int]], np.ndarray] = {}
    for video in videos:
        needed = {moment.frames for moment in moments if moment.key == video.key}
        for window in reader.read_windows(video):
            if not window.frames:
                break
            frames = window.frames[0].number, window.frames[-1].number
            if frames in needed:
                images[video.key, frames] = stack_images(window)
    rows = []
    for rank, moment in enumerate(moments, 1):
        clip = images.get((moment.key, moment.frames))
        name = printable(Path(moment.source).name)
        if clip is None:
            log(f"{name} is not in the contact sheet: it cannot be read any more", sys.stderr)
            continue
        start, end = moment.times
        label = f"{rank}: score {moment.score:.3f}\n{name}\n{start:.2f} to {end:.2f} s"
        rows.append(make_row(label, clip))
    return rows


def make_row(label: str, clip: np.ndarray) -> Row:
    """Return a row with evenly spread frames of a clip."""
    columns = np.linspace(0, len(clip) - 1, NUM_COLUMNS).round().astype(int)
    return Row(label, to_rgb(clip[columns]))


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS))
