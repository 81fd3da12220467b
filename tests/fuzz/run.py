"""Fuzz for long: `python tests/fuzz/run.py --minutes 60`, or `make fuzz MINUTES=60`.

Every case is a target and a seed (tests/fuzz/fuzzer/targets.py). What is found is shrunk to as few edits as show it and
written to --findings, where pytest plays it again ever after; how many cases there were, to --output. Exits with 1 if
anything was found.
"""

import argparse
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import torch
from fuzzer.workers import FINDINGS, Result, Worker, cases, run_all, shrunk, write_finding

from benchmarks.harness import describe_machine, results_folder, write_results
from common.errors import InputError, run_command
from common.progress import progress_bar


def main() -> int:
    options = parse()
    results: list[Result] = []
    kinds: dict[str, Result] = {}
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(options.workers)]
        bar = stack.enter_context(progress_bar(unit="case", desc=f"seed {options.seed}"))
        weights = chosen(workers[0].weights, options.targets)
        began = time.monotonic()
        for result in run_all(workers, cases(weights, options.seed)):
            results.append(result)
            if result.complaints and result.kind not in kinds:
                kinds[result.kind] = result
                bar.write(f"{result.case.target} {result.case.seed}: {result.complaints[0]}", sys.stderr)
            bar.set_postfix(findings=len(kinds), refresh=False)
            bar.update()
            if time.monotonic() - began > 60 * options.minutes:
                break
        seconds = time.monotonic() - began
        kept = [small for found in kinds.values() if (small := shrunk(workers[0], found))]
    for small in kept:
        print(f"{write_finding(options.findings, small)}: {'; '.join(small.complaints)}")
    report(options, results, kinds, seconds)
    print(f"{len(results)} cases in {seconds:.0f} s, {len(kinds)} findings, {len(kept)} of which show again")
    return 1 if kinds else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=1, help="processes that fork, each one core (default 1)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: another one every time")
    parser.add_argument("--targets", nargs="+", metavar="TARGET", help="of tests/fuzz/fuzzer/targets.py (default: all)")
    parser.add_argument("--findings", type=Path, default=FINDINGS)
    parser.add_argument("--output", type=Path, default=results_folder(torch.device("cpu")), help="folder of fuzz.json")
    options = parser.parse_args()
    if options.minutes <= 0 or not 1 <= options.workers <= (os.cpu_count() or 1):
        raise InputError("--minutes must be above 0 and --workers between 1 and the number of cores")
    return options


def chosen(weights: dict[str, int], names: list[str] | None) -> dict[str, int]:
    """How often each target is drawn, of all or of those named."""
    drawn = {name: weight for name, weight in weights.items() if weight}
    if unknown := sorted(set(names or ()) - drawn.keys()):
        raise InputError(f"{', '.join(unknown)} is no target: there are {', '.join(drawn)}")
    return {name: drawn[name] for name in names or drawn}


def report(options: argparse.Namespace, results: list[Result], kinds: dict[str, Result], seconds: float) -> None:
    """Write fuzz.json: one row a target, and one of all."""
    count = Counter(result.case.target for result in results)
    taken: Counter[str] = Counter()
    for result in results:
        taken[result.case.target] += result.seconds  # type: ignore[assignment]
    skipped = Counter(result.case.target for result in results if result.skipped)
    found = Counter(result.case.target for result in kinds.values())
    rows = [
        {
            "target": name,
            "cases": count[name],
            "seconds": round(taken[name], 1),
            "not_made": skipped[name],
            "findings": found[name],
        }
        for name in sorted(count)
    ]
    total = {"target": "all", "cases": len(results), "seconds": round(seconds, 1), "not_made": skipped.total()}
    rows.append({**total, "findings": len(kinds)})
    notes = [
        f"Seed {options.seed}, {options.workers} process(es). A finding is a kind of fault, however many cases met it.",
        *(f"{result.case.target} {result.case.seed}: {result.complaints[0]}" for result in kinds.values()),
    ]
    write_results(
        options.output, "fuzz", rows, describe_machine(torch.device("cpu"), ("av", "safetensors", "numpy")), notes
    )


if __name__ == "__main__":
    run_command(main)
