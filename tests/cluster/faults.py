"""Inject faults into a run on two nodes: killed, signaled, frozen, cut off or starved of data, it ends with the weights
of an undisturbed run, bit by bit.

    python tests/cluster/faults.py --count 50 --seed 0       # random faults; --count 0: each kind once

Each fault comes at a random step; what is left of the run is waited for, and the same command resumes it. Results go to
benchmarks/results/cpu/faults/: for each fault what happened, the seconds until everything had ended by itself, the
seconds until the run was again at the step where it was hit, and the steps that were lost.
"""

import argparse
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for object_store and tiny, when this is run as a command

import torch
from network import Loopback, Namespaces, network
from nodes import ROOT, Run
from object_store import Proxy, environment, s3_server, upload
from safetensors.torch import load_file
from tiny import TINY

from benchmarks.harness import Row, describe_machine, results_folder, write_results
from common.errors import InputError, run_command
from common.progress import progress_bar

GLOBAL_BATCH = 4
FROM, TO = 3, 9  # steps between two faults
CHECKPOINT_EVERY = 4
TIMEOUT_S = 10.0  # after which a rank that does not answer is given up
ENDS_WITHIN_S = 60.0  # what has not ended by then is a defect, and killed
STARTS_WITHIN_S = 120.0
RUNS_WITHIN_S = 240.0
SCRATCH = "adamae-faults-"  # begins the name of the folder that everything is in
SETTINGS = [
    *TINY, "data.prefetch=1", "keep_checkpoints=2", "data.download_timeout_s=3", f"checkpoint_every={CHECKPOINT_EVERY}",
    f"distributed.timeout_s={TIMEOUT_S}",
]  # fmt: skip


@dataclass
class Site:
    """What a fault can be injected into."""

    run: Run
    net: Loopback | Namespaces
    proxy: Proxy
    disk: Path | None  # a small file system of its own, with the run directory on it
    dice: random.Random
    undo: list[Callable[[], None]] = field(default_factory=list)  # before the run is started again

    def any_node(self) -> int:
        return self.dice.randrange(len(self.run.nodes))


def to_worker(number: int) -> Callable[[Site], None]:
    return lambda site: os.kill(site.dice.choice(site.run.workers(site.any_node())), number)


def to_torchrun(number: int) -> Callable[[Site], None]:
    return lambda site: site.run.nodes[site.any_node()].send_signal(number)


def to_node(number: int) -> Callable[[Site], None]:
    return lambda site: site.run.signal_node(site.any_node(), number)


def to_all(number: int) -> Callable[[Site], None]:
    def send(site: Site) -> None:
        for node in range(len(site.run.nodes)):
            site.run.signal_node(node, number)

    return send


def cut_network(site: Site) -> None:
    assert isinstance(site.net, Namespaces)
    site.net.cut(site.any_node())
    site.undo.append(site.net.mend)


def fill_disk(site: Site) -> None:
    """Leave no space for the next checkpoint."""
    assert site.disk is not None
    filler = site.disk / "filler"
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    site.undo.append(filler.unlink)


def starve(kind: str, times: int = 10**9) -> Callable[[Site], None]:
    """Move to new nodes with empty caches, and let object storage fail: open files would need none."""

    def replace(site: Site) -> None:
        site.run.kill()
        for cache in site.run.caches():
            shutil.rmtree(cache, ignore_errors=True)
        site.proxy.inject(kind, ".tar", times=times)  # type: ignore[arg-type]
        site.undo.append(site.proxy.heal)
        site.run.start()

    return replace


FROZEN = "SIGSTOP of a worker"  # the others end, and name it; it cannot end by itself
FAULTS: dict[str, Callable[[Site], None]] = {
    "kill -9 of a worker": to_worker(signal.SIGKILL),
    "kill -9 of a torchrun": to_torchrun(signal.SIGKILL),
    "kill -9 of a node": to_node(signal.SIGKILL),
    "kill -9 of all": to_all(signal.SIGKILL),
    "SIGTERM to a worker": to_worker(signal.SIGTERM),
    "SIGTERM to a torchrun": to_torchrun(signal.SIGTERM),
    "SIGTERM to a node, torchrun and workers": to_node(signal.SIGTERM),
    "SIGTERM to all": to_all(signal.SIGTERM),
    "SIGUSR1 to a worker": to_worker(signal.SIGUSR1),
    "SIGHUP to all": to_all(signal.SIGHUP),
    FROZEN: to_worker(signal.SIGSTOP),
    "a node's network cut": cut_network,
    "disk full at a checkpoint": fill_disk,
    "storage: a few 503s": starve("503", times=3),
    "storage: 503s that last": starve("503"),
    "storage: a few cut bodies": starve("cut", times=3),
    "storage: cut bodies that last": starve("cut"),
    "storage: silent": starve("silent"),
    "storage: other bytes, once": starve("changed", times=1),
    "storage: other bytes that last": starve("changed"),
}
PASSES = {name for name in FAULTS if ": a few" in name or "once" in name}  # the run itself gets over these
NEEDS = {"a node's network cut": "cut", "disk full at a checkpoint": "disk"}


