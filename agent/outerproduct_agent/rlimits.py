"""Resource limits (ulimits) that containers can be given on this machine.

Raising a hard limit takes CAP_SYS_RESOURCE, which root has, except where the machine is itself confined (a container, a
restricted virtual machine): there Docker would refuse to start anything that asks for more than it has itself.
"""

from __future__ import annotations

import resource
from pathlib import Path

_CAP_SYS_RESOURCE = 24
UNLIMITED = -1


def grantable(kind: int, wanted: int, *, proc: Path = Path("/proc")) -> int:
    """`wanted` (-1: unlimited), or as much of it as this machine's containers can have."""
    if kind == resource.RLIMIT_NOFILE:
        wanted = min(wanted, int((proc / "sys/fs/nr_open").read_text()))
    if _may_raise(proc):
        return wanted
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY:
        return wanted
    return hard if wanted == UNLIMITED else min(wanted, hard)


def _may_raise(proc: Path) -> bool:
    for line in (proc / "self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)
    return False
