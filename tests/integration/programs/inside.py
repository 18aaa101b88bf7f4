"""What a function can see from inside its container. Imported there by name; standard library only.

The module says `import outerproduct` and defines an Image at its top, as users' modules do.
"""

from __future__ import annotations

import asyncio
import os
import time

import outerproduct as op

IMAGE = op.Image.from_registry("outerproduct-base:latest")
MIB = 1024**2


def _first(*paths: str) -> str:
    for path in paths:
        if os.path.exists(path):
            with open(path) as file:
                return file.read().strip()
    raise FileNotFoundError(paths[0])


def look() -> dict[str, object]:
    """The limits as the kernel tells them."""
    shm = os.statvfs("/dev/shm")
    v2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
    if v2:
        swap = _first("/sys/fs/cgroup/memory.swap.max")
        swap_extra = 0 if swap == "0" else swap
    else:
        with_swap = "/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes"
        limit = int(_first("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
        # Without swap accounting in the kernel the file is missing, and Docker has warned.
        swap_extra = int(_first(with_swap)) - limit if os.path.exists(with_swap) else 0
    return {
        "affinity": sorted(os.sched_getaffinity(0)),
        "memory_limit": int(_first("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")),
        "swap_extra": swap_extra,
        "shm_bytes": shm.f_blocks * shm.f_frsize,
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "visible_devices": os.environ.get("NVIDIA_VISIBLE_DEVICES"),
        "gpu_nodes": sorted(name for name in os.listdir("/dev") if name.startswith("nvidia")),
        "pid1": open("/proc/1/comm").read().strip(),
        "capabilities": next(line.split()[1] for line in open("/proc/self/status") if line.startswith("CapBnd")),
        "no_new_privileges": next(
            line.split()[1] for line in open("/proc/self/status") if line.startswith("NoNewPrivs")
        ),
    }


def look_and_hold(seconds: float) -> tuple[list[int], float, float]:
    """The CPU ids, and when the function ran, so that two at once can be told."""
    began = time.time()
    time.sleep(seconds)
    return sorted(os.sched_getaffinity(0)), began, time.time()


def add(a: int, b: int) -> int:
    return a + b


def fill_memory(mib: int) -> int:
    """Touches every page."""
    return len(bytearray(os.urandom(1)) * (mib * MIB))


def fill_shm(mib: int) -> int:
    with open("/dev/shm/filler", "wb") as file:
        file.writelines(b"x" * MIB for _ in range(mib))
    return mib


def fill_memory_in_child(mib: int) -> str:
    """The child is killed; the parent does not notice."""
    pid = os.fork()
    if pid == 0:
        fill_memory(mib)
        os._exit(0)
    os.waitpid(pid, 0)
    return "went on"


class NeedsTwo(Exception):
    """Can not be rebuilt by pickle: its __init__ takes two arguments and hands on one."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a)
        self.b = b


def fail(kind: str) -> None:
    if kind == "value":
        raise ValueError("the value was wrong")
    if kind == "two":
        raise NeedsTwo("left", "right")
    if kind == "exit":
        os._exit(7)
    os.kill(os.getpid(), 9)


def unpicklable() -> object:
    return (lambda: 1 for _ in range(1))


def with_client(client: op.OuterProductClient, n: int) -> tuple[str | None, int]:
    return client.call_id, n


async def nap(n: int) -> int:

    await asyncio.sleep(0)
    return n * 2


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def sleep_until_interrupted(path: str) -> None:
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print(f"interrupted, saving {path}", flush=True)
        raise


def tree(client: op.OuterProductClient, depth: int) -> int:
    """A tree of child Calls: each waits for its own."""
    if depth == 0:
        return 1
    call = client.run(fn=tree, args=(depth - 1,), image=IMAGE, memory_bytes=128 * MIB)
    return 1 + call.wait()


def echo(data: bytes) -> bytes:
    return data


def talk(lines: int) -> None:
    for number in range(lines):
        print(f"line {number}")
    os._exit(3)


def count_slowly(lines: int) -> int:
    for number in range(lines):
        print(f"line {number}", flush=True)
        time.sleep(0.1)
    return lines
