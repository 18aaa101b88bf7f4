"""From a Call and its Allocation to the exact request that Docker gets: a pure function, so that every rule of
isolation is one line here, tested without Docker and then proved with it.

The result is the body of POST /containers/create (https://docs.docker.com/reference/api/engine/). All limits are set
here, at creation: a container that runs a Call is never updated, since `docker update` can strip its GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outerproduct_agent.cpuset import format_id_list
from outerproduct_agent.ledger import Allocation

ATTEMPT_LABEL = "outerproduct.attempt"
NODE_LABEL = "outerproduct.node"
AGENT_LABEL = "outerproduct.agent"
"""Which agent's data folder knows the container: two agents on one engine leave each other's alone."""
ALLOCATION_LABEL = "outerproduct.allocation"

RUN_FOLDER = "/run/outerproduct"
LIBRARY_FOLDER = f"{RUN_FOLDER}/lib"
SOCKET_PATH = f"{RUN_FOLDER}/agent.sock"
RUNNER_PATH = f"{LIBRARY_FOLDER}/outerproduct_runner"

PIDS_LIMIT = 4096
"""Threads count too: room for data loaders on a large machine, and a fork bomb ends its own Call only."""
NOFILE_LIMIT = 1_048_576
"""Data loaders that share tensors by file descriptor run out of the usual 1,024."""
LOG_MAX_SIZE = "32m"
LOG_MAX_FILES = "2"
"""Docker's own copy of the output; the agent reads it as it comes, so this only bounds the disk."""

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""What pip, package scripts and ordinary programs of root use inside. Not NET_RAW, MKNOD, SYS_CHROOT, SETFCAP, ..."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "PYTHON_CPU_COUNT",
)
"""Libraries that size their pools from the host's CPUs get what the Call has. The user's own values win."""

