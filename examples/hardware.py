"""What a function sees of the hardware it asked for.

Run it against `outerproduct up` (or any scheduler that OUTERPRODUCT_BASE_URL and OUTERPRODUCT_API_KEY name):

    python examples/hardware.py
"""

import os
from pathlib import Path

import outerproduct as op

image = op.Image.from_registry(os.environ.get("OUTERPRODUCT_BASE_IMAGE", "python:3.12-slim"))

CPUS = 1
MEMORY_BYTES = 512 * 1024**2


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


def main() -> None:
    client = op.init()
    print("Nodes:")
    for node in client.list_nodes():
        print(f"  {node}")
    run = client.run(fn=look_around, args=("Hello",), image=image, cpu=CPUS, memory_bytes=MEMORY_BYTES)
    print(f"Run:   {run.name}")
    seen = run.wait()
    print(f"{'':14}{'asked for':>14}   seen inside")
    asked = {"cpu ids": CPUS, "memory limit": MEMORY_BYTES, "/dev/shm": MEMORY_BYTES, "GPUs": 0}
    for name, value in asked.items():
        print(f"{name:14}{value:>14,}   {seen[name]}")
    print(f"{'result':14}{'':>14}   {seen['greeting']}")


if __name__ == "__main__":
    main()
