"""The cores that a process may use, by affinity and by quotas of control groups."""

import os
from pathlib import Path

import pytest

from adamae.common.cpus import count_cpus
from adamae.pipeline.config import DataConfig

CASES = {
    "no control groups": ("", {}, 64),
    "no quota": ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
    "docker run --cpus 1.5": ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
    "less than one core": ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
    "more than there are": ("0::/\n", {"cpu.max": "6500000 100000\n"}, 64),
    "systemd-run, quota of the slice": (
        "0::/a.slice/b.scope\n",
        {"a.slice/cpu.max": "400000 100000", "a.slice/b.scope/cpu.max": "max 100000"},
        4,
    ),
    "the host's path in a container": (
        "0::/system.slice/docker-1.scope\n",
        {"cpu.max": "300000 100000\n"},
        3,
    ),
    "version 1": (
        "1:memory:/m\n4:cpu,cpuacct:/c\n0::/\n",
        {"cpu/c/cpu.cfs_quota_us": "250000\n"},
        3,
    ),
    "version 1, no quota": ("4:cpuacct,cpu:/c\n", {"cpu/c/cpu.cfs_quota_us": "-1\n"}, 64),
}


@pytest.mark.parametrize(("groups", "files", "expected"), CASES.values(), ids=CASES.keys())
def test_a_quota_limits_the_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    periods = {name.replace("quota", "period"): "100000\n" for name in files if "quota" in name}
    for name, text in (files | periods).items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if groups:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    assert count_cpus(tmp_path) == expected


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, expected in ((1, count_cpus()), (2, max(1, count_cpus() // 2)), (1000, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert DataConfig().workers == expected
