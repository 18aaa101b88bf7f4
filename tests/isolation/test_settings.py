"""Every setting of the container matters: with any one taken away, at least one property no longer holds.

The containers are made straight from `container_spec`'s body, with the same neighbours and the same things to reach as
a Call has. A mutation names the properties that must notice it.
"""

from __future__ import annotations

import asyncio
import copy
import os
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import docker
import pytest

from outerproduct_agent.cgroups import cgroup_version
from outerproduct_agent.container_spec import NOFILE_LIMIT
from outerproduct_agent.engine import Engine
from outerproduct_agent.network import DNS_PORT
from outerproduct_agent.rlimits import grantable
from tests.isolation import probe
from tests.isolation.machine import (
    METADATA_ADDRESS,
    METADATA_PORT,
    DirectContainers,
    address_of,
    gateway_of,
    started,
    wait_until_ready,
)
from tests.isolation.properties import PROPERTIES, Look

pytestmark = pytest.mark.docker

Body = dict[str, Any]
CGROUP_V2 = cgroup_version() == 2
CPUS = sorted(os.sched_getaffinity(0))


def host(**values: object) -> Callable[[Body], None]:
    """Sets entries of HostConfig."""
    return lambda body: body["HostConfig"].update(values)


def without_ulimit(name: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        limits = body["HostConfig"]["Ulimits"]
        body["HostConfig"]["Ulimits"] = [one for one in limits if one["Name"] != name]

    return change


def with_env(*entries: str, without: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        body["Env"] = [one for one in body["Env"] if one.partition("=")[0] != without] + list(entries)

    return change


def writable(target: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        [mount] = [mount for mount in body["HostConfig"]["Mounts"] if mount["Target"] == target]
        mount["ReadOnly"] = False

    return change


def with_default_propagation(body: Body) -> None:
    for mount in body["HostConfig"]["Mounts"]:
        del mount["BindOptions"]


def bind(source: str, target: str) -> Callable[[Body], None]:
    return lambda body: body["HostConfig"].update(Binds=[f"{source}:{target}:ro"])


@dataclass(frozen=True)
class Mutation:
    """A setting taken away, and who must notice."""

    change: Callable[[Body], object]
    noticed_by: tuple[str, ...]


def capability_mutations() -> dict[str, Mutation]:
    names = (
        "NET_RAW",
        "NET_ADMIN",
        "MKNOD",
        "SYS_ADMIN",
        "SYS_CHROOT",
        "SYS_PTRACE",
        "SYS_TIME",
        "SYS_NICE",
        "SETFCAP",
    )

    def adding(name: str) -> Callable[[Body], None]:
        return lambda body: body["HostConfig"]["CapAdd"].append(name)

    return {f"CapAdd {name}": Mutation(adding(name), (f"lacks_capability_{name.lower()}",)) for name in names}


ALL_SETTINGS = "none missing"
PRIVILEGED = "Privileged"

MUTATIONS = {
    "CpusetCpus": Mutation(host(CpusetCpus=""), ("sees_exactly_its_cpus",)),
    "Memory": Mutation(host(Memory=0, MemorySwap=0), ("memory_is_limited_to_what_it_asked_for",)),
    "MemorySwap": Mutation(host(MemorySwap=-1), ("has_no_swap",)),
    "ShmSize": Mutation(host(ShmSize=0), ("shm_is_as_large_as_its_memory",)),
    "IpcMode": Mutation(host(IpcMode="host"), ("has_a_ipc_namespace_of_its_own",)),
    "PidMode": Mutation(host(PidMode="host"), ("has_a_pid_namespace_of_its_own", "sees_no_processes_but_its_own")),
    "UTSMode": Mutation(
        lambda body: (body.pop("Hostname"), body["HostConfig"].update(UTSMode="host")),
        ("has_a_uts_namespace_of_its_own", "host_name_is_its_attempts"),
    ),
    "Init": Mutation(host(Init=False), ("an_init_is_the_first_process", "zombies_are_reaped")),
    "PidsLimit": Mutation(host(PidsLimit=0), ("processes_are_limited",)),
    "Ulimits nofile": Mutation(without_ulimit("nofile"), ("may_open_as_many_files_as_the_machine_grants",)),
    "Ulimits memlock": Mutation(without_ulimit("memlock"), ("may_lock_memory_for_gpu_transfers",)),
    "Ulimits core": Mutation(without_ulimit("core"), ("writes_no_core_dumps", "cannot_switch_core_dumps_on")),
    PRIVILEGED: Mutation(
        host(Privileged=True, CapDrop=[], SecurityOpt=[]),
        ("dev_holds_the_standard_devices_only", "system_calls_are_filtered", "kernel_settings_are_read_only"),
    ),
    "CapDrop": Mutation(host(CapDrop=[]), ("lacks_capability_net_raw", "cannot_make_raw_sockets")),
    **capability_mutations(),
    "no-new-privileges": Mutation(host(SecurityOpt=[]), ("gains_no_privileges_by_programs",)),
    "seccomp": Mutation(
        host(SecurityOpt=["no-new-privileges", "seccomp=unconfined"]),
        ("system_calls_are_filtered", "cannot_make_a_user_namespace"),
    ),
    "MaskedPaths": Mutation(host(MaskedPaths=[]), ("the_kernels_keys_timers_and_firmware_are_masked",)),
    "ReadonlyPaths": Mutation(host(ReadonlyPaths=[]), ("kernel_settings_are_read_only",)),
    "NetworkMode": Mutation(host(NetworkMode="host"), ("has_a_network_of_its_own", "cannot_reach_the_hosts_loopback")),
    "ReadOnly socket folder": Mutation(writable("/run/outerproduct"), ("its_socket_folder_is_read_only",)),
    "ReadOnly library": Mutation(writable("/run/outerproduct/lib"), ("its_library_is_read_only",)),
    "Propagation": Mutation(with_default_propagation, ("mounts_do_not_propagate",)),
    "Mounts: Docker's socket": Mutation(bind("/var/run/docker.sock", "/run/docker.sock"), ("sees_no_docker_socket",)),
    "Mounts: a host folder": Mutation(bind("/etc", "/mnt"), ("sees_no_folders_of_the_host_but_its_own",)),
    "Mounts: the host's cgroups": Mutation(bind("/sys/fs/cgroup", "/mnt"), ("sees_no_cgroups_but_its_own",)),
    "Devices": Mutation(
        host(Devices=[{"PathOnHost": "/dev/kmsg", "PathInContainer": "/dev/kmsg", "CgroupPermissions": "r"}]),
        ("dev_holds_the_standard_devices_only",),
    ),
    "LogConfig": Mutation(
        host(LogConfig={"Type": "json-file", "Config": {}}), ("dockers_copy_of_its_output_is_bounded",)
    ),
    "RestartPolicy": Mutation(
        host(RestartPolicy={"Name": "on-failure", "MaximumRetryCount": 1}), ("is_not_started_again_by_docker",)
    ),
    "Hostname": Mutation(lambda body: body.pop("Hostname"), ("host_name_is_its_attempts",)),
    "Env NVIDIA_VISIBLE_DEVICES": Mutation(
        with_env(without="NVIDIA_VISIBLE_DEVICES"), ("without_gpus_none_is_visible_whatever_the_image_says",)
    ),
    "Env CUDA_VISIBLE_DEVICES": Mutation(
        with_env(without="CUDA_VISIBLE_DEVICES"), ("gpu_indices_of_the_image_are_dropped",)
    ),
    "Env CUDA_DEVICE_ORDER": Mutation(with_env(without="CUDA_DEVICE_ORDER"), ("gpus_are_ordered_by_bus",)),
    "Env OMP_NUM_THREADS": Mutation(with_env(without="OMP_NUM_THREADS"), ("thread_pools_are_sized_for_its_cpus",)),
    "Env DOCKER_HOST": Mutation(
        with_env("DOCKER_HOST=unix:///run/docker.sock", without=""), ("environment_names_nothing_of_the_host",)
    ),
}

if CGROUP_V2:
    MUTATIONS["CgroupnsMode"] = Mutation(host(CgroupnsMode="host"), ("sees_no_cgroups_but_its_own",))


@pytest.fixture(scope="module")
def network() -> Iterator[str]:
    """Made as the agent makes its own."""
    name = f"outerproduct-isolation-{os.getpid()}"
    engine = Engine(None)
    asyncio.run(engine.ensure_network(name))
    try:
        yield name
    finally:
        asyncio.run(engine.remove_network(name))
        engine.close()


@pytest.fixture(scope="module")
def plain_network() -> Iterator[str]:
    """As Docker makes them by itself."""
    client = docker.from_env()
    made = client.networks.create(f"outerproduct-plain-{os.getpid()}", driver="bridge")
    try:
        yield str(made.name)
    finally:
        made.remove()
        client.close()


@pytest.fixture(scope="module")
def listener() -> Iterator[int]:
    """The port of a server on the host's loopback interface, in the scheduler's place."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@dataclass(frozen=True)
class Around:
    """What there is to reach."""

    network: str
    plain_network: str
    loopback_port: int


@pytest.fixture(scope="module")
def around(network: str, plain_network: str, listener: int, metadata: None) -> Around:
    return Around(network, plain_network, listener)


@pytest.fixture(scope="module")
def containers(
    around: Around, hostile_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DirectContainers]:
    gateway = gateway_of(around.network)
    direct = DirectContainers(
        image=hostile_image,
        network=around.network,
        targets={},
        folder=tmp_path_factory.mktemp("direct"),
        # Other than what the daemon would give by itself, so that a missing setting shows.
        nofile=grantable(resource.RLIMIT_NOFILE, NOFILE_LIMIT) - 1,
    )
    with started(direct.body(CPUS[0])) as (client, neighbour):
        client.connect_container_to_network(neighbour, around.plain_network)
        direct.targets = {
            "neighbour": (address_of(neighbour, around.network), probe.NEIGHBOUR_PORT),
            "neighbour on a plain network": (address_of(neighbour, around.plain_network), probe.NEIGHBOUR_PORT),
            "scheduler on loopback": ("127.0.0.1", around.loopback_port),
            "agent on loopback": ("127.0.0.1", around.loopback_port),
            "scheduler by gateway": (gateway, around.loopback_port),
            "agent by gateway": (gateway, around.loopback_port),
            "metadata": (METADATA_ADDRESS, METADATA_PORT),
            "name server": (METADATA_ADDRESS, DNS_PORT),
        }
        wait_until_ready(neighbour)
        # A property that neighbours do not reach each other is empty unless there is something to reach.
        socket.create_connection(direct.targets["neighbour"], 10).close()
        yield direct


@pytest.fixture(scope="module")
def looks(containers: DirectContainers) -> Iterator[dict[str, Future[Look]]]:
    """One for each mutation, two at a time for each CPU: most of a look is waiting for Docker and for silent drops."""
    changes: dict[str, Callable[[Body], object]] = {ALL_SETTINGS: lambda body: None}
    changes |= {name: mutation.change for name, mutation in MUTATIONS.items()}
    with ThreadPoolExecutor(2 * len(CPUS)) as threads:
        yield {
            name: threads.submit(containers.look, CPUS[number % len(CPUS)], change)
            for number, (name, change) in enumerate(changes.items())
        }


def broken(look: Look) -> set[str]:
    """Names of the properties that do not hold."""
    names = set()
    for name, check in PROPERTIES.items():
        try:
            check(look)
        except AssertionError:
            names.add(name)
    return names


def test_with_all_settings_every_property_holds(looks: dict[str, Future[Look]]) -> None:
    assert broken(looks[ALL_SETTINGS].result()) == set()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_setting_is_noticed(looks: dict[str, Future[Look]], name: str) -> None:
    try:
        look = looks[name].result()
    except docker.errors.APIError as error:
        if name == PRIVILEGED and "unable to apply caps" in str(error):
            pytest.skip("this machine is itself confined: its Docker has not all capabilities to give")
        raise
    assert set(MUTATIONS[name].noticed_by) <= broken(look)


def test_without_the_agents_network_neighbours_and_metadata_are_reached(
    containers: DirectContainers, around: Around
) -> None:
    targets = {**containers.targets, "neighbour": containers.targets["neighbour on a plain network"]}
    on_plain = replace(containers, network=around.plain_network, targets=targets)
    assert {"cannot_reach_its_neighbour", "cannot_reach_the_metadata_service"} <= broken(on_plain.look(CPUS[0]))


def test_in_a_neighbours_namespaces_its_memory_and_sockets_are_found(containers: DirectContainers) -> None:
    body = containers.body(CPUS[0])
    body["HostConfig"]["IpcMode"] = "shareable"
    with started(body) as (_, neighbour):
        wait_until_ready(neighbour)

        def join(body: Body) -> None:
            del body["Hostname"], body["HostConfig"]["ShmSize"]
            body["HostConfig"].update(IpcMode=f"container:{neighbour}", NetworkMode=f"container:{neighbour}")

        found = broken(containers.look(CPUS[0], join))
    assert {
        "sees_no_shared_memory_of_its_neighbour",
        "sees_no_files_of_its_neighbour",
        "reaches_no_abstract_socket_of_its_neighbour",
    } <= found


NOT_MUTATED = {
    "AutoRemove": "false is Docker's default; true would take the counters away before they are read",
    "CpusetMems": "empty here; where it is set takes a machine with two NUMA nodes to notice",
    "OomKillDisable": "false is Docker's default, and true is refused on cgroup v2",
    "Runtime": "shown by test_gpus, with an engine whose default is another",
}
"""Settings that the mutations do not touch, and why."""
NOT_ABOUT_ISOLATION = {
    "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "PYTHON_CPU_COUNT",
    "PYTHONUNBUFFERED", "OUTERPRODUCT_SOCKET", "OUTERPRODUCT_ATTEMPT",
}  # fmt: skip
"""Variables: conveniences, like OMP_NUM_THREADS, which stands for its kind."""


def test_every_setting_of_the_container_is_mutated(containers: DirectContainers) -> None:
    body = containers.body(CPUS[0])
    settings: set[str] = set()
    variables: set[str] = set()
    for mutation in MUTATIONS.values():
        changed = copy.deepcopy(body)
        mutation.change(changed)
        before, after = body["HostConfig"], changed["HostConfig"]
        settings |= {name for name in before if after.get(name) != before[name]}
        variables |= {entry.partition("=")[0] for entry in set(body["Env"]) - set(changed["Env"])}
    assert set(body["HostConfig"]) - settings == set(NOT_MUTATED)
    assert {entry.partition("=")[0] for entry in body["Env"]} - variables == NOT_ABOUT_ISOLATION


def test_every_mutation_names_properties_that_exist() -> None:
    for name, mutation in MUTATIONS.items():
        assert set(mutation.noticed_by) <= set(PROPERTIES), name
