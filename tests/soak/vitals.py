"""What a server's processes take: memory, descriptors, threads, connections; and whether that grew."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

ENGINE_MARKS: Final = ("--engine-process", "tests.soak.faulty_engine", "runner.serving.process")


@dataclass(frozen=True, slots=True)
class Tree:
    """A server's processes: the front, the engine (None between two), and all of them by pid."""

    front: psutil.Process
    engine: psutil.Process | None
    n_processes: int


def find_tree(pid: int) -> Tree:
    """Look at the processes under `pid`, which may be a bootloader. Raises psutil.NoSuchProcess where it has ended."""
    root = psutil.Process(pid)
    found = [root, *root.children(recursive=True)]
    engines: list[psutil.Process] = []
    others: list[psutil.Process] = []
    for process in found:
        try:
            (engines if _is_engine(process.cmdline()) else others).append(process)
        except psutil.NoSuchProcess:
            continue
    return Tree(others[-1], engines[-1] if engines else None, len(engines) + len(others))


def _is_engine(command: list[str]) -> bool:
    return any(mark in command for mark in ENGINE_MARKS)


def anonymous_mib(process: psutil.Process) -> float:
    """Resident memory that no file backs: what a leak adds to. The model's pages, which the system may take back, are left out."""
    status = Path(f"/proc/{process.pid}/status")
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        raise psutil.NoSuchProcess(process.pid) from None
    for line in lines:
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise psutil.NoSuchProcess(process.pid)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What must be the same again when all clients have gone."""

    n_processes: int
    front_descriptors: int
    front_threads: int
    engine_descriptors: int
    engine_threads: int
    connections: int

    @classmethod
    def of(cls, pid: int) -> "Holdings | None":
        """As of now; None while no engine runs."""
        tree = find_tree(pid)
        if tree.engine is None:
            return None
        established = [each for each in tree.front.net_connections(kind="tcp") if each.status != psutil.CONN_LISTEN]
        return cls(
            tree.n_processes,
            tree.front.num_fds(),
            tree.front.num_threads(),
            tree.engine.num_fds(),
            tree.engine.num_threads(),
            len(established),
        )

    def excess(self, before: "Holdings") -> list[str]:
        """What is more than `before`, as sentences."""
        names = self.__dataclass_fields__
        pairs = ((name, getattr(before, name), getattr(self, name)) for name in names)
        return [f"{name}: {then} before the load, {now} after it" for name, then, now in pairs if now > then]


@dataclass(slots=True)
class Memory:
    """Samples of one process after its warm-up: (seconds, MiB)."""

    samples: list[tuple[float, float]] = field(default_factory=list)

    def add(self, at: float, mib: float) -> None:
        """One more."""
        self.samples.append((at, mib))

    @property
    def growth_mib(self) -> float:
        """The median of the last third of the time less that of the first: what comes and goes counts for nothing, a leak does."""
        if len(self.samples) < 3:
            return 0.0
        first, last = self.samples[0][0], self.samples[-1][0]
        third = (last - first) / 3
        early = [mib for at, mib in self.samples if at <= first + third]
        late = [mib for at, mib in self.samples if at >= last - third]
        return statistics.median(late) - statistics.median(early)
