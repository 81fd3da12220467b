"""Inject faults into a run on two nodes: killed, signaled, frozen, cut off or starved of data, it ends with the weights
of an undisturbed run, bit by bit.

    python tests/cluster/faults.py --count 50 --seed 0       # random faults; --count 0: each kind once

Each fault comes at a random step; what is left of the run is waited for, and the same command resumes it. Results go to
benchmarks/results/cpu/faults/: for each fault what happened, the seconds until everything had ended by itself, the
seconds until the run was again at the step where it was hit, and the steps that were lost.
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

sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # for object_store and tiny, when this is run as a command

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
FROM, TO = 3, 9  # steps between two faults
CHECKPOINT_EVERY = 4
TIMEOUT_S = 10.0  # after which a rank that does not answer is given up
ENDS_WITHIN_S = 60.0  # what has not ended by then is a defect, and killed
STARTS_WITHIN_S = 120.0
RUNS_WITHIN_S = 240.0
SCRATCH = "adamae-faults-"  # begins the name of the folder that everything is in
SETTINGS = [
    *TINY,
    "data.prefetch=1",
    "keep_checkpoints=2",
    "data.download_timeout_s=3",
    f"checkpoint_every={CHECKPOINT_EVERY}",
    f"timeout_s={TIMEOUT_S}",
]


class Run(Job):
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
    shards: str  # in object storage
    disk: Path | None  # a small file system of its own, with the disturbed run on it
    undo: list[Callable[[], None]] = field(default_factory=list)  # before the run is started again

    def make_run(self, name: str, steps: int) -> "Run":
        """Make a run folder and the command that resumes it, on nodes with caches of their own."""
        folder = (self.disk if self.disk and name == "disturbed" else self.folder) / name
        settings = [
            *SETTINGS,
            f"data.shards={self.shards}",
            "batch_size=2",
            f"steps={steps}",
            f"run={folder}",
        ]
        arguments = [*settings, f"data.cache_dir={folder}-cache-{{node}}"]
        log, storage = folder.with_suffix(".log"), environment(self.store.url)
        return Run(arguments, log, self.net.machines, per_node=1, environment=storage)


@contextmanager
def make_site(folder: Path, shards: Path) -> Iterator[Site]:
    disk = folder / "disk"
    disk.mkdir()
    with ExitStack() as stack:
        net = stack.enter_context(Network(NODES))
        store = stack.enter_context(S3Server(net.outside))
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
        can_mount = subprocess.run(mount, check=False, capture_output=True).returncode == 0
        if can_mount:
            stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=False)
        yield Site(
            folder,
            net,
            store,
            upload(store.url, shards, "bucket", "shards"),
            disk if can_mount else None,
        )


Fault = Callable[[Site, Run, random.Random], None]


def signal_to(target: str, number: int) -> Fault:
    def inject(_: Site, run: Run, dice: random.Random) -> None:
        node = dice.randrange(NODES)
        workers = list(run.workers(node).values())
        targets = {"worker": [dice.choice(workers)], "torchrun": [run.agents[node].pid or 0]}
        send(targets.get(target) or run.processes(node if target == "node" else None), number)

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
    """Move to new nodes with empty caches, and let object storage fail: open files would need none."""

    def inject(site: Site, run: Run, _: random.Random) -> None:
        run.kill()
        for node in range(NODES):
            shutil.rmtree(f"{run.folder}-cache-{node}", ignore_errors=True)
        site.store.inject(kind, ".tar", times=times)  # type: ignore[arg-type]
        site.undo.append(site.store.heal)
        run.start()

    return inject


FROZEN = "SIGSTOP of a worker"  # the others end, and name it; it cannot end by itself
CUT, FULL = "a node's network cut", "disk full at a checkpoint"  # what not every machine lets us do
FAULTS: dict[str, Fault] = {
    **{
        f"kill -9 of {one}": signal_to(one.split()[-1], signal.SIGKILL)
        for one in ("a worker", "a torchrun", "a node")
    },
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
PASSES = {
    name for name in FAULTS if ": a few" in name or "once" in name
}  # the run itself gets over these


def inject_all(site: Site, names: list[str], seed: int) -> tuple[list[Row], str]:
    """Inject `names` into one run, one after another; return a row for each, and what differs from an undisturbed run
    in the end, "" if nothing does. Raise InputError if the run does not get over one."""
    dice = random.Random(seed)
    steps = (TO + CHECKPOINT_EVERY) * len(names) + TO
    reference, run = (site.make_run(name, steps) for name in ("undisturbed", "disturbed"))
    rows = []
    with reference:
        _require_end(reference, "the run fails by itself")
        expected = reference.losses()
    with run:
        for name in progress_bar(names, unit="fault", total=len(names)):
            at = run.step() + dice.randint(FROM, TO)
            _require(
                run,
                wait_for(lambda at=at: run.step() >= at, RUNS_WITHIN_S),
                f"step {at} is not reached",
            )
            time.sleep(dice.uniform(0, 0.2))
            rows.append(_inject(site, run, name, dice, steps))
            rows[-1]["losses_equal"] = all(
                expected.get(step) == loss for step, loss in run.losses().items()
            )
            print(rows[-1], file=sys.stderr)
        _require_end(run, "the run does not end well")
    if run.losses() != expected:
        return rows, "losses"
    return rows, "" if is_same(
        load_weights(run.folder, steps), load_weights(reference.folder, steps)
    ) else "weights"


def _inject(site: Site, run: Run, name: str, dice: random.Random, last: int) -> Row:
    """Inject a fault into a run that goes to step `last`, and resume it if need be; return how it went."""
    at, started = run.step(), time.monotonic()
    FAULTS[name](site, run, dice)
    row: Row = {"fault": name, "at_step": at}
    if name in PASSES:
        _require(
            run,
            wait_for(lambda: run.step() >= at + FROM, RUNS_WITHIN_S),
            f"{name}: no step any more",
        )
        _require(run, len(site.store.requests) > 0, f"{name}: nothing was asked of the storage")
        site.undo.pop()()
        return {
            **row,
            "happens": "continues",
            "seconds_lost": round(time.monotonic() - started, 1),
            "steps_lost": 0,
        }
    ended = run.ends_within(ENDS_WITHIN_S + (STARTS_WITHIN_S if name.startswith("storage") else 0))
    row["seconds_to_end"] = round(time.monotonic() - started, 1)
    row["exit_codes"] = " ".join(map(str, run.wait(0)))
    said = re.findall(r"^(?:error: |interrupted|Stopped).*", run.said().replace("\r", "\n"), re.M)
    row["message"] = (
        re.sub(rf"\S*/{SCRATCH}[^/]*/", "", said[-1]) if said else ""
    )  # as on any machine
    if not ended:
        row["left_running"] = len(run.processes())
    reached = run.step()
    run.kill()
    while site.undo:
        site.undo.pop()()
    saved = run.saved_step()
    run.start()
    again = wait_for(lambda: run.step() > reached or run.saved_step() >= last, RUNS_WITHIN_S)
    _require(run, again, f"after {name} the run does not resume")
    row["happens"] = "ends, resumes" if ended else "killed after a minute, resumes"
    row["seconds_lost"] = round(time.monotonic() - started, 1)
    row["steps_lost"] = max(0, reached - saved)
    return row


def _require(run: Run, fine: bool, claim: str) -> None:
    if not fine:
        raise InputError(f"{claim}; the run said:\n{run.said()[-4000:]}")


def _require_end(run: Run, claim: str) -> None:
    _require(run, run.ends_within(RUNS_WITHIN_S) and set(run.wait(0)) == {0}, claim)


def make_shards(folder: Path) -> Path:
    """Make four shards of sixteen synthetic videos."""
    videos, shards = str(folder / "videos"), folder / "shards"
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
    about: dict[str, Any] = {
        "command": f"python tests/cluster/faults.py --count {options.count} --seed {options.seed}",
        "nodes": f"{NODES} × 1 ranks, {'network namespaces' if site.net.can_cut else 'loopback'}",
        "faults": len(rows),
        "left_running": sum(
            1 for row in rows if row.get("left_running") and row["fault"] != FROZEN
        ),
        "differs_from_an_undisturbed_run": differs
        or "nothing: losses of all steps and weights, bit by bit",
    }
    name = f"{options.count}_random_seed_{options.seed}" if options.count else "each_kind"
    Report(name, RESULTS / "cpu/faults", torch.device("cpu"), **about).write(rows)
    print(f"{len(rows)} faults; differs: {differs or 'nothing'}")
    return 1 if differs or about["left_running"] else 0


if __name__ == "__main__":
    run_command(main)
