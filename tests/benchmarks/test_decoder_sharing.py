"""The figures of clips by their place and of two decoders at once are those of clips that are right."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from made_videos import store, write_shards

from benchmarks.data import decoder_sharing
from benchmarks.data.decoder_sharing import Case
from common.errors import InputError
from pipeline.decoding import sharing

GOP = 8


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    videos = [(f"v{i}", store("vp9", 56, first=5 * i, gop=GOP)) for i in range(decoder_sharing.NUM_VIDEOS)]
    return write_shards(tmp_path_factory.mktemp("sharing") / "shards", videos)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LENGTH": 56, "WIDTH": 64, "HEIGHT": 48}.items():
        monkeypatch.setattr(decoder_sharing, name, value)


def test_from_its_groups_a_clip_takes_as_many_frames_anywhere(shards: Path) -> None:
    rows = decoder_sharing.measure_places(shards, threads=1, dali_threads=1, device="cpu", rounds=1)
    decoded = {(row["decoder"], row["read"], row["place"]): row["frames_decoded_per_delivered"] for row in rows}
    assert all(count <= 1.6 for (_, read, _), count in decoded.items() if read == "groups")
    assert decoded["dali", "whole", "last"] == 56 / 16
    assert all(row["kib_read_a_clip"] > 0 < row["ms_a_clip"] for row in rows)


def test_wrong_clips_stop_it() -> None:
    with pytest.raises(InputError, match="clips are those of their videos"):
        decoder_sharing.check(SimpleNamespace(clip=torch.zeros(8, 3, 16, 4, 4)))  # type: ignore[arg-type]


def test_both_at_once_are_put_beside_their_sum(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_sharing, "side_by_side", map)
    monkeypatch.setattr(decoder_sharing, "in_fresh_process", lambda function, case: function(case))
    monkeypatch.setattr(decoder_sharing, "SETTLING_S", 0.05)
    monkeypatch.setattr(sharing, "TIMED_S", 0.1)
    case = Case(shards, "hybrid", 1, 1, "cpu", seconds=0.2, batch_size=8, found=tmp_path / "decoders.jsonl")
    rows = decoder_sharing.measure_sharing(case, rounds=1)
    assert [row["decoder"] for row in rows] == ["pyav", "dali", "both"]
    alone, share = [row["clips_per_second"] for row in rows[:2]], rows[2]["share_of_sum"]
    assert share == pytest.approx(rows[2]["clips_per_second"] / sum(alone))
    assert 0 < rows[2]["share_of_dali"] < 1, "both have a part"
    assert '"speeds"' in case.found.read_text(), "as a run finds them"
