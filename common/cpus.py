"""The CPU cores that this process may use."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def count_cpus(root: Path = Path("/")) -> int:
    """Return the smaller of the cores in the process's affinity and its control group's quota.

    `docker run --cpus 1.5` sets such a quota: 2 cores. Python's own functions do not read it.
    `root` is that of the file system, for tests.
    """
    return math.ceil(min([len(os.sched_getaffinity(0)), *_list_quotas(root)]))


def _list_quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of the process's control groups and of all above them.

    In a container, the path of a group may be the host's, which does not exist there; its own group
    is at the top. The files are described in the kernel's cgroup-v2.rst and sched-bwc.rst.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    # Such as on a kernel without control groups.
    except OSError:
        return
    for line in lines:
        # Version 2 has the line "0::/path", version 1 one for each set of controllers, such as
        # "4:cpu,cpuacct:/path".
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top = root / "sys/fs/cgroup"
            # "150000 100000", or "max 100000" without a quota.
            files = ["cpu.max"]
        elif "cpu" in controllers.split(","):
            top = root / "sys/fs/cgroup/cpu"
            files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            # There may be no such group, or the quota "max".
            with suppress(OSError, ValueError):
                text = " ".join((folder / file).read_text() for file in files)
                quota, period = map(int, text.split())
                # Version 1 has -1 without a quota.
                if quota > 0:
                    yield quota / period