def list_possible(site: Site) -> list[str]:
    """List the faults that can be injected on this machine."""
    able = {"cut": site.net.can_cut, "disk": site.disk is not None}
    return [name for name in FAULTS if able.get(NEEDS.get(name, ""), True)]


def inject(site: Site, name: str, target: int) -> Row:
    """Inject a fault into a run that goes to step `target` at least, and resume it if need be; return how it went.

    Raise InputError if the run does not get over it.
    """
    run = site.run
    at, started = run.step(), time.monotonic()
    time.sleep(site.dice.uniform(0, 0.2))
    FAULTS[name](site)
    row: Row = {"fault": name, "at_step": at}
    if name in PASSES:
        _require(run, run.wait_for(lambda: run.step() >= at + FROM, RUNS_WITHIN_S), f"{name}: no step any more")
        asked = len(site.proxy.requests)
        _undo(site)
        _require(run, asked > 0, f"{name}: nothing was asked of the storage")
        return {**row, "happens": "continues", "seconds_lost": round(time.monotonic() - started, 1), "steps_lost": 0}
    ended = run.wait_until_over(ENDS_WITHIN_S + (STARTS_WITHIN_S if name.startswith("storage") else 0))
    row["seconds_to_end"] = round(time.monotonic() - started, 1)
    row["exit_codes"] = " ".join(map(str, run.exit_codes()))
    reached = run.step()
    row["message"] = _last_message(run)
    if not ended:
        row["left_running"] = sum(len(run.group(node)) for node in range(len(run.nodes)))
    run.kill()
    _undo(site)
    saved = run.saved_step()
    run.start()
    again = run.wait_for(lambda: run.step() > reached or run.saved_step() >= target, RUNS_WITHIN_S)
    _require(run, again, f"after {name} the run does not resume")
    row["happens"] = "ends, resumes" if ended else "killed after a minute, resumes"
    row["seconds_lost"] = round(time.monotonic() - started, 1)
    row["steps_lost"] = max(0, reached - saved)
    return row


def _undo(site: Site) -> None:
    while site.undo:
        site.undo.pop()()


def _last_message(run: Run) -> str:
    """Return the last thing that the run itself said when it ended."""
    lines = run.said().replace("\r", "\n").splitlines()
    said = [line for line in lines if line.startswith(("error: ", "interrupted", "Stopped"))]
    return re.sub(rf"\S*/{SCRATCH}[^/]*/", "", said[-1]) if said else ""  # as on any machine


def _require(run: Run, fine: bool, claim: str) -> None:
    if not fine:
        said = run.said()[-4000:]
        run.kill()
        raise InputError(f"{claim}; the run said:\n{said}")


def find_differences(run: Run, reference: Run, step: int) -> str:
    """Say what of a run differs from the undisturbed one; "" if nothing does."""
    ours, theirs = run.losses(), reference.losses()
    for number in sorted(theirs):
        if ours.get(number) != theirs[number]:
            return f"the loss of step {number} is {ours.get(number)} instead of {theirs[number]}"
    weights, expected = load_file(run.weights(step)), load_file(reference.weights(step))
    same = weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
    return "" if same else f"weights of step {step}"


