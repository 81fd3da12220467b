"""Clips that a device makes of decoded planes are those that FFmpeg makes.

On a CPU, the kernel's reference makes them.
"""

import io
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from multiprocessing import Pipe

import av
import pytest
import torch
from loading import CPU, RowsPlan, check_frames, plan_of
from made_videos import encode, write_shards

from adamae.pipeline.clip_memory import BlockLayout, ClipMemory
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.chunks import Chunk, ChunkResult, WorkerSetup
from adamae.pipeline.decoding.decode_worker import DecodeWorker
from adamae.pipeline.decoding.encoded import GpuCodecs
from adamae.pipeline.decoding.planes import find_window, is_worth_uploading
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.crops import Crop, FrameSize
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.upload import upload

SIZE = FrameSize(32, 32)
CLIP_BYTES = 4 * 32 * 32 * 3

USUAL = {
    "h264": encode(16, pattern=True),
    "10 bits": encode(16, pattern=True, pix_fmt="yuv420p10le"),
    "full range": encode(16, pattern=True, codec="mjpeg"),
    "odd sides": encode(
        16, pattern=True, width=63, height=47, codec="libvpx-vp9", container="webm"
    ),
}
CROPS = [Crop(8, 4, 40, 40), Crop(6, 2, 40, 40), Crop(0, 0, 62, 46), Crop(20, 8, 16, 22)]


