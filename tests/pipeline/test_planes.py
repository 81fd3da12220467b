"""Clips that a device makes of decoded planes, here by the kernel's reference, are those that FFmpeg makes."""

import io
from itertools import islice

import av
import pytest
import torch
from loading import check_frames, plan_of
from made_videos import encode, write_shards
from test_video import rotated

from pipeline.config import DataConfig
from pipeline.decoding import upload
from pipeline.decoding.planes import find_window, is_worth_uploading
from pipeline.decoding.sources import find_source
from pipeline.decoding.upload import HostClips
from pipeline.decoding.video_source import VideoSource
from pipeline.loader import ClipLoader
from pipeline.planning.crops import Crop, FrameSize
from pipeline.planning.plan import PlanRow
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice

WIDTH, HEIGHT, SIZE = 64, 48, FrameSize(32, 32)
NUMBERS = (3, 9, 9, 12)


def make_rows(*crops: Crop, flip: bool = False) -> list[PlanRow]:
    return [PlanRow(place, 0, NUMBERS, crop, flip) for place, crop in enumerate(crops)]


def make_sample(width: int = WIDTH, height: int = HEIGHT) -> Sample:
    return Sample("v", "mp4", "h264", 16, 8.0, 1, width, height, None, "", "")


def make_on_device(data: bytes, rows: list[PlanRow], sample: Sample) -> torch.Tensor:
    host = HostClips((len(rows), len(NUMBERS), *SIZE, 3), None, takes_frames=True)
    video = VideoSlice(data, NUMBERS, sample.num_frames)
    frames = find_source(data).copy_planes(video, sample, rows, SIZE, host.allocate)
    assert frames is not None
    host.add_frames(0, rows, frames)
    return host.on_device()


def make_on_cpu(data: bytes, rows: list[PlanRow], sample: Sample) -> torch.Tensor:
    clips = torch.empty(len(rows), len(NUMBERS), *SIZE, 3, dtype=torch.uint8)
    VideoSource().cut_views(VideoSlice(data, NUMBERS, sample.num_frames), sample, rows, clips.numpy())
    return clips


USUAL = {
    "h264": encode(16, pattern=True),
    "10 bits": encode(16, pattern=True, pix_fmt="yuv420p10le"),
    "full range": encode(16, pattern=True, codec="mjpeg"),
    "odd sides": encode(16, pattern=True, width=63, height=47, codec="libvpx-vp9", container="webm"),
}
CROPS = [Crop(8, 4, 40, 40), Crop(6, 2, 40, 40), Crop(0, 0, 62, 46), Crop(20, 8, 16, 22)]


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("flip", [False, True])
def test_the_device_makes_what_ffmpeg_makes(kind: str, flip: bool) -> None:
    """Clips of one window, which share its frames; off the border, beyond which FFmpeg looks."""
    sample = make_sample(63, 47) if kind == "odd sides" else make_sample()
    rows = make_rows(*CROPS, flip=flip)
    clips = make_on_device(USUAL[kind], rows, sample)
    off = (clips.int() - make_on_cpu(USUAL[kind], rows, sample).int()).abs()[:, :, 2:-2, 2:-2]
    assert off.float().mean() < 0.3
    assert off.max() <= 1


def change_size_on_the_way() -> bytes:
    """In MJPEG every packet says its size."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as output:
        stream = output.add_stream("mjpeg", rate=8)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuvj420p"
        for source in (USUAL["full range"], encode(16, width=32, codec="mjpeg", container="avi")):
            with av.open(io.BytesIO(source), "r") as container:
                for packet in islice(container.demux(video=0), 8):
                    packet.pts = packet.dts = None
                    packet.stream = stream
                    output.mux(packet)
    return file.getvalue()


UNUSUAL = {
    "4:4:4": encode(16, pix_fmt="yuv444p"),
    "4:2:2 of 10 bits": encode(16, pix_fmt="yuv422p10le"),
    "rotated": rotated(90),
    "of another size than the table says": encode(16, width=80),
    "of another size from the ninth frame on": change_size_on_the_way(),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_the_kernel_does_not_define_is_left_to_ffmpeg(kind: str) -> None:
    video = VideoSlice(UNUSUAL[kind], (0,) if kind == "rotated" else NUMBERS, 1 if kind == "rotated" else 16)
    host = HostClips((1, 4, *SIZE, 3), None, takes_frames=True)
    assert VideoSource().copy_planes(video, make_sample(), make_rows(CROPS[0]), SIZE, host.allocate) is None


def test_frames_much_larger_than_their_clips_are_scaled_before_the_upload() -> None:
    size = FrameSize(224, 224)
    assert is_worth_uploading(Crop(0, 0, 600, 600), 1, size)
    assert not is_worth_uploading(Crop(0, 0, 1080, 1080), 1, size)
    assert is_worth_uploading(Crop(0, 0, 1080, 1080), 4, size), "clips that share it"


@pytest.mark.parametrize(("crops", "window"), [
    ([Crop(5, 3, 20, 20)], Crop(4, 2, 22, 22)), ([Crop(0, 0, 63, 47)], Crop(0, 0, 63, 47)),
    ([Crop(8, 9, 2, 2), Crop(31, 2, 8, 1)], Crop(8, 2, 32, 10)),
])  # fmt: skip
def test_a_window_holds_all_crops_and_whole_chroma_samples(crops: list[Crop], window: Crop) -> None:
    assert find_window(crops, 63, 47) == window


def test_any_number_of_chunks_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames larger than a chunk have one of their own."""
    rows = make_rows(*CROPS[:2])
    expected = make_on_device(USUAL["h264"], rows, make_sample())
    for size in (16, 1000, 20_000):
        monkeypatch.setattr(upload, "CHUNK_BYTES", size)
        host = HostClips((4, len(NUMBERS), *SIZE, 3), None, takes_frames=True)
        for first in (2, 0):
            frames = VideoSource().copy_planes(
                VideoSlice(USUAL["h264"], NUMBERS, 16), make_sample(), rows, SIZE, host.allocate
            )
            assert frames is not None
            host.add_frames(first, rows, frames)
        assert torch.equal(host.on_device(), torch.cat([expected, expected]))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    """Videos for the device and for FFmpeg; frame k of video i shows number i + k."""
    formats = ["yuv420p", "yuv444p", "yuv420p10le", "yuv422p"]
    videos = [(f"v{i:02d}", encode(20, first=i, pix_fmt=formats[i % 4])) for i in range(8)]
    return ShardDataset.open(write_shards(tmp_path_factory.mktemp("data") / "mixed", videos))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_batch_joins_both_kinds(mixed: ShardDataset, device: str) -> None:
    config = DataConfig(frame_stride=1, repeats=2, decoder="pyav")
    plan = plan_of(mixed, config)
    batches = {}
    for scales_on_device in (False, True):
        with ClipLoader(mixed, plan, torch.device(device if scales_on_device else "cpu"), config, None) as loader:
            loader._host.takes_frames = scales_on_device
            batches[scales_on_device] = list(islice(loader.batches(0), 4))
    check_frames(batches[True], plan, mixed)
    for made, expected in zip(batches[True], batches[False], strict=True):
        assert (made.clip.cpu().int() - expected.clip.int()).abs().max() <= 1
