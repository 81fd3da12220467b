"""What killed writers have left is removed, and what others still write is not."""

import os
import subprocess
import sys
import time
from pathlib import Path

from adamae.common.atomic_io import atomic_write, make_output_folder, remove_partials

KILLED = """
import os, sys
from pathlib import Path
from adamae.common.atomic_io import atomic_write
with atomic_write(Path(sys.argv[1])) as aside:
    aside.write_text("half")
    os.kill(os.getpid(), 9)
"""


def test_partials_of_killed_processes_go(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    (tmp_path / "below").mkdir()
    for name in ("a.png", "below/b-1.json"):
        command = [sys.executable, "-c", KILLED, str(tmp_path / name)]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, check=False)
    (tmp_path / "c.txt").write_text("whole")
    foreign = [tmp_path / f".{name}.elsewhere-1.partial" for name in ("old", "new")]
    for path in foreign:
        path.mkdir()
    two_days_ago = time.time() - 2 * 86400
    os.utime(foreign[0], (two_days_ago, two_days_ago))
    assert len(list(tmp_path.rglob(".*.partial"))) == 4
    with atomic_write(tmp_path / "mine") as aside:
        aside.write_text("being written")
        make_output_folder(tmp_path)
        (below,) = (tmp_path / "below").iterdir()
        assert below.name.startswith(".b-1.json.")
        remove_partials(tmp_path)
    names = {path.name for path in tmp_path.rglob("*")}
    assert names == {"below", "c.txt", "mine", foreign[1].name}
