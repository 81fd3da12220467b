"""Compare the lines of Python of every package with its budget in CONTRIBUTING.md; run by `make lint`."""

import re
import subprocess
import sys
from pathlib import Path

files = subprocess.run(["git", "ls-files", "*.py"], check=True, capture_output=True, text=True).stdout.split()
lines = {file: Path(file).read_bytes().count(b"\n") for file in files if Path(file).exists()}
problems = []
for row, budget in re.findall(r"^\| (`.*?`) \|.*\| ([\d,]+) \|$", Path("CONTRIBUTING.md").read_text(), re.M):
    of_row = [file for file in lines if file.startswith(tuple(re.findall(r"`(.*?)`", row)))]
    used = sum(lines.pop(file) for file in of_row)
    if used > int(budget.replace(",", "")):
        problems.append(f"{row}: {used:,} lines of Python, of a budget of {budget}")
problems += [f"{file} is in no row of the table in CONTRIBUTING.md" for file in lines]
sys.exit("\n".join(problems) or None)
