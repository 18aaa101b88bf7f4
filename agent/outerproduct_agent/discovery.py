"""What this machine is and has, gathered once when the agent starts.

Thin: it only calls the readers. GPUs are read again and again while the agent runs, through `gpu_health.py`.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from outerproduct_agent.gpus import ALL_GPUS, GpuInventory, GpuOffer, read_gpus
from outerproduct_agent.own_cgroup import OwnCgroup
from outerproduct_agent.topology import Topology, read_topology


@dataclass(frozen=True)
class MachineInventory:
    """A machine.

    Attributes:
        hostname: of the host.
        boot_id: the kernel's; another one means that the machine was booted since. Empty where it is hidden.
        topology: its processors.
        memory_bytes: its RAM, or the limit of the agent's own cgroup where that is lower.
        gpus: the first reading of its GPUs.
    """

    hostname: str
    boot_id: str
    topology: Topology
    memory_bytes: int
    gpus: GpuInventory

    @property
    def driver_version(self) -> str:
        """Version of NVIDIA's driver; empty without one."""
        return self.gpus.driver_version


def discover(
    *, offer: GpuOffer = ALL_GPUS, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")
) -> MachineInventory:
    """Look at this machine. Blocks while NVML opens the GPUs.

    Args:
        offer: GPUs that the operator lets the agent offer, by default all.
        sys_root: where sysfs is mounted, cgroups below it.
        proc_root: where procfs is mounted.
    """
    own_cgroup = OwnCgroup.read(membership=proc_root / "self/cgroup", root=sys_root / "fs/cgroup")
    limit_bytes = own_cgroup.memory_limit_bytes()
    memory_bytes = psutil.virtual_memory().total
    return MachineInventory(
        hostname=socket.gethostname(),
        boot_id=_boot_id(proc_root / "sys/kernel/random/boot_id"),
        topology=read_topology(sys_root=sys_root, own_cgroup=own_cgroup),
        memory_bytes=memory_bytes if limit_bytes is None else min(memory_bytes, limit_bytes),
        gpus=read_gpus(offer=offer, sys_root=sys_root),
    )


def _boot_id(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
