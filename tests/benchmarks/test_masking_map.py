"""The map of where adaptive masking pays, with studies that are made up."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import masking_map, masking_quality
from benchmarks.harness import Row
from common.errors import InputError


class MadeUp:
    """A study of two strategies: adaptive leads by more, the smaller objects are."""

    def __init__(self, options: argparse.Namespace, folder: Path, device: object) -> None:
        self.about: dict[str, str] = {"drawn": " ".join(options.drawn)}
        self.earlier: list[Row] = []
        drawn = dict(option.removeprefix("--").split("=") for option in options.drawn)
        assert drawn["fps"] == "15"
        hardness = 0.99 + (0.09 if drawn["object-size"] == "0.3" else 0.009 * float(drawn["distractors"]))
        self.rows: list[Row] = []
        for strategy, lead in (("random", 0.0), ("adaptive", 0.1 * (1 - float(drawn["object-size"])))):
            for seed in options.seeds:
                row: Row = {"strategy": strategy, "mask_ratio": 0.9, "seed": seed, "label_set": 0}
                row |= {"error_moving": hardness, "error_still": 0.9, "finetune_top1": 0.5 + lead + 0.01 * seed}
                self.rows.append(row | ({"moving_share_of_visible": 0.25, "moving_share_of_all": 0.2} if lead else {}))

    def run_all(self) -> list[Row]:
        return self.rows


COMMAND = ["--object-sizes", "0.3", "0.6", "--distractors", "0", "3", "--drawn", "fps=15"]


def test_every_place_has_a_study_of_its_own_and_a_line_a_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masking_quality, "Study", MadeUp)
    study = ["--strategies", "random", "adaptive", "--ratios", "0.9", "--seeds", "0", "1"]
    masking_map.main([*COMMAND, *study, "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "masking_map.json").read_text())["rows"]
    found = {(row["object_size"], row["distractors"]): row for row in rows if row["strategy"] == "adaptive"}
    assert [*found] == [(0.3, 0), (0.3, 3), (0.6, 0), (0.6, 3)]
    assert len(rows) == 8
    assert {row["seeds"] for row in rows} == {2}
    small = found[0.3, 3]
    assert (small["finetune_top1_lead"], small["error_ratio"], small["moving_share_of_visible"]) == (0.07, 1.2, 0.25)
    assert (tmp_path / "size0.3-distractors3" / "points.csv").is_file()
    assert (tmp_path / "masking_map.png").stat().st_size > 1000
    figure = masking_map.draw(rows, "random")
    texts = [text.get_text() for text in figure.axes[1].texts]
    ((dots, _, _),) = figure.axes[2].containers  # by the error ratio of the baseline at the same place
    assert dots.get_xydata().round(2).tolist() == [[1.2, 0.07], [1.2, 0.07], [1.1, 0.04], [1.13, 0.04]]
    assert texts == ["+0.070 ± 0.000\n0.250 of 0.200"] * 2 + ["+0.040 ± 0.000\n0.250 of 0.200"] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--object-sizes", "0"], "--object-sizes are shares"),
        (["--object-sizes", "1.5"], "--object-sizes are shares"),
        (["--distractors", "-1"], "--object-sizes are shares"),
        (["--shards", "x", "--validation", "y"], "--drawn is for videos that are drawn"),
        (["--seeds", "0", "--parallel", "0"], "--parallel is 0"),
    ],
)
def test_what_cannot_be_is_said_at_once(arguments: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        masking_map.main([*arguments, "--output", str(tmp_path)])
