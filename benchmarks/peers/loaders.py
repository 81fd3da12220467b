"""Common loaders for video pre-training, written afresh: a Dataset of files, transforms with PIL, a torch
DataLoader. Clips are 16 frames, MultiScaleCrop to 224², ImageNet-normalized float32, as VideoMAE and AdaMAE do it."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pipeline.decoding.containers import main_stream, open_video
from pipeline.planning import crops

NUM_FRAMES, SIDE = 16, 224
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

Decode = Callable[[Any, int], Sequence[np.ndarray]]  # a file's path or bytes, stride -> 16 frames [H, W, 3]


def choose_frames(available: int, stride: int) -> list[int]:
    start = random.randrange(max(1, available - (NUM_FRAMES - 1) * stride))
    return [min(start + step * stride, available - 1) for step in range(NUM_FRAMES)]


def with_decord(path: str, stride: int) -> Sequence[np.ndarray]:
    import decord

    video = decord.VideoReader(path, num_threads=1, ctx=decord.cpu(0))
    return list(video.get_batch(choose_frames(len(video), stride)).asnumpy())


def with_torchcodec(path: str, stride: int) -> Sequence[np.ndarray]:
    from torchcodec.decoders import VideoDecoder

    video = VideoDecoder(path, num_ffmpeg_threads=1, dimension_order="NHWC")
    return list(video.get_frames_at(choose_frames(len(video), stride)).data.numpy())


def with_pyav(source: str | bytes, stride: int) -> Sequence[np.ndarray]:
    """Decode from the first frame on, as the examples of Hugging Face and PyAV do."""
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
    decode: Decode

    def __iter__(self) -> Iterator[Tensor]:
        random.seed(getattr(get_worker_info(), "id", 0))
        for _ in count():
            yield transform(self.decode(random.choice(self.paths), self.stride))


def file_batches(decode: Decode, paths: list[Path], stride: int, batch_size: int, workers: int) -> Iterator[Tensor]:
    dataset = Files([str(path) for path in paths], stride, decode)
    return iter(DataLoader(dataset, batch_size, num_workers=workers, multiprocessing_context="fork"))


def tar_batches(tars: list[Path], stride: int, batch_size: int, workers: int) -> Iterator[Tensor]:
    """Read the shards with webdataset, and decode with PyAV."""
    import webdataset

    def clip(sample: dict[str, Any]) -> Tensor:
        video = next(value for name, value in sample.items() if not name.startswith("__") and name != "json")
        return transform(with_pyav(video, stride))

    names = [str(tar) for tar in tars]
    dataset = webdataset.WebDataset(names, resampled=True, shardshuffle=False, empty_check=False)
    return iter(
        DataLoader(dataset.shuffle(100).map(clip), batch_size, num_workers=workers, multiprocessing_context="fork")
    )


DECODERS: dict[str, Decode] = {"decord": with_decord, "torchcodec": with_torchcodec, "pyav": with_pyav}
