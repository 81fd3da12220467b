"""Inject faults into a run on two nodes, which ends with the weights of an undisturbed run.

It is killed, signaled, frozen, cut off or starved of data; weights are compared bit by bit.

    python tests/cluster/faults.py --count 50 --seed 0

With --count 0, each kind of fault comes once. It comes at a random step; what remains of the run is
waited for, and the same command resumes it. Results go to benchmarks/results/cpu/faults/: for each
fault what happened, the seconds until everything had ended by itself, the seconds until the run was
again at the step where it was hit, and the steps that were lost.
"""

import argparse
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# For object_store and tiny, when this is run as a command.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from network import Network
from object_store import S3Server, environment, upload
from processes import send, wait_for
from runs import is_same, load_weights, saved_steps
from tiny import TINY
from torchrun import Job

from adamae.benchmarks.harness import RESULTS, Report, Row
from adamae.common.errors import InputError, run_command
from adamae.common.progress import progress_bar
from adamae.shard_tools import make_shards as make_shards_command
from adamae.shard_tools import synthetic_videos
from adamae.training.logger import read_rows

ROOT = Path(__file__).parents[2]
NODES = 2
# Steps between two faults.
MIN_STEPS = 3
MAX_STEPS = 9
CHECKPOINT_EVERY = 4
# After as long, a rank that does not answer is given up. The others wait as long for the first one,
# which writes the last checkpoint and the report.
TIMEOUT_S = 60.0
# What has not ended by then is a defect, and killed.
ENDS_WITHIN_S = 180.0
STARTS_WITHIN_S = 120.0
RUNS_WITHIN_S = 480.0
# The name of the folder that holds everything begins so.
SCRATCH = "adamae-faults-"
SETTINGS = [
    *TINY,
    "data.prefetch=1",
    "keep_checkpoints=2",
    "data.download_timeout_s=3",
    f"checkpoint_every={CHECKPOINT_EVERY}",
    f"timeout_s={TIMEOUT_S}",
]


class Run(Job):
    """A run under torchrun, and what its folder says of it."""

    @property
    def folder(self) -> Path:
        return self.log.with_suffix("")

    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in read_rows(self.folder / "metrics.jsonl")}

    def step(self) -> int:
        return max(self.losses(), default=0)

    def saved_step(self) -> int:
        return max(saved_steps(self.folder), default=0)

    def ends_within(self, seconds: float) -> bool:
        return wait_for(lambda: not self.processes() and self.is_over(), seconds)


@dataclass
class Site:
    """What runs share, and faults can be injected into: network, storage and disk."""

    folder: Path
    net: Network
    store: S3Server
    # A URL in object storage.
    shards: str
    # A small file system of its own, with the disturbed run on it; None if none may be mounted.
    disk: Path | None
    # Called before the run is started again.
    undo: list[Callable[[], None]] = field(default_factory=list)

    def make_run(self, name: str, steps: int) -> "Run":
        """Make a run folder and the command that resumes it, on nodes with caches of their own."""
        parent = self.folder
        if self.disk is not None and name == "disturbed":
            parent = self.disk
        folder = parent / name
        settings = [
            *SETTINGS,
            f"data.shards={self.shards}",
            "batch_size=2",
            f"steps={steps}",
            f"run={folder}",
        ]
        arguments = [*settings, f"data.cache_dir={folder}-cache-{{node}}"]
        log = folder.with_suffix(".log")
        storage = environment(self.store.url)
        return Run(arguments, log, self.net.machines, per_node=1, environment=storage)


@contextmanager
def make_site(folder: Path, shards: Path) -> Iterator[Site]:
    """Yield a site with a copy of the shards in its object storage."""
    disk = folder / "disk"
    disk.mkdir()
    with ExitStack() as stack:
        net = stack.enter_context(Network(NODES))
        store = stack.enter_context(S3Server(net.outside))
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
        can_mount = subprocess.run(mount, check=False, capture_output=True).returncode == 0
        if can_mount:
            stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=False)
        url = upload(store.url, shards, "bucket", "shards")
        yield Site(folder, net, store, url, disk if can_mount else None)


Fault = Callable[[Site, Run, random.Random], None]


