"""The limits that the agent itself runs under: a systemd slice, a Slurm job, a container around it.

Containers that Docker starts escape the agent's cgroup, so the agent must offer no more than that cgroup has.
Cgroups of Attempts are not handled here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from outerproduct_agent.cpuset import CpuSet

if TYPE_CHECKING:
    from collections.abc import Iterator

# Cgroup v1 says "no limit" with the largest multiple of the page size below 2**63, cgroup v2 with "max".
_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class OwnCgroup:
    """Folders of the agent's cgroup and its ancestors, nearest first, for the two controllers used here.

    Ancestors count, since a limit on any of them holds. A folder that is not visible (a container without a
    cgroup namespace sees only part of the tree) is simply not among them.
    """

    cpuset_folders: tuple[Path, ...]
    memory_folders: tuple[Path, ...]

    @classmethod
    def read(cls, *, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> OwnCgroup:
        """Find the agent's cgroup from /proc/self/cgroup (cgroups(7)); all empty where there is none.

        Args:
            membership: file with one `hierarchy:controllers:path` per line.
            root: where cgroups are mounted, v2 or one folder per v1 controller.
        """
        try:
            lines = membership.read_text(encoding="utf-8").splitlines()
        except OSError:
            return cls((), ())
        cpuset: tuple[Path, ...] = ()
        memory: tuple[Path, ...] = ()
        unified: tuple[Path, ...] = ()
        for line in lines:
            hierarchy, controllers, path = line.split(":", 2)
            if hierarchy == "0" and not controllers:
                unified = tuple(_existing(root, path))
            if "cpuset" in controllers.split(","):
                cpuset = tuple(_existing(root / "cpuset", path))
            if "memory" in controllers.split(","):
                memory = tuple(_existing(root / "memory", path))
        return cls(cpuset or unified, memory or unified)

    def effective_cpus(self) -> CpuSet | None:
        """CPUs that the cpuset controller leaves to the agent, `None` where it says nothing."""
        for folder in self.cpuset_folders:
            # v2, v1, v1 without the effective file
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
                if text := _read(folder / name):
                    return CpuSet.parse(text)
        return None

    def memory_limit_bytes(self) -> int | None:
        """The lowest memory limit in bytes on the agent's cgroup or an ancestor, `None` without one."""
        limits = []
        for folder in self.memory_folders:
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = _read(folder / name)
                if text.isdigit() and int(text) < _UNLIMITED_BYTES:
                    limits.append(int(text))
        return min(limits, default=None)


def _existing(root: Path, path: str) -> Iterator[Path]:
    relative = PurePosixPath(os.path.normpath("/" + path.lstrip("/"))).relative_to("/")
    for folder in (relative, *relative.parents):
        if (root / folder).is_dir():
            yield root / folder


def _read(path: Path) -> str:
    """The file's text; empty where it is missing or refused: it then limits nothing that we can know."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
