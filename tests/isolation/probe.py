"""What is tried from inside a container, and what came of it: facts only, judged in `properties`.

Standard library only. `look` runs as a Call's function, and, started as a script with the same arguments in JSON, in a
container that a test made itself. An attempt that failed is told by the name of its error, one that worked as "done".
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

NEIGHBOUR_PORT = 7000
NEIGHBOUR_SECRET = "the neighbour's secret"
SHM_KEY = 0x6F70
CONNECT_SECONDS = 0.5
LEFT_BEHIND_SECONDS = 10.0

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNS = 0x00020000
_PTRACE_ATTACH = 16
_IPC_CREAT = 0o1000
_LIBC = ctypes.CDLL(None, use_errno=True)
_X86_64 = {"add_key": 248, "bpf": 321, "perf_event_open": 298, "kexec_load": 246, "open_by_handle_at": 304,
           "init_module": 175, "iopl": 172}  # fmt: skip
_AARCH64 = {"add_key": 217, "bpf": 280, "perf_event_open": 241, "kexec_load": 104, "open_by_handle_at": 265,
            "init_module": 105}  # fmt: skip
# On cgroup v1 the folder above is a private tmpfs that only holds the mounts.
_OWN_CGROUP = "/sys/fs/cgroup/pids" if os.path.exists("/sys/fs/cgroup/pids") else "/sys/fs/cgroup"
SYSTEM_CALLS = _X86_64 if os.uname().machine == "x86_64" else _AARCH64


def tried(attempt: Callable[[], object]) -> str:
    """ "done", or the name of the error."""
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    except ValueError as error:  # setrlimit's way to say EPERM
        return f"refused: {error}"
    return "done"


def tried_apart(attempt: Callable[[], object]) -> str:
    """The same in a process of its own, since what works would change the rest of the look."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, tried(attempt).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said or "died"


