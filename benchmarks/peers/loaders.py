"""Other libraries as loaders for video pre-training: strong ones, and the common one.

Strong: SPDL, torchcodec and decord cut the very clips of a plan in threads, each with one thread of FFmpeg, into uint8.
The crop, the antialiased bilinear scaling and the flip are torch's: SPDL's FFmpeg filters took 1.05 times and
torchcodec's `transforms` 1.2 times the CPU time of a clip (H.264 shards). Common: a Dataset of files,
transforms with PIL and a torch DataLoader, MultiScaleCrop to 224², ImageNet-normalized float32, as VideoMAE and AdaMAE
do it.
"""

import io
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pipeline.decoding.containers import main_stream, open_video
from pipeline.planning import crops
from pipeline.planning.plan import PlanRow

NUM_FRAMES, SIDE = 16, 224
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
BATCHES_AHEAD = 2  # of the strong loaders: the threads never wait for a batch to be taken

Source = str | bytes  # a file's path or content
CutClip = Callable[[Source, PlanRow], UInt8[Tensor, "T H W C"]]


class SpdlCutter:
    """Cuts with SPDL: packets from the key frame before a clip on go through one filter graph. Its function for single
    frames (`sample_decode_video`) makes a graph for every key frame: 1.6 times the CPU time on original files."""

    def __init__(self) -> None:
        self._times: dict[int, list[float]] = {}  # of a sample's frames, in seconds; read once

    def __call__(self, source: Source, row: PlanRow) -> UInt8[Tensor, "T H W C"]:
        import spdl.io

        if row.sample not in self._times:
            self._times[row.sample] = spdl.io.demux_video(source).get_timestamps()
        times, wanted = self._times[row.sample], sorted(set(row.frames))
        first, last = wanted[0], wanted[-1]
        end = (times[last] + times[last + 1]) / 2 if last + 1 < len(times) else times[last] + 1
        start = (times[first - 1] + times[first]) / 2 if first else None  # some files cannot seek to their first frame
        numbers = "+".join(f"eq(n,{number - first})" for number in wanted)
        filters = [f"trim=start={start}", f"select='{numbers}'", "format=pix_fmts=rgb24"][start is None :]
        packets = spdl.io.demux_video(source, timestamp=None if start is None else (start, end))
        frames = spdl.io.decode_packets(
            packets, ",".join(filters), spdl.io.decode_config(decoder_options={"threads": "1"}), num_frames=len(wanted)
        )
        clip = spdl.io.to_torch(spdl.io.convert_frames(frames))
        if len(wanted) < len(row.frames):
            clip = clip[[wanted.index(number) for number in row.frames]]
        return crop_and_scale(clip, row)


def cut_with_torchcodec(source: Source, row: PlanRow) -> UInt8[Tensor, "T H W C"]:
    from torchcodec.decoders import VideoDecoder

    video = VideoDecoder(source, num_ffmpeg_threads=1, dimension_order="NHWC")
    return crop_and_scale(video.get_frames_at(list(row.frames)).data, row)


def cut_with_decord(source: Source, row: PlanRow) -> UInt8[Tensor, "T H W C"]:
    import decord

    video = decord.VideoReader(io.BytesIO(source) if isinstance(source, bytes) else source, num_threads=1)
    return crop_and_scale(torch.from_numpy(video.get_batch(list(row.frames)).asnumpy()), row)


def crop_and_scale(frames: UInt8[Tensor, "T H W C"], row: PlanRow) -> UInt8[Tensor, "T h w C"]:
    """Channels stay last in memory, for which torch has AVX2 code."""
    x, y, w, h = row.crop
    images = frames[:, y : y + h, x : x + w].permute(0, 3, 1, 2)
    clip = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", antialias=True).permute(0, 2, 3, 1)
    return clip.flip(2) if row.flip else clip


STRONG: dict[str, CutClip] = {"spdl": SpdlCutter(), "torchcodec": cut_with_torchcodec, "decord": cut_with_decord}
# What loads a library's own libraries: importing SPDL and torchcodec does not yet.
IMPORTS = {
    "spdl": "from spdl.io.lib import _libspdl; _libspdl.make_demuxer",
    "torchcodec": "import torchcodec.decoders",
    "decord": "import decord",
}


def plan_batches(
    cut: CutClip, rows: Iterator[PlanRow], open_source: Callable[[int], Source], batch_size: int, threads: int
) -> Iterator[UInt8[Tensor, "B T H W C"]]:
    """Yield batches of the clips of endless `rows`, each cut by one of the threads; open_source: of a sample."""
    pending: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for row in rows:
            pending.append(pool.submit(lambda row: cut(open_source(row.sample), row), row))
            if len(pending) == (1 + BATCHES_AHEAD) * batch_size:
                yield torch.stack([pending.popleft().result() for _ in range(batch_size)])


def choose_frames(available: int, stride: int) -> list[int]:
    start = random.randrange(max(1, available - (NUM_FRAMES - 1) * stride))
    return [min(start + step * stride, available - 1) for step in range(NUM_FRAMES)]


def decode_from_start(source: Source, stride: int) -> Sequence[np.ndarray]:
    """Decode from the first frame on, as the examples of Hugging Face and PyAV do; 16 frames [H, W, 3]."""
    with open_video(source if isinstance(source, bytes) else Path(source)) as video:
        stream = main_stream(video)
        assert stream is not None
        numbers = choose_frames(stream.frames or sum(packet.size > 0 for packet in video.demux(stream)), stride)
        video.seek(0)
        frames = list(islice(video.decode(stream), numbers[-1] + 1))
        return [frames[min(number, len(frames) - 1)].to_ndarray(format="rgb24") for number in numbers]


def transform(frames: Sequence[np.ndarray]) -> Tensor:
    """float32 [16, 3, 224, 224]"""
    height, width = frames[0].shape[:2]
    x, y, w, h = crops.multiscale_crop(width, height, [random.random(), random.random()])
    box, flip = (x, y, x + w, y + h), random.random() < 0.5
    images = [Image.fromarray(frame).crop(box).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for frame in frames]
    if flip:
        images = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in images]
    clip = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255) for image in images])
    return clip.sub_(MEAN[:, None, None]).div_(STD[:, None, None])


@dataclass
class Files(IterableDataset[Tensor]):
    """Yield clips of random files without end."""

    paths: list[str]
    stride: int

    def __iter__(self) -> Iterator[Tensor]:
        random.seed(getattr(get_worker_info(), "id", 0))
        for _ in count():
            yield transform(decode_from_start(random.choice(self.paths), self.stride))


def file_batches(paths: list[Path], stride: int, batch_size: int, workers: int) -> Iterator[Tensor]:
    dataset = Files([str(path) for path in paths], stride)
    return iter(DataLoader(dataset, batch_size, num_workers=workers, multiprocessing_context="fork"))


def tar_batches(tars: list[Path], stride: int, batch_size: int, workers: int) -> Iterator[Tensor]:
    """Read the shards with webdataset, and decode with PyAV."""
    import webdataset

    def clip(sample: dict[str, Any]) -> Tensor:
        video = next(value for name, value in sample.items() if not name.startswith("__") and name != "json")
        return transform(decode_from_start(video, stride))

    names = [str(tar) for tar in tars]
    dataset = webdataset.WebDataset(names, resampled=True, shardshuffle=False, empty_check=False)
    return iter(
        DataLoader(dataset.shuffle(100).map(clip), batch_size, num_workers=workers, multiprocessing_context="fork")
    )
