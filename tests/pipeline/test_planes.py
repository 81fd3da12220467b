"""Clips that a device makes of decoded planes, here by the kernel's reference, are those that FFmpeg makes."""

import io
from itertools import islice

import av
import numpy as np
import pytest
import torch
from loading import Video, check_frames, make_batch, make_chunk, make_setup, plan_of
from made_videos import encode, write_shards

from pipeline.clip_memory import ClipMemory
from pipeline.config import DataConfig
from pipeline.decoding.decode_worker import Chunk, ChunkWriter
from pipeline.decoding.planes import find_window, is_worth_uploading
from pipeline.loader import ClipLoader
from pipeline.planning.crops import Crop, FrameSize
from pipeline.planning.plan import PlanRow
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice
from pipeline.upload import upload
from pipeline.video_error import VideoError

WIDTH, HEIGHT, SIZE = 64, 48, FrameSize(32, 32)
NUMBERS = (3, 9, 9, 12)


def make_rows(*crops: Crop, flip: bool = False, frames: tuple[int, ...] = NUMBERS) -> list[PlanRow]:
    return [PlanRow(position, 0, frames, crop, flip) for position, crop in enumerate(crops)]


def make_sample(width: int = WIDTH, height: int = HEIGHT) -> Sample:
    return Sample("v", "mp4", "h264", 16, 8.0, 1, width, height, None, "", "")


def make_video(data: bytes, *crops: Crop, frames: tuple[int, ...] = NUMBERS, flip: bool = False) -> Video:
    """A video of the usual size whose clips show `crops`."""
    return VideoSlice(data, frames, 16), make_sample(), make_rows(*crops, flip=flip, frames=frames)


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
    video = VideoSlice(USUAL[kind], NUMBERS, 16), sample, make_rows(*CROPS, flip=flip)
    (clips, num_images), (expected, _) = (make_batch([video], SIZE, upload_planes) for upload_planes in (True, False))
    assert num_images == 0
    off = (clips.int() - expected.int()).abs()[:, :, 2:-2, 2:-2]
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
    "rotated": encode(1, rotation=90),
    "of another size than the table says": encode(16, width=80),
    "of another size from the ninth frame on": change_size_on_the_way(),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_the_kernel_does_not_define_is_left_to_ffmpeg(kind: str) -> None:
    video = make_video(UNUSUAL[kind], CROPS[0], frames=(0,) if kind == "rotated" else NUMBERS)
    clips, num_images = make_batch([video], SIZE, upload_planes=True)
    assert num_images == 1
    assert torch.equal(clips, make_batch([video], SIZE, upload_planes=False)[0])


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


def test_chunks_and_kinds_are_joined_in_order() -> None:
    usual, unusual = (make_video(data, *CROPS[:2]) for data in (USUAL["h264"], UNUSUAL["4:4:4"]))
    videos = [unusual, usual, usual, unusual]
    apart = torch.cat([make_batch([video], SIZE, True)[0] for video in videos])
    for chunks in ([1, 1, 1, 1], [2, 2], [4], [3, 1]):
        clips, num_images = make_batch(videos, SIZE, True, chunks)
        assert num_images == 4
        assert torch.equal(clips, apart)


def test_planes_that_would_leave_later_clips_no_room_are_scaled_by_the_worker() -> None:
    small, large = (make_video(USUAL["h264"], crop) for crop in (CROPS[3], CROPS[2]))
    for videos, expected in (([large, large], 2), ([large, small], 1), ([small, large], 0)):
        clips, num_images = make_batch(videos, SIZE, True, slot_bytes=4 * 32 * 32 * 3)
        assert num_images == expected
        apart = torch.cat([make_batch([video], SIZE, True)[0] for video in videos])
        assert (clips.int() - apart.int()).abs()[:, :, 2:-2, 2:-2].max() <= 1


def test_a_video_that_fails_leaves_nothing_behind() -> None:
    good, bad = (make_video(data, CROPS[0]) for data in (USUAL["h264"], USUAL["h264"][:900]))
    setup = make_setup([good], SIZE, upload_planes=True)
    block = np.zeros(setup.layout.block_bytes, np.uint8)
    writer = ChunkWriter(setup, block, Chunk(0, 0, 1, 0))
    with pytest.raises(VideoError):
        writer.add_video(0, bad[2], bad[0])
    writer.add_video(0, good[2], good[0])
    expected = make_chunk(setup, block, 0, 1, [good])
    assert (writer.result.clips, writer.result.used_bytes) == (expected.clips, expected.used_bytes)


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
        place = torch.device(device if scales_on_device else "cpu")
        with ClipLoader(mixed, plan, place, config, None, upload_planes=scales_on_device) as loader:
            batches[scales_on_device] = list(islice(loader.batches(0), 4))
    check_frames(batches[True], plan, mixed)
    for made, expected in zip(batches[True], batches[False], strict=True):
        assert (made.clip.cpu().int() - expected.clip.int()).abs().max() <= 1


@pytest.mark.gpu
def test_an_upload_does_not_wait_for_the_step() -> None:
    videos = [make_video(USUAL["h264"], CROPS[0])]
    setup = make_setup(videos, SIZE, upload_planes=True)
    _, block = ClipMemory(setup.layout).acquire(pin=True)
    result, copying = make_chunk(setup, block, 0, 1, videos), torch.cuda.Stream()
    expected = upload(block.copy(), setup.layout, [result], torch.device("cpu"))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    step = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(copying):
        clips = upload(block, setup.layout, [result], torch.device("cuda"))
    copying.synchronize()
    assert not step.query(), "the step is still running"
    assert (clips.cpu().int() - expected.int()).abs().max() <= 1
