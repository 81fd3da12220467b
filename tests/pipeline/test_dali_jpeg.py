"""The GPU decoder of MJPEG: the clips of PyAV, and failures that cost single clips.

All of it runs on the CPU, where DALI decodes JPEGs too.
"""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from loading import CPU, RowsPlan, check_frames, open_loader
from made_videos import store, write_shards

from adamae.pipeline.config import DataConfig, Decoder
from adamae.pipeline.loader import Batch, ClipLoader
from adamae.pipeline.planning.crops import Crop, FrameSize
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.mp4 import read_fragments


def load(dataset: ShardDataset, plan: RowsPlan, decoder: Decoder) -> torch.Tensor:
    """Load the only batch of a plan; PyAV's clips are made of planes, as on a GPU."""
    config = DataConfig(decoder=decoder, repeats=plan.crops_per_decode, num_workers=1)
    with ClipLoader(dataset, plan, CPU, config, None, upload_planes=True) as loader:
        (batch,) = loader.batches(0)
        assert loader.counters["dali_clips"] == (len(plan.rows) if decoder == "dali" else 0)
    return batch.clip


# The kernel's interpreter takes seconds to import.
@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(96, 80), (95, 79)])
def test_clips_are_those_of_pyavs_planes(tmp_path: Path, width: int, height: int) -> None:
    """Two crops of one decode, mirrored ones and repeated frames, at even and odd sizes."""
    videos = []
    for index in range(2):
        pattern = index == 0
        video = store("mjpeg", 20, width=width, height=height, pattern=pattern)
        videos.append((f"v{index}", video))
    dataset = ShardDataset.open(write_shards(tmp_path / "data", videos))
    crops = [Crop(0, 0, width, height), Crop(32, 10, 51, 57), Crop(2, 4, 60, 70)]
    rows = []
    for sample, frames in ((0, (0, 3, 6, 9)), (1, (2, 2, 19, 19)), (0, (5, 4, 4, 7))):
        for crop in crops[:2]:
            rows.append(PlanRow(len(rows), sample, frames, crop, flip=len(rows) % 2 == 1))
    rows.append(PlanRow(6, 1, (1, 2, 3, 4), crops[2], flip=True))
    rows.append(PlanRow(7, 1, (1, 2, 3, 4), crops[0], flip=False))
    plan = RowsPlan(rows, FrameSize(32, 40), 2, len(rows))
    pyav = load(dataset, plan, "pyav").float()
    dali = load(dataset, plan, "dali").float()
    difference = (pyav - dali).abs().mean(dim=(1, 2, 3, 4))
    assert difference.max() < 0.4


def test_all_of_several_batches_in_flight_are_right(jpeg: ShardDataset) -> None:
    config = DataConfig(frame_stride=1, decoder="dali", num_workers=2, prefetch=4)
    with open_loader(jpeg, config, batch_size=6) as (plan, loader):
        batches: list[Batch] = list(islice(loader.batches(0), 9))
        # Checked at the end: DALI must not reuse the memory of clips that are in use.
        check_frames(batches, plan, jpeg)
        assert loader.counters["dali_clips"] == loader.counters["clips"]
        assert loader.counters["frames_decoded"] == loader.counters["frames_delivered"]


def damage_header(picture: bytes) -> bytes:
    """Change the number of bits that the header says."""
    return picture.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\xff")


def damage_codes(picture: bytes) -> bytes:
    """Overwrite tables of Huffman codes: the header can be read, and no decoder takes the rest."""
    return picture[:100] + b"\xff" * 80 + picture[180:]


@pytest.mark.parametrize(
    ("damage", "fails_in_dali"), [(damage_header, False), (damage_codes, True)]
)
def test_a_damaged_picture_costs_its_clip_alone(
    tmp_path: Path, damage: Callable[[bytes], bytes], fails_in_dali: bool
) -> None:
    """It was damaged before it was stored, so that its checksum is right.

    Of 24 pictures a batch, DALI parses the headers in several threads.
    """
    videos = [(f"v{i:02d}", store("mjpeg", 20, first=i)) for i in range(6)]
    broken = bytearray(videos[3][1])
    for fragment in read_fragments(videos[3][1]):
        assert fragment.packets is not None
        (packet,) = fragment.packets
        broken[packet] = damage(videos[3][1][packet])
    folder = write_shards(tmp_path / "broken", videos, broken={"v03": bytes(broken)})
    dataset = ShardDataset.open(folder)
    config = DataConfig(frame_stride=1, decoder="dali", max_bad_fraction=0.9, num_workers=2)
    report = tmp_path / "quarantine.jsonl"
    with open_loader(dataset, config, report, batch_size=3) as (plan, loader):
        batches = list(islice(loader.batches(0), 8))
        num_replaced = check_frames(batches, plan, dataset, bad=["v03"])
        counters = loader.counters
    assert 0 < num_replaced <= counters["bad_clips"]
    assert (counters["fallback_clips"] > 0) == fails_in_dali
    assert 0 < counters["dali_clips"] <= counters["clips"]
    (line,) = report.read_text().splitlines()
    assert json.loads(line)["key"] == "v03"
