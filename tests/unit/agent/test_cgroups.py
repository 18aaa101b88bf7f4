"""The counters of a container, from trees as the kernel shows them on cgroup v1 and v2."""

from __future__ import annotations

from pathlib import Path

import pytest

from outerproduct_agent.cgroups import ContainerCgroup, cgroup_version

MIB = 1024**2


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    write(
        tmp_path,
        {
            "cgroup/cgroup.controllers": "cpu memory\n",
            "cgroup/system.slice/docker-abc.scope/memory.current": f"{90 * MIB}\n",
            "cgroup/system.slice/docker-abc.scope/memory.peak": f"{100 * MIB}\n",
            "cgroup/system.slice/docker-abc.scope/memory.max": f"{128 * MIB}\n",
            "cgroup/system.slice/docker-abc.scope/memory.stat": f"shmem {20 * MIB}\ninactive_file {30 * MIB}\n",
            "cgroup/system.slice/docker-abc.scope/memory.events": "low 0\noom 2\noom_kill 1\n",
            "cgroup/system.slice/docker-abc.scope/cpu.stat": "usage_usec 2500000\n",
            "proc/7/cgroup": "0::/system.slice/docker-abc.scope\n",
        },
    )
    return tmp_path


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    write(
        tmp_path,
        {
            "cgroup/memory/docker/abc/memory.usage_in_bytes": f"{90 * MIB}\n",
            "cgroup/memory/docker/abc/memory.max_usage_in_bytes": f"{100 * MIB}\n",
            "cgroup/memory/docker/abc/memory.limit_in_bytes": f"{128 * MIB}\n",
            "cgroup/memory/docker/abc/memory.stat": f"shmem {20 * MIB}\ntotal_inactive_file {30 * MIB}\n",
            "cgroup/memory/docker/abc/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            "cgroup/cpu,cpuacct/docker/abc/cpuacct.usage": "2500000000\n",
            "proc/7/cgroup": "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
        },
    )
    return tmp_path


@pytest.mark.parametrize("version", [1, 2])
def test_both_versions_say_the_same(version: int, request: pytest.FixtureRequest) -> None:
    root: Path = request.getfixturevalue(f"v{version}")
    assert cgroup_version(root / "cgroup") == version
    cgroup = ContainerCgroup.of_process(7, root=root / "cgroup", proc=root / "proc")
    usage = cgroup.usage()
    assert cgroup.version == version
    assert usage.memory_bytes == 60 * MIB, "page cache that can be dropped is no use"
    assert usage.peak_bytes == 100 * MIB
    assert usage.shm_bytes == 20 * MIB
    assert usage.oom_kills == 1
    assert usage.cpu_seconds == 2.5
    assert cgroup.memory_limit_bytes() == 128 * MIB


def test_a_kernel_without_memory_peak_is_no_error(v2: Path) -> None:
    (v2 / "cgroup/system.slice/docker-abc.scope/memory.peak").unlink()
    cgroup = ContainerCgroup.of_process(7, root=v2 / "cgroup", proc=v2 / "proc")
    assert cgroup.usage().peak_bytes == 0


def test_a_cgroup_that_is_gone_raises_oserror(v2: Path) -> None:
    cgroup = ContainerCgroup.of_process(7, root=v2 / "cgroup", proc=v2 / "proc")
    for path in (v2 / "cgroup/system.slice/docker-abc.scope").iterdir():
        path.unlink()
    with pytest.raises(OSError, match="memory"):
        cgroup.usage()