def look(targets: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """Everything, by name. `targets`: what to connect to."""
    return {
        "affinity": sorted(os.sched_getaffinity(0)),
        "affinity_after_widening": _widened_affinity(),
        "affinity_of_child": _of_child("import os; print(sorted(os.sched_getaffinity(0)))"),
        "affinity_of_thread": _of_thread(lambda: sorted(os.sched_getaffinity(0))),
        "cgroup": _cgroup(),
        "shm_bytes": _size("/dev/shm"),
        "status": dict(_status()),
        "mounts": _mounts(),
        "writes": {path: tried(lambda path=path: _write(path)) for path in WRITES},  # type: ignore[misc]
        "reads": {path: _readable(path) for path in READS},
        "unmasked": [path for path in MASKED if os.path.exists(path) and not os.path.ismount(path)],
        "processes": {pid: name for pid in _pids() if (name := _program_of(pid))},
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
        "calls": {name: tried_apart(attempt) for name, attempt in _attempts().items()},
        "connects": _connects(targets),
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "abstract_sockets": [line.split()[-1] for line in open("/proc/net/unix") if "@" in line],
        "env": dict(os.environ),
        "dev": sorted(os.listdir("/dev")),
        "block_devices_opened": _block_devices_opened(),
        "run_folder": sorted(os.listdir("/run/outerproduct")),
        "tmp": sorted(os.listdir("/tmp")),
        "shm": sorted(os.listdir("/dev/shm")),
        "docker_sockets": [path for path in DOCKER_SOCKETS if os.path.exists(path)],
        "limits": {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in LIMITS},
        "host_name": socket.gethostname(),
        "zombies": _zombies_left(),
    }


WRITES = (
    "/run/outerproduct/x",
    "/run/outerproduct/lib/x",
    "/run/outerproduct/source/x",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/vm/drop_caches",
    "/proc/sysrq-trigger",
    "/proc/irq/default_smp_affinity",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/cpuset/cpuset.cpus",
    "/tmp/x",
)
MASKED = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/proc/acpi", "/sys/firmware")
READS = (*MASKED, "/dev/kmsg")
DOCKER_SOCKETS = (
    "/var/run/docker.sock",
    "/run/docker.sock",
    "/run/containerd/containerd.sock",
    "/var/run/docker/containerd/containerd.sock",
)
LIMITS = ("CORE", "NOFILE", "MEMLOCK")


def _attempts() -> dict[str, Callable[[], object]]:
    """Things that only an administrator of the machine may do."""
    first_of_disk = os.makedev(259, 0)
    return {
        "make_cgroup": lambda: os.mkdir(_OWN_CGROUP + "/x"),
        "mount": lambda: _libc("mount", b"none", b"/mnt", b"tmpfs", 0, None),
        "unshare_user": lambda: _libc("unshare", _CLONE_NEWUSER),
        "unshare_mount": lambda: _libc("unshare", _CLONE_NEWNS),
        "setns_of_init": lambda: _setns("/proc/1/ns/mnt"),
        "mknod": lambda: os.mknod("/tmp/disk", 0o60600, first_of_disk),
        "mknod_in_dev": lambda: os.mknod("/dev/mem", 0o20600, os.makedev(1, 1)),
        "chroot": lambda: os.chroot("/tmp"),
        "raw_socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close(),
        "packet_socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close(),
        "add_route": _add_route,
        "set_host_name": lambda: socket.sethostname("elsewhere"),
        # ADJ_TICK to an impossible value: without the capability EPERM, with it EINVAL and no harm to the host.
        "set_clock": lambda: _libc("adjtimex", struct.pack("=I", 0x4000) + bytes(252)),
        "read_kernel_log": lambda: _libc("klogctl", 10, None, 0),
        "reboot": lambda: _libc("reboot", 0),
        "swapon": lambda: _libc("swapon", b"/tmp/none", 0),
        "raise_priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, -10),
        "real_time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        "lower_oom_score": lambda: Path("/proc/self/oom_score_adj").write_text("-1000"),
        "raise_nofile": lambda: _raise_limit(resource.RLIMIT_NOFILE),
        "raise_core": lambda: resource.setrlimit(resource.RLIMIT_CORE, (1, 1)),
        "trace_beyond": lambda: _libc("ptrace", _PTRACE_ATTACH, _pid_beyond(), None, None),
        "kill_beyond": lambda: os.kill(_pid_beyond(), 0),
        "shared_memory_of_neighbour": lambda: _libc("shmget", SHM_KEY, 0, 0),
        "abstract_socket_of_neighbour": lambda: _connect_unix("\0outerproduct-neighbour"),
        **{f"syscall_{name}": lambda number=number: _system_call(number) for name, number in SYSTEM_CALLS.items()},  # type: ignore[misc]
    }


def _libc(name: str, *arguments: object) -> int:
    result: int = getattr(_LIBC, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def _system_call(number: int) -> None:
    # Six zeros: allowed, it fails for its arguments (EINVAL, EFAULT, EBADF) or works; forbidden, with EPERM.
    if _LIBC.syscall(number, 0, 0, 0, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), str(number))


def _setns(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _libc("setns", descriptor, 0)
    finally:
        os.close(descriptor)


def _add_route() -> None:
    # SIOCADDRT with an empty request: the kernel checks the capability first.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x890B, bytes(120))


def _raise_limit(kind: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (hard + 1, hard + 1))


def _pid_beyond() -> int:
    """Where the host's processes are seen, that is the kernel's own second one; else nobody."""
    comm = Path("/proc/2/comm")
    return 2 if comm.exists() and comm.read_text() == "kthreadd\n" else 99_999


def _widened_affinity() -> list[int]:
    tried(lambda: os.sched_setaffinity(0, range(os.cpu_count() or 1)))
    return sorted(os.sched_getaffinity(0))


def _of_child(program: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    found: list[int] = json.loads(done.stdout)
    return found


def _of_thread(function: Callable[[], list[int]]) -> list[int]:
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def _cgroup() -> dict[str, str]:
    """Limits by their cgroup v2 names."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        names = {name: root / name for name in ("memory.max", "memory.swap.max", "pids.max")}
        return {name: path.read_text().strip() for name, path in names.items()}
    memory = (root / "memory/memory.limit_in_bytes").read_text().strip()
    with_swap = root / "memory/memory.memsw.limit_in_bytes"
    swap = int(with_swap.read_text()) - int(memory) if with_swap.exists() else 0
    pids = (root / "pids/pids.max").read_text().strip()
    return {"memory.max": memory, "memory.swap.max": str(swap), "pids.max": pids}


def _size(path: str) -> int:
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def _status() -> list[tuple[str, str]]:
    pairs = [line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()]
    return [(name, value.strip()) for name, value in pairs]


def _mounts() -> list[dict[str, str]]:
    """Fields of /proc/self/mountinfo (proc_pid_mountinfo(5))."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        _, _, _, root, target, options, *_ = left.split()
        kind, source, *_ = right.split()
        found.append({"root": root, "target": target, "options": options, "type": kind, "source": source})
    return found


def _write(path: str) -> None:
    # Without truncation: where it works it must do no harm.
    os.close(os.open(path, os.O_WRONLY | (os.O_CREAT if path.endswith("/x") else 0), 0o600))


def _readable(path: str) -> int:
    """Bytes, or entries of a folder, that can be read of it."""
    try:
        if os.path.isdir(path):
            return len(os.listdir(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return len(os.read(descriptor, 64))
        finally:
            os.close(descriptor)
    except OSError:
        return 0


def _program_of(pid: str) -> str:
    """Empty for a process that has ended since it was listed."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and os.path.exists(f"/proc/{name}/comm")]


def _connects(targets: dict[str, tuple[str, int]]) -> dict[str, str]:
    """All at once: what is dropped silently takes as long as one is ready to wait."""

    with ThreadPoolExecutor(len(targets)) as threads:
        answers = {name: threads.submit(tried, partial(reach, target)) for name, target in targets.items()}
        return {name: answer.result() for name, answer in answers.items()}


def reach(target: tuple[str, int]) -> None:
    """Connects and hangs up."""
    host, port = target
    socket.create_connection((host, port), CONNECT_SECONDS).close()


def _connect_unix(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)


def _block_devices_opened() -> list[str]:
    opened = []
    for folder, _, names in os.walk("/dev"):
        for name in names:
            path = os.path.join(folder, name)
            if (os.lstat(path).st_mode & 0o170000) == 0o060000 and tried(lambda p=path: _write(p)) == "done":  # type: ignore[misc]
                opened.append(path)
    return opened


def _zombies_left() -> int:
    """Orphans of a process that has ended, which only the first process of the container can reap."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        for _ in range(3):
            if os.fork() == 0:
                os._exit(0)
        os._exit(0)
    os.waitpid(parent, 0)
    os.close(reader)
    os.close(writer)
    deadline = time.monotonic() + LEFT_BEHIND_SECONDS
    while (left := _count_zombies()) and os.path.exists("/sbin/docker-init") and time.monotonic() < deadline:
        os.sched_yield()
    return left


def _count_zombies() -> int:
    count = 0
    for pid in _pids():
        try:
            count += Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue  # It was reaped meanwhile.
    return count


def be_neighbour() -> None:
    """Leaves one of everything where another Call might find it, and listens until it is ended."""
    for folder in ("/tmp", "/dev/shm"):
        Path(folder, "neighbour").write_text(NEIGHBOUR_SECRET)
    _libc("shmget", SHM_KEY, 4096, _IPC_CREAT | 0o666)
    os.environ["NEIGHBOUR_SECRET"] = NEIGHBOUR_SECRET
    with socket.socket(socket.AF_UNIX) as here, socket.create_server(("0.0.0.0", NEIGHBOUR_PORT)) as server:
        here.bind("\0outerproduct-neighbour")
        here.listen()
        print("ready", flush=True)
        while True:
            server.accept()[0].close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(look(json.loads(sys.argv[1]))))
    else:
        be_neighbour()