def change_size_midway() -> bytes:
    """Make a video whose frames change their size: in MJPEG every packet says its own."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as output:
        stream = output.add_stream("mjpeg", rate=8)
        stream.width = 64
        stream.height = 48
        stream.pix_fmt = "yuvj420p"
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
    "of another size from the ninth frame on": change_size_midway(),
}


KINDS = {**USUAL, **UNUSUAL, "cut off": USUAL["h264"][:900]}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    """Make shards of a video of each kind; two of them are not what the tables say."""
    described = KINDS.copy()
    for kind in ("of another size than the table says", "cut off"):
        described[kind] = USUAL["h264"]
    folder = tmp_path_factory.mktemp("data") / "kinds"
    return ShardDataset.open(write_shards(folder, list(described.items()), broken=KINDS))


def make_rows(kind: str, *crops: Crop, flip: bool = False) -> list[PlanRow]:
    """Plan a clip for each crop, all of the same frames of one video."""
    frames = (0, 0, 0, 0) if kind == "rotated" else (3, 9, 9, 12)
    return [PlanRow(0, list(KINDS).index(kind), frames, crop, flip) for crop in crops]


def start_worker(
    videos: ShardDataset,
    rows: list[PlanRow],
    crops: int = 1,
    upload_planes: bool = True,
    slot_bytes: int = 0,
) -> tuple[DecodeWorker, ClipMemory]:
    """Start a worker in this process that decodes `crops` rows at a time."""
    layout = BlockLayout(len(rows), (4, *SIZE, 3), slot_bytes or 4 * CLIP_BYTES)
    plan = RowsPlan(rows, SIZE, crops, len(rows))
    memory = ClipMemory(layout)
    setup = WorkerSetup(videos, plan, DataConfig(), GpuCodecs(), layout, upload_planes)
    return DecodeWorker(setup, memory, Pipe()[0]), memory


def make_clips(
    videos: ShardDataset,
    rows: list[PlanRow],
    crops: int = 1,
    chunks: Sequence[int] = (),
    **settings: int,
) -> tuple[torch.Tensor, int]:
    """Return the clips of one batch, and how many of them the worker has scaled.

    `chunks` are the numbers of clips of its chunks; `crops` and `settings` are those of
    start_worker.
    """
    worker, memory = start_worker(videos, rows, crops, **settings)  # type: ignore[arg-type]
    number, block = memory.acquire()
    results = []
    num_images = 0
    for first, end in pairwise([0, *accumulate(chunks or [len(rows)])]):
        result = worker.make_chunk(Chunk(0, first, end - first, number))
        assert isinstance(result, ChunkResult)
        results.append(result)
        num_images += sum(clip.image_start is not None for clip in result.clips)
    return upload(block, memory.layout, results, CPU), num_images


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("flip", [False, True])
def test_the_device_makes_what_ffmpeg_makes(videos: ShardDataset, kind: str, flip: bool) -> None:
    """Clips of one window, which share its frames; off the border, beyond which FFmpeg looks."""
    rows = make_rows(kind, *CROPS, flip=flip)
    clips, num_images = make_clips(videos, rows, crops=4)
    expected, _ = make_clips(videos, rows, crops=4, upload_planes=False)
    assert num_images == 0
    difference = (clips.int() - expected.int()).abs()[:, :, 2:-2, 2:-2]
    assert difference.float().mean() < 0.3
    assert difference.max() <= 1


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_the_kernel_does_not_define_is_left_to_ffmpeg(videos: ShardDataset, kind: str) -> None:
    clips, num_images = make_clips(videos, make_rows(kind, CROPS[0]))
    assert num_images == 1
    expected, _ = make_clips(videos, make_rows(kind, CROPS[0]), upload_planes=False)
    assert torch.equal(clips, expected)


def test_frames_much_larger_than_their_clips_are_scaled_before_the_upload() -> None:
    size = FrameSize(224, 224)
    assert is_worth_uploading(Crop(0, 0, 600, 600), 8, 8, size)
    assert not is_worth_uploading(Crop(0, 0, 1080, 1080), 8, 8, size)
    assert is_worth_uploading(Crop(0, 0, 1080, 1080), 8, 32, size), "clips that share it"
    assert not is_worth_uploading(Crop(0, 0, 1080, 1080), 32, 32, size), "clips that do not"


@pytest.mark.parametrize(
    ("crops", "window"),
    [
        ([Crop(5, 3, 20, 20)], Crop(4, 2, 22, 22)),
        ([Crop(0, 0, 63, 47)], Crop(0, 0, 63, 47)),
        ([Crop(8, 9, 2, 2), Crop(31, 2, 8, 1)], Crop(8, 2, 32, 10)),
    ],
)
def test_a_window_holds_all_crops_and_whole_chroma_samples(crops: list[Crop], window: Crop) -> None:
    assert find_window(crops, 63, 47) == window


def test_chunks_and_kinds_are_joined_in_order(videos: ShardDataset) -> None:
    rows = []
    expected = []
    for kind in ("4:4:4", "h264", "h264", "4:4:4"):
        rows_of_video = make_rows(kind, *CROPS[:2])
        rows += rows_of_video
        expected.append(make_clips(videos, rows_of_video, crops=2)[0])
    for chunks in ([2, 2, 2, 2], [4, 4], [8], [6, 2]):
        clips, num_images = make_clips(videos, rows, crops=2, chunks=chunks)
        assert num_images == 4
        assert torch.equal(clips, torch.cat(expected))


def test_planes_that_would_leave_later_clips_no_room_are_scaled_by_the_worker(
    videos: ShardDataset,
) -> None:
    small = make_rows("h264", CROPS[3])
    large = make_rows("h264", CROPS[2])
    for rows, expected in ((large + large, 2), (large + small, 1), (small + large, 0)):
        clips, num_images = make_clips(videos, rows, slot_bytes=CLIP_BYTES)
        assert num_images == expected
        apart = torch.cat([make_clips(videos, [row])[0] for row in rows])
        assert (clips.int() - apart.int()).abs()[:, :, 2:-2, 2:-2].max() <= 1


def test_a_video_that_fails_leaves_nothing_behind(
    videos: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = make_rows("h264", CROPS[0])
    bad = make_rows("cut off", CROPS[0])
    monkeypatch.setattr(RowsPlan, "replacement", lambda *_: good[0])
    expected = start_worker(videos, good)[0].make_chunk(Chunk(0, 0, 1, 0))
    result = start_worker(videos, bad)[0].make_chunk(Chunk(0, 0, 1, 0))
    assert isinstance(expected, ChunkResult)
    assert isinstance(result, ChunkResult)
    assert len(expected.faults) == 0
    assert len(result.faults) == 1
    assert result.clips == expected.clips
    assert result.used_bytes == expected.used_bytes


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    """Make videos for the device and for FFmpeg; frame k of video i shows number i + k."""
    formats = ["yuv420p", "yuv444p", "yuv420p10le", "yuv422p"]
    videos = [(f"v{i:02d}", encode(20, first=i, pix_fmt=formats[i % 4])) for i in range(8)]
    return ShardDataset.open(write_shards(tmp_path_factory.mktemp("data") / "mixed", videos))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("views_apart_s", [0, 0.5])
def test_a_batch_joins_both_kinds(mixed: ShardDataset, device: str, views_apart_s: float) -> None:
    config = DataConfig(frame_stride=1, repeats=2, decoder="pyav", views_apart_s=views_apart_s)
    plan = plan_of(mixed, config)
    with ClipLoader(mixed, plan, CPU, config, None, upload_planes=False) as loader:
        by_ffmpeg = list(islice(loader.batches(0), 4))
    with ClipLoader(mixed, plan, torch.device(device), config, None, upload_planes=True) as loader:
        by_device = list(islice(loader.batches(0), 4))
    check_frames(by_device, plan, mixed)
    for batch, expected in zip(by_device, by_ffmpeg, strict=True):
        assert (batch.clip.cpu().int() - expected.clip.int()).abs().max() <= 1


@pytest.mark.gpu
def test_an_upload_does_not_wait_for_the_step(videos: ShardDataset) -> None:
    worker, memory = start_worker(videos, make_rows("h264", CROPS[0]))
    number, block = memory.acquire(pin=True)
    result = worker.make_chunk(Chunk(0, 0, 1, number))
    assert isinstance(result, ChunkResult)
    copying = torch.cuda.Stream()
    expected = upload(block.copy(), memory.layout, [result], CPU)
    torch.cuda.synchronize()
    # About a second.
    torch.cuda._sleep(2_000_000_000)
    step = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(copying):
        clips = upload(block, memory.layout, [result], torch.device("cuda"))
    copying.synchronize()
    assert not step.query(), "the step is still running"
    assert (clips.cpu().int() - expected.int()).abs().max() <= 1
