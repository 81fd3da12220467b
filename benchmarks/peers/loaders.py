"""Other libraries as loaders for video pre-training.

SPDL, torchcodec and decord cut the very clips of a plan from files, in threads, each with one
thread of FFmpeg. webdataset reads the shards as their format is meant to be read: it streams whole
tars in processes of PyTorch's DataLoader, and torchcodec cuts the clip of each video in them.

The crop, the antialiased bilinear scaling and the flip are torch's: SPDL's FFmpeg filters took 1.05
times and torchcodec's `transforms` 1.2 times the CPU time of a clip (H.264 shards).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.nn import functional as F

from adamae.common.cpus import count_cpus
from adamae.pipeline.decoding.planes import SUBSAMPLING, find_window
from adamae.pipeline.planning.plan import PlanRow

# A clip as the paper's models take it.
NUM_FRAMES = 16
SIDE = 224
# So many that no thread ever waits for a batch to be taken.
BATCHES_AHEAD = 2
# Digits of a time in seconds.
MICROSECONDS = 6

# Cuts a planned clip out of the video in a file, which is named by its path.
CutClip = Callable[[str, PlanRow], UInt8[Tensor, "T H W C"]]


class SpdlCutter:
    """Cuts with SPDL: packets from the key frame before a clip on go through one filter graph.

    SPDL's function for single frames (`sample_decode_video`) makes a graph for every key frame,
    which took 1.6 times the CPU time on original files.
    """

    def __init__(self) -> None:
        # The times of a file's frames in seconds, read once.
        self._times: dict[str, list[float]] = {}

    def __call__(self, path: str, row: PlanRow) -> UInt8[Tensor, "T H W C"]:
        import spdl.io

        if path not in self._times:
            self._times[path] = spdl.io.demux_video(path).get_timestamps()
        times = self._times[path]
        # A filter passes every frame once at most. FFmpeg numbers frames from the first one it
        # gets, so the window begins at the clip's first.
        numbers = sorted(set(row.frames))
        first = numbers[0]
        window = _find_window(times, first, last=numbers[-1])
        chosen = "+".join(f"eq(n,{number - first})" for number in numbers)
        filters = [f"select='{chosen}'", "format=pix_fmts=rgb24"]
        if window is not None:
            filters.insert(0, f"trim=start={window[0]}")
        frames = spdl.io.decode_packets(
            spdl.io.demux_video(path, timestamp=window),
            ",".join(filters),
            spdl.io.decode_config(decoder_options={"threads": "1"}),
            num_frames=len(numbers),
        )
        clip = spdl.io.to_torch(spdl.io.convert_frames(frames))
        if len(numbers) < len(row.frames):
            # A short video repeats its last frame.
            clip = clip[[numbers.index(number) for number in row.frames]]
        return crop_and_scale(clip, row)


def _find_window(times: Sequence[float], first: int, last: int) -> tuple[float, float] | None:
    """Return the seconds to demux for frames `first` to `last`, halfway to their neighbors.

    Return None for a clip that begins with the video: some files cannot seek to their first frame.
    """
    if first == 0:
        return None
    end = times[last] + 1
    if last + 1 < len(times):
        end = (times[last] + times[last + 1]) / 2
    return (times[first - 1] + times[first]) / 2, end


def cut_with_torchcodec(video: str | bytes, row: PlanRow) -> UInt8[Tensor, "T H W C"]:
    """Cut a clip out of a file, named by its path, or of a video's bytes."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(video, num_ffmpeg_threads=1, dimension_order="NHWC")
    return crop_and_scale(decoder.get_frames_at(list(row.frames)).data, row)


