"""Progress bars."""

from common.progress import progress_bar


def test_a_log_file_gets_a_line_now_and_then(capsys):
    assert list(progress_bar(range(100_000), unit="step")) == list(range(100_000))
    written = capsys.readouterr().err
    assert written.count("\r") <= 3
    assert "100000/100000" in written
    assert "step/s" in written


def test_without_values_it_is_moved_by_hand(capsys):
    with progress_bar(unit="video", total=3, initial=1) as bar:
        bar.update(2)
    assert "3/3" in capsys.readouterr().err
