"""Faults in a row: a run on two nodes that is killed, signalled, frozen, cut off and starved must end with the weights
of an undisturbed one, bit by bit.

    python tests/cluster/faults.py --count 50 --seed 0

Each fault comes at a random step of the run; what is left of the run is waited for, the same command goes on. Results
go to benchmarks/results/cpu/faults/: for each fault what happened, the seconds until everything had ended by itself,
the seconds until the run was again at the step where it was hit, and the steps that it took twice.
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

sys.path.insert(0, str(Path(__file__).parents[1]))  # for object_store, when this is run as a command

import torch
from network import Loopback, Namespaces, network
from nodes import ROOT, Run
from object_store import Proxy, environment, s3_server, upload

from benchmarks.harness import Row, describe_machine, results_folder, write_results
from common.errors import InputError, run_command
from common.progress import progress_bar
from training.config import TrainConfig

GLOBAL_BATCH = 4
# A fault comes FROM to TO steps after the last one has been got over, and some way into the step.
FROM, TO = 3, 9
CHECKPOINT_EVERY = 4
SILENCE_S = 10.0  # after which a process that does not answer is given up
ENDS_WITHIN_S = 60.0  # what has not ended by then is a defect, and killed
STARTS_WITHIN_S = 120.0
RUNS_WITHIN_S = 240.0

SETTINGS = [
    "model.size=tiny", "model.num_frames=4", "model.image_size=32", "model.patch_size=8", "model.mask_ratio=0.75",
    "data.frame_stride=2", "precision=fp32", "optimizer.base_lr=0.06", "optimizer.warmup_epochs=0", "device=cpu",
    "log_every=1", "data.num_threads=1", "data.prefetch=1", "evaluation.every=null", "keep_checkpoints=2",
    "data.download_timeout_s=3",
]  # fmt: skip

RANDOM_MASKING = ("model.masking=random",)


@dataclass
class Site:
    """What a fault can be done to."""

    run: Run
    net: Loopback | Namespaces
    proxy: Proxy
    disk: Path | None  # a small file system of its own, with the run folder on it
    dice: random.Random
    undo: list[Callable[[], None]] = field(default_factory=list)  # before the run is started again

    def any_node(self) -> int:
        return self.dice.randrange(len(self.run.nodes))

    def any_worker(self) -> int:
        return self.dice.choice(self.run.workers(self.any_node()))


def to_worker(number: int) -> Callable[[Site], None]:
    return lambda site: os.kill(site.any_worker(), number)


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
    """Leave no room for the next checkpoint."""
    assert site.disk is not None
    filler = site.disk / "filler"
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    site.undo.append(filler.unlink)


def starve(kind: str, times: int = 10**9) -> Callable[[Site], None]:
    """New machines, with nothing in their caches, and a store that fails: open files would need none."""

    def replace(site: Site) -> None:
        site.run.kill()
        for cache in site.run.caches():
            shutil.rmtree(cache, ignore_errors=True)
        site.proxy.lay(kind, ".tar", times=times)  # type: ignore[arg-type]
        site.undo.append(site.proxy.heal)
        site.run.start()

    return replace


SCRATCH = "adamae-faults-"  # begins the name of the folder that everything is in
STAYS = "SIGSTOP of a worker"  # the others end, and name it; it cannot end by itself
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
    "SIGUSR1 to all workers": lambda site: [  # type: ignore[func-returns-value]
        os.kill(pid, signal.SIGUSR1) for node in range(len(site.run.nodes)) for pid in site.run.workers(node)
    ],
    "SIGHUP to all": to_all(signal.SIGHUP),
    STAYS: to_worker(signal.SIGSTOP),
    "a node's network cut": cut_network,
    "disk full at a checkpoint": fill_disk,
    "store: a few 503s": starve("503", times=3),
    "store: 503s that last": starve("503"),
    "store: a few cut bodies": starve("cut", times=3),
    "store: cut bodies that last": starve("cut"),
    "store: silent": starve("silent"),
    "store: other bytes, once": starve("changed", times=1),
    "store: other bytes that last": starve("changed"),
}
PASSES = {name for name in FAULTS if ": a few" in name or "once" in name}  # the run itself gets over these
NEEDS = {"a node's network cut": "cut", "disk full at a checkpoint": "disk"}


def possible(site: Site) -> list[str]:
    """Faults that can be made on this machine."""
    able = {"cut": site.net.can_cut, "disk": site.disk is not None}
    return [name for name in FAULTS if able.get(NEEDS.get(name, ""), True)]


def strike(site: Site, name: str, target: int) -> Row:
    """Do a fault to a run that goes on to step `target` at least, and start it again if need be; how it went.

    Raises InputError if the run does not get over it.
    """
    run = site.run
    struck_at, started = run.step(), time.monotonic()
    time.sleep(site.dice.uniform(0, 0.2))
    FAULTS[name](site)
    row: Row = {"fault": name, "at_step": struck_at}
    if name in PASSES:
        _require(run, run.wait_for(lambda: run.step() >= struck_at + FROM, RUNS_WITHIN_S), f"{name}: no step any more")
        asked = len(site.proxy.requests)
        _undo(site)
        _require(run, asked > 0, f"{name}: the store was not asked for anything")
        return {**row, "happens": "goes on", "seconds_lost": round(time.monotonic() - started, 1), "steps_lost": 0}
    ended = run.wait_until_over(ENDS_WITHIN_S + (STARTS_WITHIN_S if name.startswith("store") else 0))
    row["seconds_to_end"] = round(time.monotonic() - started, 1)
    row["exit_codes"] = " ".join(map(str, run.exit_codes()))
    reached = run.step()
    row["said"] = _sentence(run)
    if not ended:
        row["left_running"] = sum(len(run.group(node)) for node in range(len(run.nodes)))
    run.kill()
    _undo(site)
    saved = run.saved_step()
    run.start()
    again = run.wait_for(lambda: run.step() > reached or run.saved_step() >= target, RUNS_WITHIN_S)
    _require(run, again, f"after {name} the run does not go on")
    row["happens"] = "ends, goes on" if ended else "killed after a minute, goes on"
    row["seconds_lost"] = round(time.monotonic() - started, 1)
    row["steps_lost"] = max(0, reached - saved)
    return row


def _undo(site: Site) -> None:
    while site.undo:
        site.undo.pop()()


def _sentence(run: Run) -> str:
    """The last thing that the run itself said when it ended."""
    said = [line for line in run.said().replace("\r", "\n").splitlines() if line.startswith(("error: ", "interrupted"))]
    return re.sub(rf"\S*/{SCRATCH}[^/]*/", "", said[-1]) if said else ""  # as on any machine


def _require(run: Run, fine: bool, claim: str) -> None:
    if not fine:
        said = run.said()[-4000:]
        run.kill()
        raise InputError(f"{claim}; the run said:\n{said}")


def differences(run: Run, reference: Run, step: int) -> str:
    """What of a run differs from the undisturbed one, in words; "" if nothing does."""
    ours, theirs = run.losses(), reference.losses()
    for number in sorted(theirs):
        if ours.get(number) != theirs[number]:
            return f"the loss of step {number} is {ours.get(number)} instead of {theirs[number]}"
    same = run.weights(step).read_bytes() == reference.weights(step).read_bytes()
    return "" if same or _same_tensors(run.weights(step), reference.weights(step)) else f"weights of step {step}"


def _same_tensors(one: Path, other: Path) -> bool:
    from safetensors.torch import load_file

    ours, theirs = load_file(one), load_file(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


class Campaign:
    """Everything that runs share: the network, the store, the disk and the undisturbed run; a context manager."""

    def __init__(self, folder: Path, shards: Path, nodes: int = 2, processes: int = 1) -> None:
        self._folder, self._shards, self._nodes, self._processes = folder, shards, nodes, processes

    def __enter__(self) -> "Campaign":
        with ExitStack() as stack:
            self.net = stack.enter_context(network(self._nodes))
            port = stack.enter_context(s3_server())
            self.proxy = stack.enter_context(Proxy(port, address=self.net.outside))
            self.url = upload(self.proxy.url, self._shards, "bucket", "shards")
            self.disk = _small_disk(self._folder / "disk", stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def new_run(self, name: str, *settings: str) -> Run:
        place = self.disk if self.disk and name == "disturbed" else self._folder
        batch = f"batch_size={GLOBAL_BATCH // self._nodes // self._processes}"
        several = [f"distributed.timeout_s={SILENCE_S}"] if "distributed" in TrainConfig.__dataclass_fields__ else []
        given = [*SETTINGS, f"data.shards={self.url}", f"checkpoint_every={CHECKPOINT_EVERY}", batch, *several]
        return Run(place / name, self.net, [*given, *settings], environment(self.proxy.url))

    def undisturbed(self, steps: int, *settings: str) -> Run:
        """A run to its end."""
        run = self.new_run(f"undisturbed-{steps}", f"steps={steps}", *settings)
        finish(run, self._nodes, self._processes)
        return run

    def site(self, run: Run, seed: int) -> Site:
        return Site(run, self.net, self.proxy, self.disk, random.Random(seed))


def finish(run: Run, nodes: int = 2, processes: int = 1, *more: str) -> None:
    """Run to the end; raises InputError if that is not reached."""
    run.start(nodes, processes, *more)
    _require(run, run.wait_until_over(RUNS_WITHIN_S) and set(run.exit_codes()) == {0}, "the run fails by itself")


def _small_disk(folder: Path, stack: ExitStack) -> Path | None:
    """A file system of 64 MiB, where one may be mounted."""
    folder.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=False)
    return folder


def in_a_row(campaign: Campaign, names: list[str], seed: int, *settings: str) -> tuple[list[Row], str, Run]:
    """Strike one run with all of `names`; a row for each, what differs in the end, and the undisturbed run."""
    dice = random.Random(seed)
    steps = (TO + CHECKPOINT_EVERY) * len(names) + TO
    reference = campaign.undisturbed(steps, *settings)
    run = campaign.new_run("disturbed", f"steps={steps}", *settings)
    site = campaign.site(run, seed)
    run.start()
    rows = []
    try:
        for name in progress_bar(names, unit="fault", total=len(names)):
            at = run.step() + dice.randint(FROM, TO)
            _require(run, run.wait_for(lambda at=at: run.step() >= at, RUNS_WITHIN_S), f"step {at} is not reached")
            rows.append(strike(site, name, steps))
            rows[-1]["losses_equal"] = _equal_so_far(run, reference)
            print(rows[-1], file=sys.stderr)
        _require(run, run.wait_until_over(RUNS_WITHIN_S), "the run does not end")
        _require(run, set(run.exit_codes()) == {0}, f"the run ends with {run.exit_codes()}")
        return rows, differences(run, reference, steps), reference
    finally:
        run.kill()


def _equal_so_far(run: Run, reference: Run) -> bool:
    theirs = reference.losses()
    return all(theirs.get(step) == loss for step, loss in run.losses().items())


def order_in_one_process(campaign: Campaign, together: Run) -> float:
    """Largest relative difference between the losses of a run on two nodes, and of one that was preempted there and
    went on in one process. Only the same clips in the same order make it small.

    `together` is a finished run whose masking is random: what adaptive masking draws depends on the process.
    """
    shrunk = campaign.new_run("shrunk", *RANDOM_MASKING, f"steps={together.saved_step()}")
    shutil.copytree(together.folder, shrunk.folder)
    shutil.rmtree(shrunk.weights(shrunk.saved_step()).parent)
    before = shrunk.saved_step()
    finish(shrunk, 1, 1, f"batch_size={GLOBAL_BATCH}")
    ours, theirs = shrunk.losses(), together.losses()
    assert before < max(theirs), "nothing is left for one process"
    assert ours.keys() == theirs.keys()
    return max(abs(ours[step] - theirs[step]) / theirs[step] for step in theirs)


def make_shards(folder: Path) -> Path:
    """Sixteen drawn videos in four shards."""
    tools = ROOT / "shard_tools"
    settings = ["--num-videos", "16", "--size", "64", "--num-frames", "32", "--classes", "2"]
    subprocess.run([sys.executable, tools / "synthetic_videos.py", folder / "videos", *settings], check=True)
    settings = ["--frame-stride", "2", "--samples-per-shard", "4"]
    subprocess.run(
        [sys.executable, tools / "make_shards.py", folder / "videos", folder / "shards", *settings], check=True
    )
    return folder / "shards"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="random faults; 0: each kind once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=list(FAULTS), help="of these kinds alone")
    parser.add_argument("--processes", type=int, default=1, help="on each of two nodes")
    parser.add_argument("--output", type=Path, default=results_folder(torch.device("cpu")) / "faults")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as folder:
        place = Path(folder)
        with Campaign(place, make_shards(place), processes=options.processes) as campaign:
            site = campaign.site(campaign.new_run("disturbed"), options.seed)
            names = options.only or possible(site)
            if options.count:
                names = random.Random(options.seed).choices(names, k=options.count)
            rows, differs, _ = in_a_row(campaign, names, options.seed)
            apart = order_in_one_process(campaign, campaign.undisturbed(8, *RANDOM_MASKING))
    only = shlex.join(["", *(f"--only={name}" for name in options.only or ())]).removeprefix("''")
    about: dict[str, Any] = {
        **describe_machine(torch.device("cpu"), ("fsspec", "s3fs", "moto")),
        "command": f"python tests/cluster/faults.py --count {options.count} --seed {options.seed}{only}",
        "nodes": f"2 of {options.processes}, {'network namespaces' if campaign.net.can_cut else 'loopback'}",
        "faults": len(rows),
        "left_running": sum(1 for row in rows if row.get("left_running") and row["fault"] != STAYS),
        "differs_from_an_undisturbed_run": differs or "nothing: losses of all steps and weights, bit by bit",
        "largest_difference_of_a_loss_in_one_process": apart,
    }
    name = f"{options.count}_random_seed_{options.seed}" if options.count else "each_kind"
    write_results(options.output, name, rows, about, [])
    print(f"{len(rows)} faults; differs: {differs or 'nothing'}; in one process: {apart:.1e}")
    return 1 if differs or apart > 1e-3 or about["left_running"] else 0


if __name__ == "__main__":
    run_command(main)
