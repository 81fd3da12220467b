import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import memory_vs_ratio
from benchmarks.accounting import RESERVE_GPU
from benchmarks.memory_vs_ratio import (
    NVDEC_BYTES,
    is_default,
    largest_batch,
    list_points,
    loaded_per_clip,
    main,
    parse_arguments,
    read_paper_memory,
)
from common.errors import InputError
from model.config import ModelConfig

TINY = ModelConfig("tiny", num_frames=4, image_size=64, mask_ratio=0.75, encoder_depth=1, decoder_depth=1)


def test_points_cover_the_papers_ratios() -> None:
    points = list_points("tiny")
    assert {config.mask_ratio for config in points} >= set(read_paper_memory())
    assert read_paper_memory()[0.95] == 14.4
    assert sum(is_default(config) for config in points) == 1
    assert len({str(config) for config in points}) == len(points) == 12


def test_the_table_accounts_for_every_byte(tmp_path: Path, monkeypatch, capsys) -> None:
    points = [TINY, replace(TINY, activation_checkpointing=True)]
    monkeypatch.setattr(memory_vs_ratio, "list_points", lambda size: points)
    monkeypatch.setattr(memory_vs_ratio, "is_default", lambda config: config == TINY)
    monkeypatch.chdir(tmp_path)
    main(parse_arguments(["--batch-size", "2"]))
    (table,) = tmp_path.rglob("memory_vs_ratio.json")  # in the user's folder
    assert table.with_suffix(".png").is_file()
    said = capsys.readouterr().out
    assert "predicted for a GPU" in said
    assert [line for line in said.splitlines() if line.startswith("| mask")] == [
        "| mask_ratio | activation_checkpointing | predicted_peak_gib |"
    ], "no empty columns"
    plain, checkpointed = json.loads(table.read_text())["rows"]
    at_peak = [size for name, size in plain.items() if name.startswith("at_peak_")]
    assert sum(at_peak) / 1024 == pytest.approx(plain["predicted_peak_gib"], abs=2e-3)
    assert plain["recomputed_gflop_per_clip"] == 0 <= checkpointed["recomputed_gflop_per_clip"]
    assert checkpointed["gflop_per_clip"] == plain["gflop_per_clip"], "what is recomputed is no work"


def test_the_plot_shows_what_there_is() -> None:
    common = {"mask_ratio": 0.9, "batch_size": 16, "activation_checkpointing": False, "predicted_peak_gib": 4.0}
    (axes,) = memory_vs_ratio.plot_memory([common, common | {"mask_ratio": 0.8, "paper_gb": 2**30 / 1e9}]).axes
    assert [line.get_label().partition(" (")[0] for line in axes.lines] == ["the paper's code on its GPUs", "predicted"]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[0.8, 1.0]], [[0.8, 4.0], [0.9, 4.0]]]
    assert "GiB" in axes.get_ylabel()


def test_the_largest_batch_fits_with_what_dali_holds() -> None:
    ample: Any = SimpleNamespace(peak_bytes=164e6, fixed_bytes=100e6)  # a megabyte per clip
    loaded = loaded_per_clip(TINY)
    assert loaded == 4 * 3 * (352 * 256 + 3 * 64 * 64)  # frames as they are stored, and three clips
    capacity = RESERVE_GPU + NVDEC_BYTES + 100e6 + 10.5 * (1e6 + loaded)
    assert largest_batch(TINY, ample, capacity) == 10


def test_a_runs_step_is_predicted_by_part(capsys) -> None:
    config = ["--config", str(memory_vs_ratio.ROOT / "configs/demo.yaml"), "batch_size=2", "device=cpu"]
    torch.manual_seed(0)
    main(parse_arguments([*config, "model.encoder_depth=1", "model.decoder_depth=1"]))
    said = capsys.readouterr().out
    assert said.startswith("2 clips  ")
    assert [line.partition("  ")[0] for line in said.splitlines()][1:3] == ["weights", "optimizer"]
    assert "predicted for this CPU" in said
    with pytest.raises(InputError, match="only the memory of pre-training is predicted"):
        main(parse_arguments([*config, "task=finetune"]))
    with pytest.raises(InputError, match="name it with --config"):
        parse_arguments(["model.size=tiny"])
