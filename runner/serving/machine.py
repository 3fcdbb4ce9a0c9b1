"""What this process may use of the machine: CPUs, CPU quota, memory. Read at start, from the OS."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_threads() -> int:
    """Threads worth computing with: the smallest of CPU affinity, cgroup quota (rounded down) and physical cores; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpus()
    limits = [affinity, physical_cores() or affinity]
    if quota is not None:
        limits.append(int(quota))
    return max(1, min(limits))


def physical_cores() -> int | None:
    """Cores without hyper-threads; None where the OS does not say."""
    cpuinfo = _read(Path("/proc/cpuinfo"))
    if cpuinfo:
        return _physical_cores_of(cpuinfo)
    import psutil  # lazy: 20 ms that Linux does not need

    return psutil.cpu_count(logical=False)


def cgroup_cpus() -> float | None:
    """The CPU quota of this process's control group in CPUs, the strictest on the way up; None without one."""
    quotas = [quota for folder in _cgroup_folders("cpu") if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def available_memory() -> int:
    """Bytes that can be allocated without swapping: the OS's estimate, cut by control group and address-space limits."""
    limits = [_free_memory()]
    for folder in _cgroup_folders("memory"):
        for maximum, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (limit := _number(_read(folder / maximum))) is not None:
                limits.append(max(0, limit - _reclaimable_use(folder, used)))
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            limits.append(max(0, soft - _own_address_space()))
    return min(limits)


def _free_memory() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)


def _physical_cores_of(cpuinfo: str) -> int | None:
    """Distinct (physical id, core id) pairs of /proc/cpuinfo; None where the kernel does not list them (most Arm)."""
    cores, fields = set(), dict[str, str]()
    for line in [*cpuinfo.splitlines(), ""]:
        name, _, value = line.partition(":")
        if name.strip():
            fields[name.strip()] = value.strip()
        else:
            if "core id" in fields:
                cores.add((fields.get("physical id", "0"), fields["core id"]))
            fields = {}
    return len(cores) or None


def _cgroup_folders(controller: str) -> list[Path]:
    """The control-group folders from this process's own up to the root (v2), or those of `controller` (v1)."""
    folders = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / controller if controllers else _CGROUP_ROOT
        own = root / path.strip("/")
        folders += [folder for folder in (own, *own.parents) if folder == root or root in folder.parents]
    return folders


def _quota_of(folder: Path) -> float | None:
    parts = _read(folder / "cpu.max").split()
    if len(parts) == 2 and parts[0].isdecimal():
        return int(parts[0]) / int(parts[1])
    quota, period = _number(_read(folder / "cpu.cfs_quota_us")), _number(_read(folder / "cpu.cfs_period_us"))
    return quota / period if quota and period else None


def _reclaimable_use(folder: Path, used: str) -> int:
    """Bytes a group uses, without the page cache that the kernel would drop for us."""
    total = _number(_read(folder / used)) or 0
    stat: Mapping[str, str] = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    return max(0, total - int(stat.get("inactive_file", "0")) - int(stat.get("active_file", "0")))


def _own_address_space() -> int:
    pages = _read(Path("/proc/self/statm")).split()
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _number(text: str) -> int | None:
    text = text.strip()
    # cgroup v1 writes "no limit" as a number near 2**63.
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
