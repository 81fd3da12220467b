"""Look in code and pages for words that a native speaker would not use there; run by `make lint`.

Spelling is codespell's, whose settings are in pyproject.toml.
"""

import re
import subprocess
import sys
from pathlib import Path

# The words as regular expressions, and what to say instead.
REPLACEMENTS = {
    "anew": "again",
    "ours|theirs": "the noun",
    "one's own|of one's": "your own",
    "(somebody|other people|others)'s?": "third-party",
    "(told|tells?) apart": "distinguish",
    "[Jj]udg[a-z]*": "evaluate, score",
    "(clips|steps|videos) a (second|decode|step)": "clips/s, clips per step",
    "go(es|ing)? on": "resume, continue",
    "for good": "permanently",
    "comes? round": "repeat",
    "hidden tokens|tokens? hidden|shown tokens": "masked, visible tokens",
}


def main() -> int:
    """Print the problems of all files; return the exit code."""
    problems = []
    for file in list_files():
        problems += find_problems(file)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def find_problems(file: Path) -> list[str]:
    """Return a line for each word of a file that should be another."""
    problems = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        for pattern, replacement in REPLACEMENTS.items():
            # Letters around it make another word. An underscore does not: names are checked, too.
            match = re.search(f"(?<![A-Za-z])({pattern})(?![A-Za-z])", line)
            if match:
                problems.append(f"{file}:{number}: {match[0]!r}: say {replacement}")
    return problems


def list_files() -> list[Path]:
    """List the tracked code and pages outside tests/; files that were just deleted are left out."""
    command = ["git", "ls-files", "*.py", "*.md", ":!tests"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    paths = [Path(name) for name in listed.stdout.splitlines()]
    return [path for path in paths if path.exists()]


if __name__ == "__main__":
    sys.exit(main())
