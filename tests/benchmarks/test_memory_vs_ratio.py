from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import memory_vs_ratio
from benchmarks.accounting import Account, predict
from benchmarks.harness import Row, Timing
from benchmarks.memory_vs_ratio import Point, is_default, points, predicted_row
from benchmarks.reports.memory_plot import draw
from common.errors import InputError
from model.config import ModelConfig

TINY = ModelConfig(size="tiny", num_frames=4, image_size=64, mask_ratio=0.75)


@pytest.fixture(autouse=True, scope="module")
def ample_is_little() -> Iterator[None]:
    """In the interpreter, CPU attention is predicted clip by clip."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_vs_ratio, "AMPLE_BATCH", 16)
        yield


@pytest.fixture(scope="module")
def predicted() -> tuple[Row, Account]:
    return predicted_row(Point("ratio", TINY, 14.4), batch_size=4), predict(TINY, 4)


def test_every_figure_of_the_paper_stands_beside_one_of_ours() -> None:
    table = points("base", every=True)
    beside = {point.paper_gb for point in table if point.paper_gb}
    assert beside == {16.2, 14.7, 12.8, 14.1, 14.4, 15.1, 15.9, 16.9, 9.2, 11.0, 21.3, 11.8, 14.0, 17.1}  # SPEC §8
    assert all(point.paper_gb is None for point in points("small", every=True))
    assert len({str(point.config) for point in table}) == len(table)
    assert {point.config.masking for point in table} == {"adaptive", "random", "tube", "frame"}
    again = [point.config for point in table if point.config.activation_checkpointing]
    assert {config.mask_ratio for config in again} == set(memory_vs_ratio.RATIOS)
    assert {config.dimensions.decoder_depth for config in again} == {1, 2, 4, 8}
    assert [point.config for point in table if is_default(point)] == [
        replace(ModelConfig(), activation_checkpointing=x) for x in (False, True)
    ]


def test_the_usual_call_leaves_out_what_takes_long() -> None:
    usual, every = points("base", every=False), points("base", every=True)
    assert {point.paper_gb for point in usual} == {point.paper_gb for point in every}
    assert [point.config.mask_ratio for point in usual[: len(memory_vs_ratio.RATIOS)]] == list(memory_vs_ratio.RATIOS)
    assert [point.config.activation_checkpointing for point in usual if is_default(point)] == [False, True]
    assert sum(point.measured_on_cpu for point in usual) == 1
    assert {str(point.config) for point in usual} < {str(point.config) for point in every}


def test_a_row_accounts_for_every_byte(predicted: tuple[Row, Account]) -> None:
    row, account = predicted
    parts = [size for name, size in row.items() if name.startswith("at_peak_")]
    assert sum(parts) / 1024 == pytest.approx(row["predicted_peak_gib"], abs=2e-3)
    assert row["saved_mib"] == pytest.approx(sum(account.saved.values()) / 2**20, abs=0.1)
    assert row["num_visible"] == 8
    fitting = [row[f"largest_batch_{size}gb"] for size in memory_vs_ratio.CAPACITIES_GB]
    assert fitting == sorted(fitting)
    assert fitting[0] > 4


def test_what_is_computed_again_is_no_work_of_the_step(predicted: tuple[Row, Account]) -> None:
    row, account = predicted
    checkpointing = replace(TINY, activation_checkpointing=True)
    again, more = predicted_row(Point("ratio", checkpointing, None), batch_size=4), predict(checkpointing, 4)
    assert row["recomputed_gflop_per_clip"] == 0
    assert again["gflop_per_clip"] == row["gflop_per_clip"]
    assert again["recomputed_gflop_per_clip"] == pytest.approx((more.flops - account.flops) / 4e9, abs=0.1)
    assert more.flops > account.flops
    assert again["saved_mib"] < row["saved_mib"]


def test_a_step_of_two_clips_of_250_gflop_in_a_second_is_half_a_teraflop_a_second() -> None:
    row = {"gflop_per_clip": 250, "repeated_gflop_per_clip": 50}
    columns = memory_vs_ratio.speed_columns(Timing.of([1000.0]), batch_size=2, row=row, matmul=2.0)
    assert (columns["tflops"], columns["mfu"], columns["mfu_once"], columns["clips_per_second"]) == (0.5, 0.25, 0.2, 2)


def test_the_picture_is_drawn(predicted: tuple[Row, Account], tmp_path: Path) -> None:
    row, _ = predicted
    rows = [{**row, "mask_ratio": ratio} for ratio in (0.75, 0.95)]
    rows += [{**row, "masking": "tube"}, {**row, "axis": "decoder depth", "decoder_depth": 8, "paper_gb": None}]
    rows += [{**row, "mask_ratio": 0.95, "activation_checkpointing": True}]
    draw(rows, tmp_path / "plot.png", 4)
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 10


def test_a_prediction_that_is_off_stops_the_report(
    predicted: tuple[Row, Account], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_four_clips = predicted[1].saved
    monkeypatch.setattr(memory_vs_ratio, "in_fresh_process", lambda *_: (of_four_clips, None, 0.0))
    with pytest.raises(InputError, match=r"nothing is reported.*the bytes that an actual step saves"):
        memory_vs_ratio.cpu_columns(Point("ratio", TINY, None), predicted[0], repetitions=1, matmul=1.0)
