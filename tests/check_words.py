"""Look in code and pages for words that a native speaker would not use there; run by `make lint`.

Spelling is codespell's, whose settings are in pyproject.toml.
"""

import re
import subprocess
import sys
from pathlib import Path

# What is looked for, as a regular expression, and what to say instead.
INSTEAD = {
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
    problems = []
    for file in list_files():
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for pattern, replacement in INSTEAD.items():
                # Letters around it make another word; an underscore does not.
                match = re.search(f"(?<![A-Za-z])({pattern})(?![A-Za-z])", line)
                if match:
                    problems.append(f"{file}:{number}: {match[0]!r}: say {replacement}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def list_files() -> list[Path]:
    """List the tracked code and pages outside tests/, without those that the work tree has deleted."""
    command = ["git", "ls-files", "*.py", "*.md", ":!tests"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    paths = [Path(name) for name in listed.stdout.splitlines()]
    return [path for path in paths if path.exists()]


if __name__ == "__main__":
    sys.exit(main())
