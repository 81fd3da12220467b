import json
from pathlib import Path

import pytest

from common.errors import InputError
from training.compare import main


def make_run(folder: Path, target: str, **metrics: float) -> str:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"model: {{target: {target}}}\n")
    row = {"step": 9, **{f"evaluation/{name}": value for name, value in metrics.items()}}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return str(folder)


def test_the_best_run_comes_first_and_one_without_evaluation_last(tmp_path: Path, capsys) -> None:
    runs = [make_run(tmp_path / "new", "pixels"), make_run(tmp_path / "worse", "pixels", reconstruction_loss=0.8)]
    runs.append(make_run(tmp_path / "better", "pixels", reconstruction_loss=0.7))
    main(runs)
    shown = capsys.readouterr()
    assert [Path(line.split()[0]).name for line in shown.out.splitlines()[1:]] == ["better", "worse", "new"]
    assert not shown.err
    main([*runs, make_run(tmp_path / "other", "features", reconstruction_loss=0.1)])
    assert "their losses cannot be compared" in capsys.readouterr().err


def test_runs_without_any_evaluation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no evaluation results in .*new: train with evaluation\.shards=SHARDS"):
        main([make_run(tmp_path / "new", "pixels")])
