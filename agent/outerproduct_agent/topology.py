"""What processors this machine has: logical CPUs, their cores and NUMA nodes, and which may be used.

Read once from sysfs. Containers, virtual machines and odd kernels leave files out, so every file is optional
and its absence has a stated meaning. Which CPUs an Attempt gets is decided in `cpus.py`.
"""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from outerproduct_agent.cpuset import CpuSet
from outerproduct_agent.own_cgroup import OwnCgroup

if TYPE_CHECKING:
    from collections.abc import Mapping

# Turbo bins make the `cpu_capacity` of equal cores differ by a few percent, while the efficiency cores of
# big.LITTLE machines with a small gap (Cortex-X925 with A725) have about 0.7 of the large ones.
_EFFICIENCY_CAPACITY_RATIO = 0.8


class CoreKind(enum.Enum):
    """The two classes of cores of hybrid processors; all cores of other processors are PERFORMANCE."""

    PERFORMANCE = "performance"
    EFFICIENCY = "efficiency"


@dataclass(frozen=True, slots=True)
class LogicalCpu:
    """One logical CPU (hyper-thread) that is online.

    Attributes:
        id: the kernel's number.
        core: identity of its physical core, the lowest CPU id among the core's hyper-threads. The kernel's
            own `core_id` is unique only within a package.
        package: socket, 0 where the kernel does not say.
        numa_node: NUMA node, 0 where the kernel does not say.
        kind: class of its core.
        isolated: taken from the kernel's scheduler by `isolcpus=` or an isolated cpuset partition.
    """

    id: int
    core: int
    package: int = 0
    numa_node: int = 0
    kind: CoreKind = CoreKind.PERFORMANCE
    isolated: bool = False


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node and its memory in bytes (0 where the kernel does not say)."""

    id: int
    memory_bytes: int


@dataclass(frozen=True)
class Topology:
    """The online CPUs and the NUMA nodes of a machine.

    Attributes:
        cpus: all online CPUs in order of id.
        numa_nodes: in order of id; empty on a machine whose kernel shows no NUMA nodes.
        allowed: what the agent's own affinity and cpuset cgroup leave to it.
    """

    cpus: tuple[LogicalCpu, ...]
    numa_nodes: tuple[NumaNode, ...]
    allowed: CpuSet

    @cached_property
    def usable(self) -> CpuSet:
        """CPUs that Attempts may get: online, allowed to the agent, not isolated."""
        return CpuSet.of(cpu.id for cpu in self.cpus if not cpu.isolated) & self.allowed

    @cached_property
    def by_id(self) -> Mapping[int, LogicalCpu]:
        """The online CPUs by id."""
        return {cpu.id: cpu for cpu in self.cpus}

    @cached_property
    def cores(self) -> Mapping[int, CpuSet]:
        """The usable hyper-threads of each physical core that has any, by `LogicalCpu.core`."""
        threads: dict[int, set[int]] = {}
        for cpu in self.cpus:
            if cpu.id in self.usable:
                threads.setdefault(cpu.core, set()).add(cpu.id)
        return {core: CpuSet.of(ids) for core, ids in sorted(threads.items())}

    def siblings(self, cpu_id: int) -> CpuSet:
        """The usable hyper-threads of the core of this CPU.

        Raises:
            KeyError: no such CPU is online.
        """
        return self.cores.get(self.by_id[cpu_id].core, CpuSet())

    def nodes_of(self, cpus: CpuSet) -> tuple[int, ...]:
        """The NUMA nodes of these CPUs in ascending order; CPUs that are not online count nowhere."""
        return tuple(sorted({self.by_id[cpu].numa_node for cpu in cpus if cpu in self.by_id}))


def read_topology(
    *,
    sys_root: Path = Path("/sys"),
    own_cgroup: OwnCgroup | None = None,
    affinity: CpuSet | None = None,
) -> Topology:
    """Read the topology of this machine.

    Args:
        sys_root: where sysfs is mounted.
        own_cgroup: the agent's cgroup; read from /proc when not given.
        affinity: the agent's CPU affinity; asked from the kernel when not given.
    """
    cpu_root = sys_root / "devices/system/cpu"
    affinity = CpuSet.of(os.sched_getaffinity(0)) if affinity is None else affinity
    cgroup_cpus = (OwnCgroup.read() if own_cgroup is None else own_cgroup).effective_cpus()
    allowed = affinity if cgroup_cpus is None else affinity & cgroup_cpus
    online = _read_cpus(cpu_root / "online") or affinity
    isolated = _read_cpus(cpu_root / "isolated")
    efficiency = _efficiency_cpus(sys_root, online)
    nodes, node_of = _read_numa(sys_root / "devices/system/node")
    cpus = []
    for cpu_id in online:
        threads = _read_threads(cpu_root / f"cpu{cpu_id}/topology", cpu_id)
        package = _read_int(cpu_root / f"cpu{cpu_id}/topology/physical_package_id", default=0)
        cpus.append(
            LogicalCpu(
                id=cpu_id,
                core=min(threads),
                package=max(package, 0),
                numa_node=node_of.get(cpu_id, 0),
                kind=CoreKind.EFFICIENCY if cpu_id in efficiency else CoreKind.PERFORMANCE,
                isolated=cpu_id in isolated,
            )
        )
    return Topology(tuple(cpus), nodes, allowed)


def _read_threads(folder: Path, cpu_id: int) -> CpuSet:
    """`core_cpus_list` is the name since Linux 5.3, `thread_siblings_list` the older one
    (Documentation/admin-guide/cputopology.rst)."""
    own = CpuSet.of([cpu_id])
    return own | (_read_cpus(folder / "core_cpus_list") or _read_cpus(folder / "thread_siblings_list"))


def _efficiency_cpus(sys_root: Path, online: CpuSet) -> CpuSet:
    """Intel's hybrid processors name their efficiency cores in the `cpu_atom` PMU; Arm's have a capacity per
    CPU (Documentation/scheduler/sched-capacity.rst)."""
    if atoms := _read_cpus(sys_root / "devices/cpu_atom/cpus"):
        # A processor of efficiency cores only is not hybrid.
        return atoms if _read_cpus(sys_root / "devices/cpu_core/cpus") else CpuSet()
    capacities = {cpu: _read_int(sys_root / f"devices/system/cpu/cpu{cpu}/cpu_capacity", default=0) for cpu in online}
    bound = max(capacities.values(), default=0) * _EFFICIENCY_CAPACITY_RATIO
    return CpuSet.of(cpu for cpu, capacity in capacities.items() if 0 < capacity < bound)


def _read_numa(folder: Path) -> tuple[tuple[NumaNode, ...], dict[int, int]]:
    nodes: list[NumaNode] = []
    node_of: dict[int, int] = {}
    for path in folder.glob("node[0-9]*"):
        node = int(path.name.removeprefix("node"))
        nodes.append(NumaNode(node, _node_memory_bytes(path / "meminfo")))
        node_of.update(dict.fromkeys(_read_cpus(path / "cpulist"), node))
    return tuple(sorted(nodes, key=lambda node: node.id)), node_of


def _node_memory_bytes(meminfo: Path) -> int:
    match = re.search(r"MemTotal:\s+(\d+) kB", _read_text(meminfo))
    return int(match[1]) * 1024 if match else 0


def _read_text(path: Path) -> str:
    """The file's text; empty where sysfs does not have it or refuses it (containers mask files)."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _read_cpus(path: Path) -> CpuSet:
    try:
        return CpuSet.parse(_read_text(path))
    except ValueError:
        # Linux prints "(null)" in `isolated` on some kernels without isolated CPUs.
        return CpuSet()


def _read_int(path: Path, *, default: int) -> int:
    text = _read_text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else default
