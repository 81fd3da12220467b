"""Other libraries as loaders for video pre-training.

SPDL, torchcodec and decord cut the very clips of a plan in threads, each with one thread of FFmpeg, into uint8.
The crop, the antialiased bilinear scaling and the flip are torch's: SPDL's FFmpeg filters took 1.05 times and
torchcodec's `transforms` 1.2 times the CPU time of a clip (H.264 shards).
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.nn import functional as F

from adamae.common.cpus import count_cpus
from adamae.pipeline.planning.plan import PlanRow

NUM_FRAMES, SIDE = 16, 224
BATCHES_AHEAD = 2  # the threads never wait for a batch to be taken

CutClip = Callable[[str, PlanRow], UInt8[Tensor, "T H W C"]]  # of the video in a file


class SpdlCutter:
    """Cuts with SPDL: packets from the key frame before a clip on go through one filter graph. Its function for single
    frames (`sample_decode_video`) makes a graph for every key frame: 1.6 times the CPU time on original files."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}  # of a file's frames, in seconds; read once

    def __call__(self, path: str, row: PlanRow) -> UInt8[Tensor, "T H W C"]:
        import spdl.io

        if path not in self._times:
            self._times[path] = spdl.io.demux_video(path).get_timestamps()
        times, wanted = self._times[path], sorted(set(row.frames))
        first, last = wanted[0], wanted[-1]
        end = (times[last] + times[last + 1]) / 2 if last + 1 < len(times) else times[last] + 1
        start = (
            (times[first - 1] + times[first]) / 2 if first else None
        )  # some files cannot seek to their first frame
        numbers = "+".join(f"eq(n,{number - first})" for number in wanted)
        filters = [f"trim=start={start}", f"select='{numbers}'", "format=pix_fmts=rgb24"][
            start is None :
        ]
        packets = spdl.io.demux_video(path, timestamp=None if start is None else (start, end))
        frames = spdl.io.decode_packets(
            packets,
            ",".join(filters),
            spdl.io.decode_config(decoder_options={"threads": "1"}),
            num_frames=len(wanted),
        )
        clip = spdl.io.to_torch(spdl.io.convert_frames(frames))
        if len(wanted) < len(row.frames):
            clip = clip[[wanted.index(number) for number in row.frames]]
        return crop_and_scale(clip, row)


def cut_with_torchcodec(path: str, row: PlanRow) -> UInt8[Tensor, "T H W C"]:
    from torchcodec.decoders import VideoDecoder

    video = VideoDecoder(path, num_ffmpeg_threads=1, dimension_order="NHWC")
    return crop_and_scale(video.get_frames_at(list(row.frames)).data, row)


def cut_with_decord(path: str, row: PlanRow) -> UInt8[Tensor, "T H W C"]:
    import decord

    frames = decord.VideoReader(path, num_threads=1).get_batch(list(row.frames)).asnumpy()
    return crop_and_scale(torch.from_numpy(frames), row)


def crop_and_scale(frames: UInt8[Tensor, "T H W C"], row: PlanRow) -> UInt8[Tensor, "T h w C"]:
    """Channels stay last in memory, for which torch has AVX2 code."""
    x, y, w, h = row.crop
    images = frames[:, y : y + h, x : x + w].permute(0, 3, 1, 2)
    clip = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", antialias=True).permute(
        0, 2, 3, 1
    )
    return clip.flip(2) if row.flip else clip


PEERS: dict[str, CutClip] = {
    "spdl": SpdlCutter(),
    "torchcodec": cut_with_torchcodec,
    "decord": cut_with_decord,
}


def load_batches(
    cut: Callable[[PlanRow], Tensor], rows: Iterator[PlanRow], batch_size: int
) -> Iterator[Tensor]:
    """Yield batches of the clips of endless `rows`, each cut by one of as many threads as there are cores."""
    pending: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(count_cpus()) as pool:
        for row in rows:
            pending.append(pool.submit(cut, row))
            if len(pending) == (1 + BATCHES_AHEAD) * batch_size:
                yield torch.stack([pending.popleft().result() for _ in range(batch_size)])
