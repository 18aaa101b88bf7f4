"""The function of hardware.py."""

import os
from pathlib import Path


def look_around(greeting: str) -> dict[str, object]:
    """Reports what the kernel says, from inside the container."""
    limit_files = [
        Path("/sys/fs/cgroup/memory.max"),  # cgroup v2
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # cgroup v1
    ]
    limit = next(path.read_text() for path in limit_files if path.exists())
    shm = os.statvfs("/dev/shm")
    gpus = sorted(name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())
    return {
        "greeting": f"{greeting}, from process {os.getpid()} on {os.uname().nodename}",
        "cpu ids": sorted(os.sched_getaffinity(0)),
        "memory limit": int(limit),
        "/dev/shm": shm.f_blocks * shm.f_frsize,
        "GPUs": gpus or "none",
    }
