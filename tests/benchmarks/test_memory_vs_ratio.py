"""The table of memory by mask ratio, and the memory of a run's step."""

import json
from pathlib import Path

import pytest

from adamae.benchmarks import memory_vs_ratio
from adamae.benchmarks.harness import ROOT
from adamae.benchmarks.memory_vs_ratio import main, read_paper_memory
from adamae.common.errors import InputError
from adamae.model.config import ModelConfig
from adamae.training.accounting import AT_PEAK, NVDEC_BYTES, RESERVE_GPU, largest_batch

TINY = ModelConfig("tiny", num_frames=4, image_size=64, encoder_depth=1, decoder_depth=1)


def test_the_table_accounts_for_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(memory_vs_ratio.RATIOS) >= set(read_paper_memory())
    assert read_paper_memory()[0.95] == 14.4
    monkeypatch.setattr(memory_vs_ratio, "RATIOS", (0.95,))
    monkeypatch.setattr(memory_vs_ratio, "ModelConfig", lambda size: TINY)
    main(["--batch-size", "2", "--output", str(tmp_path)])
    plain, checkpointed = json.loads((tmp_path / "memory_vs_ratio.json").read_text())["rows"]
    at_peak = [mib for name, mib in plain.items() if name.startswith("at_peak_")]
    assert sum(at_peak) / 1024 == pytest.approx(plain["predicted_peak_gib"], abs=2e-3)
    assert plain["predicted_peak_gib"] <= plain["ddp_predicted_peak_gib"]
    assert checkpointed["recomputed_gflop_per_clip"] >= 0
    assert checkpointed["gflop_per_clip"] == plain["gflop_per_clip"], (
        "what is recomputed is no work"
    )


def test_the_largest_batch_fits_with_what_dali_holds() -> None:
    at_peak = dict.fromkeys(AT_PEAK, 0)
    at_peak["weights"] = 10**8
    # The account is of 64 clips (AMPLE_BATCH), so this is a megabyte per clip.
    at_peak["encoder"] = 64 * 10**6
    # Frames as they are stored, and three copies of a clip.
    loaded = 4 * 3 * (352 * 256 + 3 * 64 * 64)
    fixed = RESERVE_GPU + NVDEC_BYTES + 1e8
    assert largest_batch(TINY, at_peak, fixed + 10.5 * (1e6 + loaded)) == 10


def test_a_runs_step_is_predicted_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", str(ROOT / "configs/demo.yaml"), "batch_size=2", "device=cpu"]
    main([*config, "model.encoder_depth=1", "model.decoder_depth=1"])
    printed = capsys.readouterr().out
    labels = [line.partition("  ")[0] for line in printed.splitlines()]
    assert labels[:3] == ["2 clips", "weights", "optimizer"]
    assert "predicted for this CPU" in printed
    with pytest.raises(InputError, match="only the memory of pre-training is predicted"):
        main([*config, "task=finetune"])
    with pytest.raises(InputError, match="name it with --config"):
        main(["model.size=tiny"])
