"""One video's work, where the program itself is at fault."""

from pathlib import Path

import pytest

from shard_tools.settings import Settings
from shard_tools.work import Job, Outcome, load_outcome, process_job


def test_a_fault_of_the_program_costs_its_video_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def store_video(*arguments: object) -> None:
        raise TypeError("open() got an unexpected keyword argument")

    monkeypatch.setattr("shard_tools.work.store_video", store_video)
    video = tmp_path / "one.mp4"
    video.write_bytes(b"bytes")
    outcome = process_job(Job("one.mp4", str(video), None, tmp_path / "staged", Settings()))
    assert isinstance(outcome, Outcome)
    assert outcome.samples == []
    told = "a fault of make_shards, which you may want to report (TypeError: open() got an unexpected keyword argument)"
    assert outcome.reason == told
    assert load_outcome(tmp_path / "staged") == outcome
