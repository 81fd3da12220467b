"""Progress bars."""

from common.progress import progress_bar


def test_a_log_file_gets_few_lines(capsys):
    assert list(progress_bar(range(100_000), unit="step")) == list(range(100_000))
    written = capsys.readouterr().err
    assert written.count("\r") <= 3
    assert "100000/100000" in written
    assert "step/s" in written
