from pathlib import Path

from adamae.common.csv_files import write_csv


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    """Numbers stay numbers, and names with commas and quotes stay one cell."""
    file = tmp_path / "table.csv"
    texts = ["=1+1", "+a", "-a", "@a", "\ta", "a=b", 'a,"b"']
    write_csv(file, ["name", "score"], [(text, -0.5) for text in texts])
    cells = ["'=1+1", "'+a", "'-a", "'@a", "'\ta", "a=b", '"a,""b"""']
    assert file.read_text().splitlines() == ["name,score", *(f"{cell},-0.5" for cell in cells)]
