"""Extract the features of windows along videos, with any frozen encoder."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8

from adamae.common.errors import InputError
from adamae.common.logging import log, printable
from adamae.common.progress import progress_bar
from adamae.model.channels import takes_channels
from adamae.model.encoders.encoder import Encoder
from adamae.model.weights.integrity import hash_tensors
from adamae.pipeline.config import DEFAULT_STRIDE, DataConfig
from adamae.pipeline.planning.crops import FrameSize
from adamae.training.feature_files import FeatureWriter, WindowArrays, open_writer
from adamae.training.feature_settings import hash_datasets
from adamae.training.video_windows import ListedVideo, Window, WindowReader, open_datasets

T = TypeVar("T")


@dataclass(frozen=True)
class ExtractionOptions:
    """How windows are cut and features are stored."""

    # Sampled frames from window to window; None: a whole window.
    stride: int | None = None
    # Source frames between sampled ones, or sampled frames per second; neither: as the encoder was
    # trained, or else every fourth frame.
    frame_stride: int | None = None
    fps: float | None = None
    # Whether windows end at the first frame and at every stride-th after it.
    pad: bool = False
    # Whether the features of every token are stored, too.
    tokens: bool = False
    # safetensors, parquet or webdataset.
    format: str = "safetensors"
    # (1, 4) takes the first, fifth, … video: processes on four GPUs take a part each.
    part: tuple[int, int] = (1, 1)
    # Windows per forward pass.
    batch_size: int = 8
    # What the columns of a list hold, as --columns of make_shards.py.
    columns: str | None = None

    def choose_rate(self, encoder: Encoder) -> DataConfig:
        """Return the frame rate or stride that is set, or else the encoder's in training."""
        if self.frame_stride or self.fps:
            return DataConfig(frame_stride=self.frame_stride, fps=self.fps)
        return DataConfig(**(encoder.frame_rate or {"frame_stride": DEFAULT_STRIDE}))


class ExtractionSummary(NamedTuple):
    """What an extraction has done, in numbers of videos."""

    num_written: int
    # Of which an earlier extraction has stored the features.
    num_earlier: int
    # Of which the features of the rest are missing.
    num_incomplete: int


def extract_features(
    source: str, output: str | Path, encoder: Encoder, model: str, options: ExtractionOptions
) -> ExtractionSummary:
    """Write the features of all videos of `source` to the folder, or the URL, `output`.

    What is there already is skipped, so the same call resumes one that was killed.

    source: shards, a folder of shards, or what make_shards.py takes.
    model: the path or the name by which the encoder was opened, for features.json.

    Raise InputError if there are no videos, or `output` has features that were made with another
    encoder, of other shards or in another way.
    """
    part, num_parts = options.part
    # Raises here if a package is missing.
    writer = open_writer(options.format, output, part, num_parts)
    data = options.choose_rate(encoder)
    length = encoder.num_frames
    reader = WindowReader(
        data, FrameSize(*encoder.image_size), length, options.stride or length, options.pad
    )
    # Raises here if there are none.
    videos = list(islice(reader.list_videos(source, options.columns), part - 1, None, num_parts))
    writer.begin(describe_settings(source, encoder, model, reader, options))
    with writer:
        missing = [video for video in videos if not writer.has(video)]
        num_incomplete = _write_features(missing, reader, encoder, writer, options)
    _warn_of_repeated_frames(missing, data)
    num_written = len(missing) - num_incomplete
    return ExtractionSummary(num_written, len(videos) - len(missing), num_incomplete)


def describe_settings(
    source: str, encoder: Encoder, model: str, reader: WindowReader, options: ExtractionOptions
) -> dict[str, Any]:
    """Return the content of features.json: all that the features depend on."""
    return {
        "model": str(Path(model).resolve()) if Path(model).exists() else model,
        "input": str(Path(source).resolve()) if Path(source).exists() else source,
        "weights": hash_tensors(encoder.state_dict()),
        "dataset": hash_datasets(open_datasets(source)),
        "num_frames": encoder.num_frames,
        "image_size": list(encoder.image_size),
        # Of image models alone.
        "frames": getattr(encoder, "frames", None),
        "stride": reader.stride,
        "frame_stride": reader.data.frame_stride,
        "fps": reader.data.fps,
        "pad": options.pad,
        "tokens": options.tokens,
        "format": options.format,
        "columns": options.columns,
    }


