"""Compare the tokens of every package with its budget in CONTRIBUTING.md; run by `make lint`.

Tokens are those of Python's tokenizer. Comments, line breaks and indentation are not counted, and a
docstring is a single token, so nothing is gained by packing lines or by leaving out an explanation.
"""

import re
import subprocess
import sys
import tokenize
from pathlib import Path

FREE = {
    tokenize.ENCODING,
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
ROW = re.compile(r"^\| (?P<package>`.*?`) \|.*\| (?P<budget>[\d,]+) \|$", re.M)


def list_files() -> list[str]:
    """List the tracked Python files; those that a link in adamae/ shows again are counted once."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], check=True, capture_output=True, text=True
    )
    paths = [Path(name) for name in tracked.stdout.split()]
    return [str(path) for path in paths if path.exists() and not path.is_symlink()]


def count_tokens(file: str) -> int:
    """Count the tokens of a file; an f-string is one, as in Python 3.11; later ones split it."""
    num_tokens = 0
    num_open_fstrings = 0
    with open(file, "rb") as source:
        for token in tokenize.tokenize(source.readline):
            kind = tokenize.tok_name[token.type]
            if num_open_fstrings == 0 and token.type not in FREE:
                num_tokens += 1
            if kind == "FSTRING_START":
                num_open_fstrings += 1
            elif kind == "FSTRING_END":
                num_open_fstrings -= 1
    return num_tokens


def main() -> str:
    problems = []
    uncounted = set(list_files())
    contributing = Path("CONTRIBUTING.md").read_text(encoding="utf-8")
    for row in ROW.finditer(contributing):
        prefixes = tuple(re.findall(r"`(.*?)`", row["package"]))
        files = {file for file in uncounted if file.startswith(prefixes)}
        uncounted -= files
        num_tokens = sum(map(count_tokens, files))
        if num_tokens > int(row["budget"].replace(",", "")):
            problems.append(
                f"{row['package']}: {num_tokens:,} tokens, of a budget of {row['budget']}"
            )
    problems += [
        f"{file} is in no row of the table in CONTRIBUTING.md" for file in sorted(uncounted)
    ]
    return "\n".join(problems)


if __name__ == "__main__":
    sys.exit(main() or None)
