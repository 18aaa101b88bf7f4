"""Topologies for tests: built directly, or as a sysfs tree for the reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outerproduct_agent.cpuset import CpuSet, format_id_list
from outerproduct_agent.topology import CoreKind, LogicalCpu, NumaNode, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

GIB = 1 << 30


def machine(
    *,
    nodes: int = 1,
    cores_per_node: int = 4,
    threads: int = 2,
    efficiency_cores: int = 0,
    isolated: Sequence[int] = (),
    allowed: str | None = None,
    node_memory_bytes: int = 64 * GIB,
) -> Topology:
    """A regular machine numbered as x86 ones are: first the first hyper-threads of all cores, then the second.

    The last `efficiency_cores` of the machine have one hyper-thread each and follow after all others.
    """
    cores = nodes * cores_per_node
    cpus = [
        LogicalCpu(
            id=thread * cores + core,
            core=core,
            package=core // cores_per_node,
            numa_node=core // cores_per_node,
            isolated=thread * cores + core in isolated,
        )
        for thread in range(threads)
        for core in range(cores)
    ]
    first = len(cpus)
    cpus += [
        LogicalCpu(id=number, core=number, package=0, numa_node=0, kind=CoreKind.EFFICIENCY)
        for number in range(first, first + efficiency_cores)
    ]
    everything = CpuSet.of(cpu.id for cpu in cpus)
    return Topology(
        cpus=tuple(cpus),
        numa_nodes=tuple(NumaNode(node, node_memory_bytes) for node in range(nodes)),
        allowed=everything if allowed is None else CpuSet.parse(allowed),
    )


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write these files below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def sysfs_files(topology: Topology) -> dict[str, str]:
    """What sysfs shows on such a machine."""
    cpu_root = "devices/system/cpu"
    files = {
        f"{cpu_root}/online": f"{CpuSet.of(cpu.id for cpu in topology.cpus)}\n",
        f"{cpu_root}/isolated": f"{CpuSet.of(cpu.id for cpu in topology.cpus if cpu.isolated)}\n",
    }
    for cpu in topology.cpus:
        siblings = CpuSet.of(other.id for other in topology.cpus if other.core == cpu.core)
        folder = f"{cpu_root}/cpu{cpu.id}/topology"
        files[f"{folder}/physical_package_id"] = f"{cpu.package}\n"
        files[f"{folder}/core_cpus_list"] = f"{siblings}\n"
        files[f"{folder}/thread_siblings_list"] = f"{siblings}\n"
    for node in topology.numa_nodes:
        members = format_id_list(cpu.id for cpu in topology.cpus if cpu.numa_node == node.id)
        folder = f"devices/system/node/node{node.id}"
        files[f"{folder}/cpulist"] = f"{members}\n"
        files[f"{folder}/meminfo"] = f"Node {node.id} MemTotal:       {node.memory_bytes // 1024} kB\n"
    kinds = {kind: CpuSet.of(cpu.id for cpu in topology.cpus if cpu.kind is kind) for kind in CoreKind}
    if kinds[CoreKind.EFFICIENCY]:
        files["devices/cpu_core/cpus"] = f"{kinds[CoreKind.PERFORMANCE]}\n"
        files["devices/cpu_atom/cpus"] = f"{kinds[CoreKind.EFFICIENCY]}\n"
    return files
