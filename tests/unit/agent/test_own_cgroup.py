"""The agent's own limits, on both versions of cgroups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.agent.machines import GIB, write_tree

from outerproduct_agent.own_cgroup import OwnCgroup

if TYPE_CHECKING:
    from pathlib import Path

V1_UNLIMITED = "9223372036854771712\n"


def read(root: Path, membership: str, files: dict[str, str]) -> OwnCgroup:
    write_tree(root, {"membership": membership, **{f"cg/{name}": text for name, text in files.items()}})
    return OwnCgroup.read(membership=root / "membership", root=root / "cg")


def test_v2_gives_the_lowest_limit_up_the_tree(tmp_path: Path) -> None:
    cgroup = read(
        tmp_path,
        "0::/system.slice/agent.service\n",
        {
            "system.slice/agent.service/memory.max": "max\n",
            "system.slice/agent.service/cpuset.cpus.effective": "0-3\n",
            "system.slice/memory.max": f"{8 * GIB}\n",
        },
    )
    assert cgroup.memory_limit_bytes() == 8 * GIB
    assert str(cgroup.effective_cpus()) == "0-3"


def test_v2_without_limits_limits_nothing(tmp_path: Path) -> None:
    cgroup = read(tmp_path, "0::/a\n", {"a/memory.max": "max\n"})
    assert cgroup.memory_limit_bytes() is None
    assert cgroup.effective_cpus() is None


def test_v1_has_one_tree_per_controller(tmp_path: Path) -> None:
    cgroup = read(
        tmp_path,
        "4:memory:/job/7\n3:cpu,cpuset:/job/8\n1:name=systemd:/x\n0::/y\n",
        {
            "memory/job/7/memory.limit_in_bytes": f"{4 * GIB}\n",
            "memory/job/memory.limit_in_bytes": V1_UNLIMITED,
            "cpuset/job/8/cpuset.effective_cpus": "1\n",
            "cpuset/job/8/cpuset.cpus": "0-1\n",
            "y/memory.max": "1\n",
        },
    )
    assert cgroup.memory_limit_bytes() == 4 * GIB
    assert str(cgroup.effective_cpus()) == "1"


def test_v1_without_a_limit_limits_nothing(tmp_path: Path) -> None:
    cgroup = read(tmp_path, "4:memory:/a\n", {"memory/a/memory.limit_in_bytes": V1_UNLIMITED})
    assert cgroup.memory_limit_bytes() is None


def test_a_container_sees_its_own_cgroup_at_the_root(tmp_path: Path) -> None:
    cgroup = read(tmp_path, "4:memory:/docker/0123\n", {"memory/memory.limit_in_bytes": f"{2 * GIB}\n"})
    assert cgroup.memory_limit_bytes() == 2 * GIB


def test_a_path_outside_the_namespace_is_its_root(tmp_path: Path) -> None:
    cgroup = read(tmp_path, "0::/../../other\n", {"memory.max": f"{GIB}\n"})
    assert cgroup.memory_limit_bytes() == GIB


def test_a_machine_without_cgroups_limits_nothing(tmp_path: Path) -> None:
    cgroup = OwnCgroup.read(membership=tmp_path / "missing", root=tmp_path)
    assert cgroup.memory_limit_bytes() is None
    assert cgroup.effective_cpus() is None