def signal_to(target: str, number: int) -> Fault:
    """Return the fault that a worker, a torchrun, a node or all nodes get a signal."""

    def inject(_: Site, run: Run, dice: random.Random) -> None:
        node = dice.randrange(NODES)
        worker = dice.choice(list(run.workers(node).values()))
        if target == "worker":
            send([worker], number)
        elif target == "torchrun":
            send([run.agents[node].pid or 0], number)
        elif target == "node":
            send(run.processes(node), number)
        else:
            send(run.processes(None), number)

    return inject


def cut_network(site: Site, _: Run, dice: random.Random) -> None:
    site.net.cut(dice.randrange(NODES))
    site.undo.append(site.net.mend)


def fill_disk(site: Site, *_: object) -> None:
    """Leave no space for the next checkpoint."""
    assert site.disk is not None
    filler = site.disk / "filler"
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    site.undo.append(filler.unlink)


def starve(kind: str, times: int = 10**9) -> Fault:
    """Return the fault that object storage fails, on new nodes with empty caches.

    A node that has all files open would ask for none.
    """

    def inject(site: Site, run: Run, _: random.Random) -> None:
        run.kill()
        for node in range(NODES):
            shutil.rmtree(f"{run.folder}-cache-{node}", ignore_errors=True)
        site.store.inject(kind, ".tar", times=times)  # type: ignore[arg-type]
        site.undo.append(site.store.heal)
        run.start()

    return inject


# The other workers end, and name it; it cannot end by itself.
FROZEN = "SIGSTOP of a worker"
# These need rights that not every machine gives.
CUT = "a node's network cut"
FULL = "disk full at a checkpoint"
FAULTS: dict[str, Fault] = {
    "kill -9 of a worker": signal_to("worker", signal.SIGKILL),
    "kill -9 of a torchrun": signal_to("torchrun", signal.SIGKILL),
    "kill -9 of a node": signal_to("node", signal.SIGKILL),
    "kill -9 of all": signal_to("all", signal.SIGKILL),
    "SIGTERM to a worker": signal_to("worker", signal.SIGTERM),
    "SIGTERM to a torchrun": signal_to("torchrun", signal.SIGTERM),
    "SIGTERM to a node, torchrun and workers": signal_to("node", signal.SIGTERM),
    "SIGTERM to all": signal_to("all", signal.SIGTERM),
    "SIGUSR1 to a worker": signal_to("worker", signal.SIGUSR1),
    "SIGHUP to all": signal_to("all", signal.SIGHUP),
    FROZEN: signal_to("worker", signal.SIGSTOP),
    CUT: cut_network,
    FULL: fill_disk,
    "storage: a few 503s": starve("503", times=3),
    "storage: 503s that last": starve("503"),
    "storage: a few cut bodies": starve("cut", times=3),
    "storage: cut bodies that last": starve("cut"),
    "storage: silent": starve("silent"),
    "storage: other bytes, once": starve("changed", times=1),
    "storage: other bytes that last": starve("changed"),
}
# The run survives these without an end.
SURVIVED = {"storage: a few 503s", "storage: a few cut bodies", "storage: other bytes, once"}


def inject_all(site: Site, names: list[str], seed: int) -> tuple[list[Row], str]:
    """Inject faults into one run, one after another.

    Return a row for each, and what differs from an undisturbed run in the end, "" if nothing does.
    Raise InputError if the run does not survive one.
    """
    dice = random.Random(seed)
    steps = (MAX_STEPS + CHECKPOINT_EVERY) * len(names) + MAX_STEPS
    reference = site.make_run("undisturbed", steps)
    run = site.make_run("disturbed", steps)
    rows = []
    with reference:
        _require_end(reference, "the run fails by itself")
        expected = reference.losses()
    with run:
        for name in progress_bar(names, unit="fault", total=len(names)):
            step = run.step() + dice.randint(MIN_STEPS, MAX_STEPS)
            _require_step(run, step, f"step {step} is not reached")
            # Somewhere within a step.
            time.sleep(dice.uniform(0, 0.2))
            row = _inject(site, run, name, dice, steps)
            losses = run.losses().items()
            row["losses_equal"] = all(expected.get(step) == loss for step, loss in losses)
            rows.append(row)
            print(row, file=sys.stderr)
        _require_end(run, "the run does not end well")
    if run.losses() != expected:
        return rows, "losses"
    weights = load_weights(run.folder, steps)
    if not is_same(weights, load_weights(reference.folder, steps)):
        return rows, "weights"
    return rows, ""


