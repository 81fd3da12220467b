"""The same work on a Ray cluster whose machines share the folders of input and output (`pip install ray`)."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from common.errors import InputError
from shard_tools.workers.processes import ATTEMPTS, Failed


class RayPool:
    """Like workers.Pool, on the cluster that `RAY_ADDRESS` names, or on one started here with `num_workers`."""

    def __init__(self, function: Callable[[Any], Any], num_workers: int, timeout: float):
        try:
            import ray
        except ImportError as error:
            raise InputError("--engine ray needs Ray: pip install ray") from error
        self.ray = ray
        self.timeout = timeout
        self.function = function
        self.num_workers = num_workers

    def run(self, jobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (job, result) as they come; the result is Failed where the worker died or took too long."""
        address = os.environ.get("RAY_ADDRESS")
        try:
            if address:
                self.ray.init(address=address, log_to_driver=False)
            else:  # not one that is found running here: it ends when whoever started it ends
                self.ray.init("local", num_cpus=self.num_workers, log_to_driver=False, include_dashboard=False)
        except (ConnectionError, ValueError) as error:
            raise InputError(f"no Ray cluster answers at RAY_ADDRESS={address} ({error})") from error
        try:
            yield from self._run(iter(jobs))
        finally:
            self.ray.shutdown()

    def _run(self, jobs: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        ray = self.ray
        task = ray.remote(max_retries=ATTEMPTS - 1)(self.function)
        # No more tasks than processors: then each begins at once, and its time can be counted from here.
        capacity = max(1, int(ray.cluster_resources().get("CPU", 1)))
        running: dict[Any, tuple[Any, float]] = {}
        while True:
            while len(running) < capacity and (job := next(jobs, None)) is not None:
                running[task.remote(job)] = job, time.monotonic() + self.timeout
            if not running:
                return
            patience = max(0.0, min(deadline for _, deadline in running.values()) - time.monotonic())
            done, _ = ray.wait(list(running), num_returns=1, timeout=patience)
            late = [ref for ref, (_, deadline) in running.items() if ref not in done and deadline < time.monotonic()]
            for reference in done:
                job, _ = running.pop(reference)
                yield job, self._result(reference)
            for reference in late:
                job, _ = running.pop(reference)
                ray.cancel(reference, force=True)
                yield job, Failed(f"it took longer than {self.timeout:g} seconds")

    def _result(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.WorkerCrashedError:
            return Failed("the process that worked on it died")