class Campaign:
    """What runs share: the network, the storage, the disk and the undisturbed run; a context manager."""

    def __init__(self, folder: Path, shards: Path, nodes: int = 2, ranks: int = 1) -> None:
        self._folder, self._shards, self._nodes, self._ranks = folder, shards, nodes, ranks

    def __enter__(self) -> "Campaign":
        with ExitStack() as stack:
            self.net = stack.enter_context(network(self._nodes))
            port = stack.enter_context(s3_server())
            self.proxy = stack.enter_context(Proxy(port, address=self.net.outside))
            self.url = upload(self.proxy.url, self._shards, "bucket", "shards")
            self.disk = _mount_small_disk(self._folder / "disk", stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def make_run(self, name: str, *settings: str) -> Run:
        place = self.disk if self.disk and name == "disturbed" else self._folder
        batch = f"batch_size={GLOBAL_BATCH // self._nodes // self._ranks}"
        given = [*SETTINGS, f"data.shards={self.url}", batch, *settings]
        return Run(place / name, self.net, given, environment(self.proxy.url))

    def run_undisturbed(self, steps: int) -> Run:
        run = self.make_run(f"undisturbed-{steps}", f"steps={steps}")
        run.start(self._nodes, self._ranks)
        ends = run.wait_until_over(RUNS_WITHIN_S) and set(run.exit_codes()) == {0}
        _require(run, ends, "the run fails by itself")
        return run


def _mount_small_disk(folder: Path, stack: ExitStack) -> Path | None:
    """Mount a file system of 64 MiB, where one may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=False)
    return folder


def inject_all(campaign: Campaign, names: list[str], seed: int) -> tuple[list[Row], str]:
    """Inject `names` into one run, one after another; return a row for each, and what differs in the end."""
    dice = random.Random(seed)
    steps = (TO + CHECKPOINT_EVERY) * len(names) + TO
    reference = campaign.run_undisturbed(steps)
    run = campaign.make_run("disturbed", f"steps={steps}")
    site = Site(run, campaign.net, campaign.proxy, campaign.disk, random.Random(seed))
    run.start()
    rows = []
    try:
        for name in progress_bar(names, unit="fault", total=len(names)):
            at = run.step() + dice.randint(FROM, TO)
            _require(run, run.wait_for(lambda at=at: run.step() >= at, RUNS_WITHIN_S), f"step {at} is not reached")
            rows.append(inject(site, name, steps))
            expected = reference.losses()
            rows[-1]["losses_equal"] = all(expected.get(step) == loss for step, loss in run.losses().items())
            print(rows[-1], file=sys.stderr)
        _require(run, run.wait_until_over(RUNS_WITHIN_S), "the run does not end")
        _require(run, set(run.exit_codes()) == {0}, f"the run ends with {run.exit_codes()}")
        return rows, find_differences(run, reference, steps)
    finally:
        run.kill()


def make_shards(folder: Path) -> Path:
    """Make four shards of sixteen synthetic videos."""
    tools = ROOT / "shard_tools"
    settings = ["--num-videos", "16", "--size", "64", "--num-frames", "32", "--classes", "right", "left"]
    subprocess.run([sys.executable, tools / "synthetic_videos.py", folder / "videos", *settings], check=True)
    settings = ["--frame-stride", "2", "--samples-per-shard", "4"]
    command = [sys.executable, tools / "make_shards.py", folder / "videos", folder / "shards", *settings]
    subprocess.run(command, check=True)
    return folder / "shards"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="random faults; 0: each kind once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=list(FAULTS), help="only of this kind; may be repeated")
    parser.add_argument("--ranks", type=int, default=1, help="per node")
    parser.add_argument("--output", type=Path, default=results_folder(torch.device("cpu")) / "faults")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as folder:
        place = Path(folder)
        with Campaign(place, make_shards(place), ranks=options.ranks) as campaign:
            able = Site(campaign.make_run("disturbed"), campaign.net, campaign.proxy, campaign.disk, random.Random(0))
            names = options.only or list_possible(able)
            if options.count:
                names = random.Random(options.seed).choices(names, k=options.count)
            rows, differs = inject_all(campaign, names, options.seed)
    only = shlex.join(["", *(f"--only={name}" for name in options.only or ())]).removeprefix("''")
    about: dict[str, Any] = {
        **describe_machine(torch.device("cpu"), ("fsspec", "s3fs", "moto")),
        "command": f"python tests/cluster/faults.py --count {options.count} --seed {options.seed}{only}",
        "nodes": f"2 × {options.ranks} ranks, {'network namespaces' if campaign.net.can_cut else 'loopback'}",
        "faults": len(rows),
        "left_running": sum(1 for row in rows if row.get("left_running") and row["fault"] != FROZEN),
        "differs_from_an_undisturbed_run": differs or "nothing: losses of all steps and weights, bit by bit",
    }
    name = f"{options.count}_random_seed_{options.seed}" if options.count else "each_kind"
    write_results(options.output, name, rows, about, [])
    print(f"{len(rows)} faults; differs: {differs or 'nothing'}")
    return 1 if differs or about["left_running"] else 0


if __name__ == "__main__":
    run_command(main)