def _inject(site: Site, run: Run, name: str, dice: random.Random, last: int) -> Row:
    """Inject a fault into a run that goes to step `last`, and resume it if need be.

    Return how it went. Raise InputError if the run goes no further.
    """
    step = run.step()
    started = time.monotonic()
    FAULTS[name](site, run, dice)
    row: Row = {"fault": name, "at_step": step}
    if name in SURVIVED:
        _require_step(run, step + MIN_STEPS, f"{name}: no step any more")
        _require(run, len(site.store.requests) > 0, f"{name}: nothing was asked of the storage")
        site.undo.pop()()
        row["happens"] = "continues"
        row["seconds_lost"] = round(time.monotonic() - started, 1)
        row["steps_lost"] = 0
        return row
    limit = ENDS_WITHIN_S
    if name.startswith("storage"):
        # The run was started on new nodes.
        limit += STARTS_WITHIN_S
    has_ended = run.ends_within(limit)
    row["seconds_to_end"] = round(time.monotonic() - started, 1)
    row["exit_codes"] = " ".join(map(str, run.wait(0)))
    row["message"] = _last_message(run)
    if not has_ended:
        row["left_running"] = len(run.processes())
    reached = run.step()
    run.kill()
    while site.undo:
        site.undo.pop()()
    saved = run.saved_step()
    run.start()
    resumes = wait_for(lambda: run.step() > reached or run.saved_step() >= last, RUNS_WITHIN_S)
    _require(run, resumes, f"after {name} the run does not resume")
    row["happens"] = "ends, resumes" if has_ended else "is killed, resumes"
    row["seconds_lost"] = round(time.monotonic() - started, 1)
    row["steps_lost"] = max(0, reached - saved)
    return row


def _last_message(run: Run) -> str:
    """Return the last sentence of a run, without the folder, which differs from run to run."""
    output = run.said().replace("\r", "\n")
    messages = re.findall(r"^(?:error: |interrupted|Stopped).*", output, re.M)
    if not messages:
        return ""
    return re.sub(rf"\S*/{SCRATCH}[^/]*/", "", messages[-1])


def _require(run: Run, is_fine: bool, problem: str) -> None:
    if not is_fine:
        raise InputError(f"{problem}; the run said:\n{run.said()[-4000:]}")


def _require_step(run: Run, step: int, problem: str) -> None:
    _require(run, wait_for(lambda: run.step() >= step, RUNS_WITHIN_S), problem)


def _require_end(run: Run, problem: str) -> None:
    _require(run, run.ends_within(RUNS_WITHIN_S) and set(run.wait(0)) == {0}, problem)


def make_shards(folder: Path) -> Path:
    """Make four shards of sixteen synthetic videos."""
    videos = str(folder / "videos")
    shards = folder / "shards"
    synthetic_videos.main(
        [videos, "--num-videos=16", "--size=64", "--num-frames=32", "--classes", "right", "left"]
    )
    make_shards_command.main(
        [videos, str(shards), "--frame-stride=2", "--samples-per-shard=4", "--workers=1"]
    )
    return shards


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="random faults; 0: each kind once")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as name:
        folder = Path(name)
        with make_site(folder, make_shards(folder)) as site:
            impossible = {CUT: not site.net.can_cut, FULL: site.disk is None}
            names = [fault for fault in FAULTS if not impossible.get(fault)]
            if options.count:
                names = random.Random(options.seed).choices(names, k=options.count)
            rows, differs = inject_all(site, names, options.seed)
    left_running = [row for row in rows if row.get("left_running") and row["fault"] != FROZEN]
    network = "network namespaces" if site.net.can_cut else "loopback"
    about: dict[str, Any] = {
        "command": f"python tests/cluster/faults.py --count {options.count} --seed {options.seed}",
        "nodes": f"{NODES} × 1 ranks, {network}",
        "faults": len(rows),
        "left_running": len(left_running),
        "differs_from_an_undisturbed_run": differs
        or "nothing: losses of all steps and weights, bit by bit",
    }
    name = f"{options.count}_random_seed_{options.seed}" if options.count else "each_kind"
    Report(name, RESULTS / "cpu/faults", torch.device("cpu"), **about).write(rows)
    print(f"{len(rows)} faults; differs: {differs or 'nothing'}")
    return 1 if differs or left_running else 0


if __name__ == "__main__":
    run_command(main)
