"""What the kernel says about a container: its cgroup's counters, on cgroup v1 and v2.

The cgroup is found through a process of the container, so it does not matter which driver made it (cgroupfs, systemd).
It goes away with the last process: whoever needs its counters at the end must have looked before, or be told by the
watch for out-of-memory events.
Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def cgroup_version(root: Path = ROOT) -> int:
    """1 or 2: what the machine's memory controller is on."""
    return 2 if (root / "cgroup.controllers").exists() else 1


@dataclass(frozen=True, slots=True)
class Usage:
    """One look."""

    memory_bytes: int
    """What counts against the limit, without page cache that can be dropped."""
    peak_bytes: int
    """The highest charge so far; 0 where the kernel does not say (v2 before Linux 5.19)."""
    shm_bytes: int
    """In /dev/shm and other shared memory."""
    oom_kills: int
    """Processes that the kernel killed for memory."""
    cpu_seconds: float


class ContainerCgroup:
    """The cgroup of one container. Every method raises OSError once it is gone."""

    def __init__(self, version: int, memory: Path, cpu: Path) -> None:
        self.version = version
        self._memory = memory
        self._cpu = cpu

    @classmethod
    def of_process(cls, pid: int, *, root: Path = ROOT, proc: Path = Path("/proc")) -> ContainerCgroup:
        """The one that a process is in."""
        paths: dict[str, str] = {}
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path.lstrip("/")
        if cgroup_version(root) == 2:
            folder = root / paths[""]
            return cls(2, folder, folder)
        cpuacct = next(name for name in ("cpu,cpuacct", "cpuacct") if (root / name).exists())
        return cls(1, root / "memory" / paths["memory"], root / cpuacct / paths["cpuacct"])

    def usage(self) -> Usage:
        """A look at the counters."""
        stat = _pairs(self._memory / "memory.stat")
        if self.version == 2:
            current = _number(self._memory / "memory.current")
            peak = _number(self._memory / "memory.peak", missing=0)
            cache = stat.get("inactive_file", 0)
            cpu_seconds = _pairs(self._cpu / "cpu.stat").get("usage_usec", 0) / 1e6
        else:
            current = _number(self._memory / "memory.usage_in_bytes")
            peak = _number(self._memory / "memory.max_usage_in_bytes")
            cache = stat.get("total_inactive_file", 0)
            cpu_seconds = _number(self._cpu / "cpuacct.usage") / 1e9
        return Usage(
            memory_bytes=max(0, current - cache),
            peak_bytes=peak,
            shm_bytes=stat.get("shmem", 0),
            oom_kills=self.oom_kills(),
            cpu_seconds=cpu_seconds,
        )

    def oom_kills(self) -> int:
        """Processes that the kernel killed for memory here."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return _pairs(self._memory / name).get("oom_kill", 0)

    def memory_limit_bytes(self) -> int:
        """The hard limit; -1 when there is none."""
        text = (self._memory / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")).read_text().strip()
        return -1 if text == "max" else int(text)

    def watch_oom(self, loop: asyncio.AbstractEventLoop, notice: Callable[[], None]) -> Callable[[], None]:
        """Calls `notice` on the loop when the kernel reports an out-of-memory event; returns what ends the watch."""
        return self._watch_v2(loop, notice) if self.version == 2 else self._watch_v1(loop, notice)

    def _watch_v1(self, loop: asyncio.AbstractEventLoop, notice: Callable[[], None]) -> Callable[[], None]:
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        control = os.open(self._memory / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        try:
            (self._memory / "cgroup.event_control").write_text(f"{event} {control}")
        except OSError:
            os.close(event)
            raise
        finally:
            os.close(control)

        def readable() -> None:
            os.eventfd_read(event)
            notice()

        def end() -> None:
            loop.remove_reader(event)
            os.close(event)

        loop.add_reader(event, readable)
        return end

    def _watch_v2(self, loop: asyncio.AbstractEventLoop, notice: Callable[[], None]) -> Callable[[], None]:
        # The kernel wakes those who poll memory.events for priority events; the loop only polls for input, so the
        # file goes into an epoll set of its own, which is itself readable then.
        events = os.open(self._memory / "memory.events", os.O_RDONLY | os.O_CLOEXEC)
        poll = select.epoll()
        poll.register(events, select.EPOLLPRI | select.EPOLLET)

        def readable() -> None:
            poll.poll(0)
            notice()

        def end() -> None:
            loop.remove_reader(poll.fileno())
            poll.close()
            os.close(events)

        loop.add_reader(poll.fileno(), readable)
        return end


def _number(path: Path, missing: int | None = None) -> int:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        if missing is None:
            raise
        return missing


def _pairs(path: Path) -> dict[str, int]:
    found = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            found[name] = int(value)
    return found
