import json
from pathlib import Path

from benchmarks.reports.study_progress import RunningStage, StudyProgress, last_step


def test_the_step_of_a_run_that_is_writing(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_step(file) == 0
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in (10, 20)) + '{"step": 3')
    assert last_step(file) == 20


def test_stage_step_and_rows_are_said(tmp_path: Path, capsys) -> None:
    file = tmp_path / "metrics.jsonl"
    with StudyProgress(300) as progress:
        progress.done(100)
        with progress.stage(RunningStage("tube-0.9-seed0", "pretrain", file, 50)):
            file.write_text('{"step": 30}\n')
            progress.look()
            assert progress._bar.n == 130
            assert progress._bar.postfix == "tube-0.9-seed0 pretrain 30/50"
        progress.look()
        assert (progress._bar.n, progress._bar.postfix) == (150, "")
        progress.row("tube-0.9-seed0", {"seed": 0, "finetune_top1": 0.87654})
    assert "tube-0.9-seed0: finetune_top1 0.8765" in capsys.readouterr().err