def copy_planes_with_torchcodec(path: str, row: PlanRow) -> UInt8[Tensor, " bytes"]:
    """Decode the frames of a clip, each once, and copy what it shows of their planes.

    A frame's planes, Y, U and V, follow each other. Frames must be upright, of 4:2:0 and 8 bits.
    """
    from torchcodec.decoders import Demuxer

    demuxer = Demuxer(path)
    (stream,) = demuxer.streams
    index = stream.scan()
    times = index.pts_seconds[sorted(set(row.frames))].tolist()
    # Two ways to count seconds may differ in their last bit.
    wanted = {round(seconds, MICROSECONDS) for seconds in times}
    decoder = stream.make_decoder(num_ffmpeg_threads=1)
    demuxer.seek(index.key_frame_seconds_for(times[0]))
    decoder.reset()
    copies: list[Tensor] = []

    def copy(frames: Iterable[Any]) -> None:
        for frame in frames:
            if round(frame.pts_seconds, MICROSECONDS) not in wanted:
                continue
            window = find_window([row.crop], frame.width, frame.height)
            for plane, step in zip(frame.planes, SUBSAMPLING, strict=True):
                left = window.x // step
                top = window.y // step
                right = -(-(window.x + window.width) // step)
                bottom = -(-(window.y + window.height) // step)
                copies.append(plane[top:bottom, left:right].flatten())

    for packet in demuxer:
        copy(decoder.decode(packet))
        if len(copies) == len(wanted) * len(SUBSAMPLING):
            break
    else:
        copy(decoder.drain())
    return torch.cat(copies)


def cut_with_decord(path: str, row: PlanRow) -> UInt8[Tensor, "T H W C"]:
    """Cut a clip out of a file."""
    import decord

    # One thread for each clip here and above: as many clips as cores are cut at the same time.
    frames = decord.VideoReader(path, num_threads=1).get_batch(list(row.frames)).asnumpy()
    return crop_and_scale(torch.from_numpy(frames), row)


def crop_and_scale(frames: UInt8[Tensor, "T H W C"], row: PlanRow) -> UInt8[Tensor, "T h w C"]:
    """Crop, scale and flip whole frames as the plan says."""
    x, y, w, h = row.crop
    # Channels stay last in memory: torch scales these with AVX2.
    images = frames[:, y : y + h, x : x + w].permute(0, 3, 1, 2)
    scaled = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", antialias=True)
    clip = scaled.permute(0, 2, 3, 1)
    return clip.flip(2) if row.flip else clip


TORCHCODEC = "torchcodec"
# Each is named like the module that it needs.
FILE_PEERS: dict[str, CutClip] = {
    "spdl": SpdlCutter(),
    TORCHCODEC: cut_with_torchcodec,
    "decord": cut_with_decord,
}
WEBDATASET = "webdataset"
# What each peer needs to be installed.
PEERS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in FILE_PEERS},
    WEBDATASET: (WEBDATASET, TORCHCODEC),
}


def load_batches(
    cut: Callable[[PlanRow], Tensor], rows: Iterator[PlanRow], batch_size: int
) -> Iterator[Tensor]:
    """Yield batches of the clips of endless `rows`, cut by as many threads as there are cores."""
    pending: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(count_cpus()) as pool:
        for row in rows:
            pending.append(pool.submit(cut, row))
            if len(pending) == (1 + BATCHES_AHEAD) * batch_size:
                yield torch.stack([pending.popleft().result() for _ in range(batch_size)])


class CutSample:
    """Cuts a video's planned clip out of a sample of a tar, in a worker of DataLoader."""

    def __init__(self, rows: Mapping[str, PlanRow]) -> None:
        """Take the rows of the plan by the keys of their videos."""
        self.rows = rows

    def is_planned(self, sample: dict[str, Any]) -> bool:
        """Return whether the plan has a clip of a sample's video."""
        return sample["__key__"] in self.rows

    def __call__(self, sample: dict[str, Any]) -> UInt8[Tensor, "T H W C"]:
        # Beside the video, a sample holds its JSON and what begins with underscores.
        (video,) = (
            value for name, value in sample.items() if name != "json" and not name.startswith("__")
        )
        # A worker starts with as many threads as there are cores, which is also the number of
        # workers.
        torch.set_num_threads(1)
        return cut_with_torchcodec(video, self.rows[sample["__key__"]])


def load_with_webdataset(
    shards: Sequence[Path], rows: Mapping[str, PlanRow], batch_size: int
) -> Iterator[Tensor]:
    """Yield batches of clips [B, T, H, W, C] of shards that are read again and again.

    rows: the clip to cut out of each video, by its key; other videos are left out.
    """
    import webdataset

    cut = CutSample(rows)
    # Resampled shards make an endless stream, of which every worker has its own.
    paths = [str(shard) for shard in shards]
    samples = webdataset.WebDataset(paths, resampled=True, shardshuffle=False)
    clips = samples.select(cut.is_planned).map(cut)
    batches = clips.batched(batch_size, collation_fn=torch.stack, partial=False)
    yield from webdataset.WebLoader(batches, batch_size=None, num_workers=count_cpus())
