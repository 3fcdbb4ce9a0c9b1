"""What the machine offers, from the files that the kernel shows."""

from pathlib import Path

import pytest

from runner.serving import machine


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files of /proc and /sys as the test says."""
    files: dict[str, str] = {"/proc/meminfo": "MemTotal: 32 kB\nMemAvailable:   8388608 kB\n", "/proc/cpuinfo": "processor: 0\n"}
    monkeypatch.setattr(machine, "_read", lambda path: files.get(str(path), ""))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return files


def test_threads_are_bounded_by_the_affinity(kernel: dict[str, str]) -> None:
    assert machine.usable_threads() == 8


@pytest.mark.parametrize(("quota", "threads"), [("150000 100000", 1), ("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8)])
def test_threads_follow_the_cgroup_quota_rounded_down_and_never_zero(kernel: dict[str, str], quota: str, threads: int) -> None:
    """Case 79."""
    kernel["/proc/self/cgroup"] = "0::/a/b\n"
    kernel["/sys/fs/cgroup/a/cpu.max"] = quota
    assert machine.usable_threads() == threads


def test_the_quota_of_version_1_counts_too(kernel: dict[str, str]) -> None:
    kernel["/proc/self/cgroup"] = "4:cpu,cpuacct:/x\n"
    kernel["/sys/fs/cgroup/cpu/x/cpu.cfs_quota_us"] = "300000"
    kernel["/sys/fs/cgroup/cpu/x/cpu.cfs_period_us"] = "100000"
    assert machine.usable_threads() == 3


def test_hyper_threads_do_not_count(kernel: dict[str, str]) -> None:
    kernel["/proc/cpuinfo"] = "".join(f"processor: {i}\nphysical id: 0\ncore id: {i % 4}\n\n" for i in range(8))
    assert machine.usable_threads() == 4


def test_a_memory_limit_counts_without_the_page_cache(kernel: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 80."""
    kernel["/proc/self/cgroup"] = "0::/job\n"
    kernel["/sys/fs/cgroup/job/memory.max"] = str(1 << 30)
    kernel["/sys/fs/cgroup/job/memory.current"] = str(700 << 20)
    kernel["/sys/fs/cgroup/job/memory.stat"] = f"anon 5\ninactive_file {400 << 20}\nactive_file {100 << 20}\n"
    assert machine.available_memory() == (1 << 30) - (200 << 20)


def test_without_limits_the_free_memory_counts(kernel: dict[str, str]) -> None:
    assert machine.available_memory() == 8 << 30
