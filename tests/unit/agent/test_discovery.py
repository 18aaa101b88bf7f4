"""What the agent finds out about a machine when it starts."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
from tests.unit.agent.machines import GIB, machine, sysfs_files, write_tree

from outerproduct_agent.discovery import discover


def test_this_machine_is_described() -> None:
    found = discover()
    assert found.hostname == socket.gethostname()
    assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert 0 < found.memory_bytes <= psutil.virtual_memory().total
    assert len(found.topology.usable) > 0
    assert found.driver_version == found.gpus.driver_version


def test_the_limit_of_the_agents_own_cgroup_is_its_memory(tmp_path: Path) -> None:
    write_tree(tmp_path / "sys", sysfs_files(machine()))
    write_tree(tmp_path / "sys/fs/cgroup", {"agent/memory.max": f"{GIB}\n"})
    write_tree(tmp_path / "proc", {"self/cgroup": "0::/agent\n"})
    assert discover(sys_root=tmp_path / "sys", proc_root=tmp_path / "proc").memory_bytes == GIB


def test_a_limit_above_what_the_machine_has_adds_nothing(tmp_path: Path) -> None:
    write_tree(tmp_path / "sys/fs/cgroup", {"agent/memory.max": f"{1 << 60}\n"})
    write_tree(tmp_path / "proc", {"self/cgroup": "0::/agent\n"})
    found = discover(sys_root=tmp_path / "sys", proc_root=tmp_path / "proc")
    assert found.memory_bytes == psutil.virtual_memory().total


def test_a_hidden_boot_id_is_empty(tmp_path: Path) -> None:
    assert discover(sys_root=tmp_path, proc_root=tmp_path).boot_id == ""