GPU_CAPABILITIES = ["gpu", "compute", "utility"]
RESERVED_ENV = frozenset(
    {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
)
"""Say which GPUs are seen: a user's value is dropped."""


@dataclass(frozen=True)
class Mount:
    """A host path that is seen in the container, read-only."""

    host_path: str
    container_path: str


@dataclass(frozen=True)
class ContainerSettings:
    """What is the same for all containers of an agent."""

    node: str
    agent_id: str
    network: str
    cgroup_v2: bool
    cdi: bool = False
    """GPUs by CDI device name instead of a device request."""
    storage_limit_bytes: int = 0
    """Writable layer, where the storage driver can bound it; 0: it can not."""
    nofile_limit: int = NOFILE_LIMIT
    memlock_limit: int = -1
    """Bytes that may be pinned; -1: no limit of its own."""


@dataclass(frozen=True)
class ContainerRequest:
    """What differs."""

    attempt: str
    image: str
    python: str
    """Interpreter in the image."""
    cpus: int
    allocation: Allocation
    run_folder: str
    """Host folder with the socket."""
    library_folder: str
    """Host folder with the runner."""
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Names of variables that the user sets; values travel over the socket and are not read here."""


def container_spec(request: ContainerRequest, settings: ContainerSettings) -> dict[str, Any]:
    """The body of the create request."""
    return {
        "Image": request.image,
        "Entrypoint": [request.python, "-I", RUNNER_PATH],
        "Cmd": [],
        "Env": _environment(request),
        "Hostname": host_name(request.attempt),
        "Labels": {
            ATTEMPT_LABEL: request.attempt,
            NODE_LABEL: settings.node,
            AGENT_LABEL: settings.agent_id,
            ALLOCATION_LABEL: json.dumps(request.allocation.to_json()),
        },
        "StopSignal": "SIGTERM",
        "Tty": False,
        "OpenStdin": False,
        "HostConfig": _host_config(request, settings),
    }


def _host_config(request: ContainerRequest, settings: ContainerSettings) -> dict[str, Any]:
    allocation = request.allocation
    config: dict[str, Any] = {
        # CPUs: exactly these, given to nobody else.
        "CpusetCpus": str(allocation.cpus),
        "CpusetMems": format_id_list(allocation.numa_nodes) if allocation.numa_nodes else "",
        # Memory: a hard limit, and as much for memory and swap together, which leaves no swap.
        "Memory": allocation.memory_bytes,
        "MemorySwap": allocation.memory_bytes,
        "OomKillDisable": False,
        # Pages in /dev/shm are charged to the same cgroup, so its size is no second allowance.
        "ShmSize": allocation.memory_bytes,
        "IpcMode": "private",
        # Processes: an init that reaps, and a bound.
        "Init": True,
        "PidsLimit": PIDS_LIMIT,
        "Ulimits": [
            {"Name": "nofile", "Soft": settings.nofile_limit, "Hard": settings.nofile_limit},
            # NCCL and RDMA pin memory; it is charged to the cgroup all the same.
            {"Name": "memlock", "Soft": settings.memlock_limit, "Hard": settings.memlock_limit},
            {"Name": "core", "Soft": 0, "Hard": 0},
        ],
        # Privileges.
        "Privileged": False,
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES),
        "SecurityOpt": ["no-new-privileges"],
        "NetworkMode": settings.network,
        "Mounts": [_bind(mount) for mount in _all_mounts(request)],
        "LogConfig": {"Type": "local", "Config": {"max-size": LOG_MAX_SIZE, "max-file": LOG_MAX_FILES}},
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
    }
    if settings.cgroup_v2:
        config["CgroupnsMode"] = "private"
    if settings.storage_limit_bytes:
        config["StorageOpt"] = {"size": str(settings.storage_limit_bytes)}
    _add_gpus(config, allocation.gpu_uuids, settings)
    return config


def _add_gpus(config: dict[str, Any], uuids: tuple[str, ...], settings: ContainerSettings) -> None:
    """One mechanism, and identities only: counts and indices mean other devices after a reboot."""
    if not uuids:
        # CUDA images set NVIDIA_VISIBLE_DEVICES=all; where NVIDIA's runtime is Docker's default, it would obey.
        config["Runtime"] = "runc"
    elif settings.cdi:
        names = [f"nvidia.com/gpu={uuid}" for uuid in uuids]
        config["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": names}]
    else:
        config["DeviceRequests"] = [{"Driver": "nvidia", "DeviceIDs": list(uuids), "Capabilities": [GPU_CAPABILITIES]}]


def _environment(request: ContainerRequest) -> list[str]:
    gpus = request.allocation.gpu_uuids
    values = {
        **{name: str(request.cpus) for name in THREAD_VARIABLES if name not in request.env},
        "PYTHONUNBUFFERED": "1",
        "OUTERPRODUCT_SOCKET": SOCKET_PATH,
        "OUTERPRODUCT_ATTEMPT": request.attempt,
        "NVIDIA_VISIBLE_DEVICES": ",".join(gpus) if gpus else "void",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if gpus:
        values["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"
    # An image's own CUDA_VISIBLE_DEVICES names indices of another machine: without a value Docker takes it away.
    return [f"{name}={value}" for name, value in sorted(values.items())] + ["CUDA_VISIBLE_DEVICES"]


def _all_mounts(request: ContainerRequest) -> tuple[Mount, ...]:
    return (
        Mount(request.run_folder, RUN_FOLDER),
        Mount(request.library_folder, LIBRARY_FOLDER),
        *request.mounts,
    )


def _bind(mount: Mount) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": mount.host_path,
        "Target": mount.container_path,
        "ReadOnly": True,
        "BindOptions": {"Propagation": "rprivate"},
    }


def host_name(attempt: str) -> str:
    """Short and speaking: "<first digits of the Run>-<Call>-<Attempt>"."""
    parts = attempt.split("/")
    return f"{parts[1][:8]}-{parts[3].replace('.', '-')[-40:]}-{parts[5]}"
