"""Clips that a device makes of decoded planes, here by the kernel's reference, are those that FFmpeg makes."""

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
from adamae.pipeline.decoding.chunks import Chunk, WorkerSetup
from adamae.pipeline.decoding.decode_worker import DecodeWorker
from adamae.pipeline.decoding.joining import GpuCodecs
from adamae.pipeline.decoding.planes import find_window, is_worth_uploading
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.crops import Crop, FrameSize
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.upload import upload

SIZE, CLIP_BYTES = FrameSize(32, 32), 4 * 32 * 32 * 3

USUAL = {
    "h264": encode(16, pattern=True),
    "10 bits": encode(16, pattern=True, pix_fmt="yuv420p10le"),
    "full range": encode(16, pattern=True, codec="mjpeg"),
    "odd sides": encode(
        16, pattern=True, width=63, height=47, codec="libvpx-vp9", container="webm"
    ),
}
CROPS = [Crop(8, 4, 40, 40), Crop(6, 2, 40, 40), Crop(0, 0, 62, 46), Crop(20, 8, 16, 22)]


def change_size_on_the_way() -> bytes:
    """In MJPEG every packet says its size."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as output:
        stream = output.add_stream("mjpeg", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
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


KINDS = {**USUAL, **UNUSUAL, "cut off": USUAL["h264"][:900]}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    described = [
        (
            kind,
            USUAL["h264"] if kind in ("of another size than the table says", "cut off") else data,
        )
        for kind, data in KINDS.items()
    ]
    return ShardDataset.open(
        write_shards(tmp_path_factory.mktemp("data") / "kinds", described, broken=KINDS)
    )


def make_rows(kind: str, *crops: Crop, flip: bool = False) -> list[PlanRow]:
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
    plan, memory = RowsPlan(rows, SIZE, crops, len(rows)), ClipMemory(layout)
    setup = WorkerSetup(videos, plan, DataConfig(), GpuCodecs(), layout, upload_planes)
    return DecodeWorker(setup, memory, Pipe()[0]), memory


def make_clips(
    videos: ShardDataset, rows: list[PlanRow], *how: int, chunks: Sequence[int] = ()
) -> tuple[torch.Tensor, int]:
    """Return the clips of one batch, as many to a chunk as `chunks` says, and how many of them workers have scaled."""
    worker, memory = start_worker(videos, rows, *how)
    number, block = memory.acquire()
    firsts = pairwise([0, *accumulate(chunks or [len(rows)])])
    results = [worker.make_chunk(Chunk(0, first, end - first, number)) for first, end in firsts]
    num_images = sum(clip.image_start is not None for result in results for clip in result.clips)
    return upload(block, memory.layout, results, CPU), num_images


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("flip", [False, True])
def test_the_device_makes_what_ffmpeg_makes(videos: ShardDataset, kind: str, flip: bool) -> None:
    """Clips of one window, which share its frames; off the border, beyond which FFmpeg looks."""
    rows = make_rows(kind, *CROPS, flip=flip)
    (clips, num_images), (expected, _) = (
        make_clips(videos, rows, 4, upload_planes) for upload_planes in (True, False)
    )
    assert num_images == 0
    off = (clips.int() - expected.int()).abs()[:, :, 2:-2, 2:-2]
    assert off.float().mean() < 0.3
    assert off.max() <= 1


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_the_kernel_does_not_define_is_left_to_ffmpeg(videos: ShardDataset, kind: str) -> None:
    clips, num_images = make_clips(videos, make_rows(kind, CROPS[0]))
    assert num_images == 1
    assert torch.equal(clips, make_clips(videos, make_rows(kind, CROPS[0]), 1, False)[0])


def test_frames_much_larger_than_their_clips_are_scaled_before_the_upload() -> None:
    size = FrameSize(224, 224)
    assert is_worth_uploading(Crop(0, 0, 600, 600), 1, size)
    assert not is_worth_uploading(Crop(0, 0, 1080, 1080), 1, size)
    assert is_worth_uploading(Crop(0, 0, 1080, 1080), 4, size), "clips that share it"


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
    order = [make_rows(kind, *CROPS[:2]) for kind in ("4:4:4", "h264", "h264", "4:4:4")]
    apart = torch.cat([make_clips(videos, rows, 2)[0] for rows in order])
    for chunks in ([2, 2, 2, 2], [4, 4], [8], [6, 2]):
        clips, num_images = make_clips(
            videos, [row for rows in order for row in rows], 2, chunks=chunks
        )
        assert num_images == 4
        assert torch.equal(clips, apart)


def test_planes_that_would_leave_later_clips_no_room_are_scaled_by_the_worker(
    videos: ShardDataset,
) -> None:
    small, large = (make_rows("h264", crop) for crop in (CROPS[3], CROPS[2]))
    for rows, expected in ((large + large, 2), (large + small, 1), (small + large, 0)):
        clips, num_images = make_clips(videos, rows, 1, True, CLIP_BYTES)
        assert num_images == expected
        apart = torch.cat([make_clips(videos, [row])[0] for row in rows])
        assert (clips.int() - apart.int()).abs()[:, :, 2:-2, 2:-2].max() <= 1


def test_a_video_that_fails_leaves_nothing_behind(
    videos: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (make_rows(kind, CROPS[0]) for kind in ("h264", "cut off"))
    monkeypatch.setattr(RowsPlan, "replacement", lambda *_: good[0])
    expected, found = (
        start_worker(videos, rows)[0].make_chunk(Chunk(0, 0, 1, 0)) for rows in (good, bad)
    )
    assert (len(expected.faults), len(found.faults)) == (0, 1)
    assert (found.clips, found.used_bytes) == (expected.clips, expected.used_bytes)


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
def test_an_upload_does_not_wait_for_the_step(videos: ShardDataset) -> None:
    worker, memory = start_worker(videos, make_rows("h264", CROPS[0]))
    number, block = memory.acquire(pin=True)
    result, copying = worker.make_chunk(Chunk(0, 0, 1, number)), torch.cuda.Stream()
    expected = upload(block.copy(), memory.layout, [result], torch.device("cpu"))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    step = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(copying):
        clips = upload(block, memory.layout, [result], torch.device("cuda"))
    copying.synchronize()
    assert not step.query(), "the step is still running"
    assert (clips.cpu().int() - expected.int()).abs().max() <= 1
