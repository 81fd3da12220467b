"""How many CPU cores this process may use."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def count_cpus(root: Path = Path("/")) -> int:
    """Count the cores of the process's affinity, or as many as it may use at once by the quota of its control group,
    such as a container's --cpus, which Python's own functions do not read. `root`: of the file system, for tests."""
    return math.ceil(min([len(os.sched_getaffinity(0)), *_list_quotas(root)]))


def _list_quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of the process's control groups, version 2 or 1, and of all above them.

    In a container, the path of a group may be the host's, which does not exist there; its own group is at the top.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # no such group; no quota: "max"
                    quota, period = map(
                        int, " ".join((folder / file).read_text() for file in files).split()
                    )
                    if quota > 0:
                        yield quota / period
