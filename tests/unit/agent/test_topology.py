"""Reading processors from sysfs trees, whole ones and those with holes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.agent.machines import GIB, machine, sysfs_files, write_tree

from outerproduct_agent.cpuset import CpuSet
from outerproduct_agent.own_cgroup import OwnCgroup
from outerproduct_agent.topology import CoreKind, Topology, read_topology

NO_CGROUP = OwnCgroup((), ())


def read(root: Path, affinity: str) -> Topology:
    return read_topology(sys_root=root, own_cgroup=NO_CGROUP, affinity=CpuSet.parse(affinity))


@pytest.mark.parametrize(
    "expected",
    [
        machine(),
        machine(nodes=2, cores_per_node=8, threads=2),
        machine(nodes=2, cores_per_node=3, threads=1),
        machine(cores_per_node=2, threads=4),
        machine(cores_per_node=4, efficiency_cores=8),
        machine(isolated=[2, 6]),
    ],
    ids=["one socket", "two sockets", "no SMT", "SMT4", "hybrid", "isolated"],
)
def test_a_machine_is_read_as_it_is(tmp_path: Path, expected: Topology) -> None:
    write_tree(tmp_path, sysfs_files(expected))
    assert read(tmp_path, str(expected.allowed)) == expected


def test_offline_cpus_are_not_there(tmp_path: Path) -> None:
    files = sysfs_files(machine())
    files["devices/system/cpu/online"] = "0-5\n"
    topology = read(write_tree(tmp_path, files), "0-7")
    assert [cpu.id for cpu in topology.cpus] == [0, 1, 2, 3, 4, 5]
    assert str(topology.usable) == "0-5"


def test_isolated_cpus_are_not_usable() -> None:
    assert str(machine(isolated=[2, 6]).usable) == "0-1,3-5,7"


def test_the_agents_affinity_is_respected(tmp_path: Path) -> None:
    topology = read(write_tree(tmp_path, sysfs_files(machine())), "0-1,4-5")
    assert str(topology.usable) == "0-1,4-5"


def test_the_agents_cpuset_cgroup_is_respected(tmp_path: Path) -> None:
    write_tree(tmp_path, {**sysfs_files(machine()), "cg/cpuset.cpus.effective": "0-3\n"})
    topology = read_topology(
        sys_root=tmp_path,
        own_cgroup=OwnCgroup((tmp_path / "cg",), ()),
        affinity=CpuSet.parse("2-7"),
    )
    assert str(topology.usable) == "2-3"


def test_an_empty_sysfs_gives_the_affinity_as_single_cores(tmp_path: Path) -> None:
    topology = read(tmp_path, "0-3")
    assert str(topology.usable) == "0-3"
    assert len(topology.cores) == 4
    assert topology.numa_nodes == ()
    assert topology.nodes_of(topology.usable) == (0,)


def test_older_kernels_name_siblings_differently(tmp_path: Path) -> None:
    files = {name: text for name, text in sysfs_files(machine()).items() if not name.endswith("core_cpus_list")}
    assert read(write_tree(tmp_path, files), "0-7") == machine()


def test_no_numa_in_sysfs_is_one_node_of_unknown_size(tmp_path: Path) -> None:
    files = {name: text for name, text in sysfs_files(machine(nodes=2)).items() if "/node" not in name}
    topology = read(write_tree(tmp_path, files), "0-15")
    assert topology.numa_nodes == ()
    assert {cpu.numa_node for cpu in topology.cpus} == {0}


def test_nodes_without_cpus_are_listed_with_their_memory(tmp_path: Path) -> None:
    files = sysfs_files(machine())
    files["devices/system/node/node2/cpulist"] = "\n"
    files["devices/system/node/node2/meminfo"] = f"Node 2 MemTotal: {96 * GIB // 1024} kB\n"
    topology = read(write_tree(tmp_path, files), "0-7")
    assert [(node.id, node.memory_bytes) for node in topology.numa_nodes] == [(0, 64 * GIB), (2, 96 * GIB)]


def test_files_that_make_no_sense_are_as_if_missing(tmp_path: Path) -> None:
    files = sysfs_files(machine())
    files["devices/system/cpu/isolated"] = "(null)\n"
    files["devices/system/cpu/cpu0/topology/physical_package_id"] = "-1\n"
    assert read(write_tree(tmp_path, files), "0-7") == machine()


@pytest.mark.parametrize(
    ("capacities", "efficiency"),
    [
        ([1024] * 4, []),
        ([718, 718, 1024, 1024], [0, 1]),
        ([1024, 1009, 1017, 1024], []),
        ([0, 0, 0, 0], []),
    ],
    ids=["equal", "big and little", "turbo bins", "not told"],
)
def test_arm_cores_are_told_apart_by_capacity(tmp_path: Path, capacities: list[int], efficiency: list[int]) -> None:
    files = {f"devices/system/cpu/cpu{cpu}/cpu_capacity": f"{value}\n" for cpu, value in enumerate(capacities)}
    topology = read(write_tree(tmp_path, files), "0-3")
    assert [cpu.id for cpu in topology.cpus if cpu.kind is CoreKind.EFFICIENCY] == efficiency


def test_a_processor_of_efficiency_cores_only_is_not_hybrid(tmp_path: Path) -> None:
    topology = read(write_tree(tmp_path, {"devices/cpu_atom/cpus": "0-3\n"}), "0-3")
    assert {cpu.kind for cpu in topology.cpus} == {CoreKind.PERFORMANCE}


def test_this_machine_can_be_read() -> None:
    topology = read_topology()
    assert topology.usable.ids <= os.sched_getaffinity(0)
    assert len(topology.usable) > 0