def _warn_of_repeated_frames(videos: list[ListedVideo], data: DataConfig) -> None:
    slow = [video for video in videos if video.repeats_frames]
    if slow and data.fps:
        log(
            f"{len(slow)} of {len(videos)} videos have fewer than {data.fps:g} frames per"
            f" second, such as {printable(slow[0].source)}: some of their frames are repeated",
            sys.stderr,
        )


def take_batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, and the rest."""
    while batch := list(islice(items, size)):
        yield batch


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield items; a thread makes the next one, so videos are decoded during the forward pass."""
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = pool.submit(next, items, None)
            yield item


def _write_features(
    videos: list[ListedVideo],
    reader: WindowReader,
    encoder: Encoder,
    writer: FeatureWriter,
    options: ExtractionOptions,
) -> int:
    """Encode and write the windows of all videos; return how many could not be read to the end."""
    num_incomplete = 0
    windows = chain.from_iterable(map(reader.read_windows, videos))
    # Of the current video: a batch may begin with the last windows of one and hold the first of the
    # next.
    arrays = WindowArrays()
    with progress_bar(unit="video", total=len(videos)) as progress:
        for batch in prefetch(take_batches(windows, options.batch_size)):
            encoded = _encode_windows(
                encoder, [window for window in batch if window.frames], options.tokens
            )
            row = 0
            for video, frames in batch:
                if frames:
                    arrays.append({name: values[row] for name, values in encoded.items()})
                    row += 1
                    continue
                # A window without frames marks the end of its video.
                if video.incomplete:
                    num_incomplete += 1
                    name = printable(video.source)
                    log(f"{name} is incomplete: {video.incomplete}", sys.stderr)
                if len(arrays):
                    writer.write(video, arrays.stack())
                arrays = WindowArrays()
                progress.update()
    return num_incomplete


def _encode_windows(
    encoder: Encoder, windows: list[Window], with_tokens: bool
) -> dict[str, np.ndarray]:
    """Return the arrays that are written of these windows, each with a row per window.

    Raise InputError for a video of channels that the encoder does not take.
    """
    if not windows:
        return {}
    clips = []
    for window in windows:
        clip = stack_images(window)
        channels = clip.shape[-1]
        if not takes_channels(encoder.channels, channels):
            raise InputError(
                f"{printable(window.video.source)} has {channels} channels, and the model takes"
                f" {encoder.channels}: leave it out, or choose a model that was trained on such"
                " videos"
            )
        clips.append(clip)
    arrays = encode_clips(encoder, np.stack(clips), with_tokens)
    ends = [(window.frames[0], window.frames[-1]) for window in windows]
    arrays["frames"] = np.array([(first.number, last.number) for first, last in ends])
    arrays["times"] = np.array([(first.time, last.time) for first, last in ends])
    return arrays


def stack_images(window: Window) -> UInt8[np.ndarray, "T H W C"]:
    return np.stack([frame.image for frame in window.frames])


@torch.no_grad()
def encode_clips(
    encoder: Encoder, clips: UInt8[np.ndarray, "B T H W C"], with_tokens: bool = False
) -> dict[str, np.ndarray]:
    """Return features fp32 [B, D] of clips and, with tokens, tokens fp16 [B, t, h, w, D]."""
    device = next(encoder.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        features = encoder(torch.from_numpy(clips).to(device))
    arrays = {"features": features.pooled.float().cpu().numpy()}
    if with_tokens:
        arrays["tokens"] = features.tokens.half().unflatten(1, encoder.grid).cpu().numpy()
    return arrays
