"""Look in code and pages for words that do not say what is meant, and British spelling; run by `make lint`."""

import re
import subprocess
import sys
from pathlib import Path

INSTEAD = {
    "ours|theirs": "the noun",
    "Python('s)? lock": "GIL",
    "anew": "again",
    "of such": "the noun",
    "(told|tells?) apart": "distinguish",
    "(somebody|other people|others)'s?": "third-party",
    "[Jj]udg(e[sd]?|ing|e?ment)": "evaluate, score, SplitScore",
    "(clips|steps|videos) a (second|decode|step)": "clips/s, clips per step",
    "go(es|ing)? on": "resume, continue",
    "for good": "permanently",
    "comes? round": "repeat",
    "ma[kd]es? room": "evict",
    "no lead|leads? of": "no gain",
    "hidden tokens|tokens? hidden|shown tokens": "masked, visible tokens",
    "hiding the hard|dos(es|age)": "hard masking, dose-response",
    "learnt|labelled|modelling|travell(ed|ing)": "learned, labeled, ...",
    "(colour|grey|behaviour|favour|neighbour|centre)[a-z]*": "color, gray, ...",
    "[a-z]+(al|or|im|it|ar)is(e|es|ed|ing)": "normalize, ...",
    "roll_call|patience(_s)?|settle_s|apart_s": "PEER_TIMEOUT_S, LEASE_TIMEOUT_S, ...",
    "may_vote|voters|bank": "allowed_neighbors, neighbors, reference set",
    "(_?is_)?lent": "is_shared, in_flight",
    "carry_out|takes_frames|_made_of": "decode_chunk, upload_planes, _init_args",
    "HostClips|DecodeJob": "Chunk, ChunkResult",
    "label_of_all|is_late|ShardOf|COPIED": "constant_label, timed_out, ShardLookup, ROW_FIELDS",
    "RoleChooser|Choices|_say_the_same": "ColumnDetector, ListOptions, are_equivalent",
    "start_max|at_once|is_deferred": "begin_max, allow_interrupt, defer",
    "one's own|of one's": "your own",
}
LETTERS = r"(?<![A-Za-z]){}(?![A-Za-z])"  # also between underscores


def main() -> str:
    found = []
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", ":!tests"], check=True, capture_output=True, text=True
    )
    for file in filter(Path.exists, map(Path, listed.stdout.split())):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for pattern, instead in INSTEAD.items():
                if word := re.search(LETTERS.format(f"({pattern})"), line):
                    found.append(f"{file}:{number}: {word[0]!r}: say {instead}")
    return "\n".join(found)


if __name__ == "__main__":
    sys.exit(main() or None)
