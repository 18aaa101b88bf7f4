"""What a Call can see, use and disturb on a real stack: one looks around while a neighbour holds one of everything,
then others attack the agent, the scheduler and the machine."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import docker
import pytest

import outerproduct as op
from outerproduct_agent.container_spec import ATTEMPT_LABEL, NOFILE_LIMIT, PIDS_LIMIT
from outerproduct_agent.cpuset import CpuSet
from outerproduct_agent.network import DNS_PORT
from outerproduct_agent.rlimits import grantable
from tests.isolation import attacks, probe
from tests.isolation.machine import (
    MEMORY_BYTES,
    METADATA_ADDRESS,
    METADATA_PORT,
    MIB,
    address_of,
    gateway_of,
    host_namespaces,
    wait_until_ready,
)
from tests.isolation.properties import PROPERTIES, Look
from tests.support.engine import attempt_containers
from tests.support.stack import Stack, running_stack

pytestmark = pytest.mark.docker

SECONDS = 120
NODE = "isolated"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, hostile_image: str) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), agents=(NODE,)) as running:
        agent_id = (running.folder / f"agent-{NODE}" / "agent-id").read_text().strip()
        yield running
    assert attempt_containers(agent_id) == []


@pytest.fixture(scope="module")
def client(stack: Stack) -> op.OuterProductClient:
    return stack.client()


@pytest.fixture(scope="module")
def image(hostile_image: str) -> op.Image:
    return op.Image.from_registry(hostile_image)


@pytest.fixture(scope="module")
def neighbour(client: op.OuterProductClient, image: op.Image) -> Iterator[op.Run[None]]:
    """A Call that runs beside all others of this module, and must not notice."""
    run = client.run(fn=probe.be_neighbour, image=image, memory_bytes=MEMORY_BYTES)
    assert isinstance(run, op.Run)
    wait_until_ready(container_of(run))
    yield run
    assert run.refresh().status == op.RunStatus.RUNNING, run.refresh().error_message
    run.cancel()
    with pytest.raises(op.Cancelled):
        run.wait(timeout=SECONDS)


def container_of(run: op.Run[None]) -> str:
    """The id of the container of a Run's first Attempt, as soon as it has started."""
    label = f"{ATTEMPT_LABEL}={run.refresh().root_call.name}/attempts/1"
    client = docker.from_env(timeout=SECONDS)
    try:
        found = client.containers.list(filters={"label": label})
        if not found:
            events = client.events(since=0, filters={"label": label, "event": "start"}, decode=True)
            next(events)
            found = client.containers.list(filters={"label": label})
        return str(found[0].id)
    finally:
        client.close()


@pytest.fixture(scope="module")
def look(stack: Stack, client: op.OuterProductClient, image: op.Image, neighbour: op.Run[None], metadata: None) -> Look:
    """One Call's look around, beside its neighbour."""
    # The two differ in their CPUs and folders only, and the neighbour is there to be inspected.
    config = inspected(neighbour)
    gateway = gateway_of(config["NetworkMode"])
    targets = {
        "neighbour": address_of_neighbour(neighbour),
        "scheduler on loopback": ("127.0.0.1", stack.port),
        "agent on loopback": ("127.0.0.1", stack.agent_ports[NODE]),
        "scheduler by gateway": (gateway, stack.port),
        "agent by gateway": (gateway, stack.agent_ports[NODE]),
        "metadata": (METADATA_ADDRESS, METADATA_PORT),
        "name server": (METADATA_ADDRESS, DNS_PORT),
    }
    run = client.run(fn=probe.look, args=(targets,), image=image, memory_bytes=MEMORY_BYTES)
    assert isinstance(run, op.Run)
    seen = run.wait(timeout=SECONDS)
    attempt = asyncio.run(client.get_attempt(f"{run.refresh().root_call.name}/attempts/1"))
    assert attempt.allocation is not None
    return Look(
        inside=seen,
        host_config=config,
        cpus=frozenset(CpuSet.parse(attempt.allocation["cpu_ids"])),
        memory_bytes=MEMORY_BYTES,
        host_name=f"{run.id[:8]}-0-1",
        nofile=grantable(resource.RLIMIT_NOFILE, NOFILE_LIMIT),
        host_namespaces=host_namespaces(),
        host_secrets=(stack.api_key, stack.agent_key, probe.NEIGHBOUR_SECRET),
        own_folders=(str(stack.folder / f"agent-{NODE}"),),
    )


def inspected(run: op.Run[None]) -> dict[str, Any]:
    """Docker's HostConfig of its container, which is running."""
    client = docker.from_env()
    try:
        config: dict[str, Any] = client.api.inspect_container(container_of(run))["HostConfig"]
        return config
    finally:
        client.close()


def address_of_neighbour(run: op.Run[None]) -> tuple[str, int]:
    return address_of(container_of(run), inspected(run)["NetworkMode"]), probe.NEIGHBOUR_PORT


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_call(look: Look, name: str) -> None:
    PROPERTIES[name](look)


def test_neighbours_share_no_cpu(look: Look, neighbour: op.Run[None]) -> None:
    assert not look.cpus & frozenset(CpuSet.parse(inspected(neighbour)["CpusetCpus"]))


def test_a_call_finds_no_socket_of_another_call(
    stack: Stack, client: op.OuterProductClient, image: op.Image, neighbour: op.Run[None]
) -> None:
    folders = [str(folder) for folder in (stack.folder / f"agent-{NODE}" / "run").iterdir()]
    assert folders, "there is a socket to find"
    run = client.run(fn=attacks.paths_that_exist, args=(folders,), image=image, memory_bytes=MEMORY_BYTES)
    assert run.wait(timeout=SECONDS) == []


def test_a_call_may_not_act_for_another_run_or_the_operator(
    client: op.OuterProductClient, image: op.Image, neighbour: op.Run[None]
) -> None:
    call = neighbour.refresh().root_call.name
    requests = [
        ("RunService/GetRun", {"name": neighbour.name}),
        ("RunService/CancelRun", {"name": neighbour.name}),
        ("RunService/GetCall", {"name": call}),
        ("RunService/CancelCall", {"name": call}),
        ("RunService/GetAttempt", {"name": f"{call}/attempts/1"}),
        ("RunService/ListAttempts", {"call": call}),
        ("NodeService/CordonNode", {"name": NODE}),
        ("NodeService/DrainNode", {"name": NODE}),
        ("AgentGateway/Connect", {}),
        ("BlobService/DownloadBlob", {}),
        ("/outerproduct.v1.RunService/GetMe", {}),
    ]
    run = client.run(fn=attacks.ask, args=(requests,), image=image, memory_bytes=MEMORY_BYTES)
    answers = dict(zip((method for method, _ in requests), run.wait(timeout=SECONDS), strict=True))
    assert {method for method, answer in answers.items() if answer not in REFUSALS} == set(), answers


REFUSALS = {"PERMISSION_DENIED", "NOT_FOUND"}


def test_forged_frames_harm_neither_the_agent_nor_the_call(
    stack: Stack, client: op.OuterProductClient, image: op.Image, neighbour: op.Run[None]
) -> None:
    run = client.run(fn=attacks.send_forged_frames, image=image, memory_bytes=MEMORY_BYTES)
    assert run.wait(timeout=SECONDS) == ["reply"]
    stack.agents[NODE].check_alive()


def test_forged_frames_leave_no_trace_of_an_unforeseen_error(
    stack: Stack, client: op.OuterProductClient, image: op.Image, neighbour: op.Run[None]
) -> None:
    client.run(fn=attacks.send_forged_frames, image=image, memory_bytes=MEMORY_BYTES).wait(timeout=SECONDS)
    assert "Traceback" not in stack.agents[NODE].log_path.read_text()


def test_processes_without_end_are_refused_in_their_own_call_only(
    client: op.OuterProductClient, image: op.Image, neighbour: op.Run[None]
) -> None:
    run = client.run(fn=attacks.start_threads_until_refused, image=image, memory_bytes=1024 * MIB)
    started = run.wait(timeout=SECONDS)
    assert 1000 < started < PIDS_LIMIT
    socket.create_connection(address_of_neighbour(neighbour), SECONDS).close()


def test_memory_without_end_ends_its_own_call_only(
    client: op.OuterProductClient, image: op.Image, neighbour: op.Run[None]
) -> None:
    run = client.run(fn=attacks.fill_memory, image=image, memory_bytes=MEMORY_BYTES)
    with pytest.raises(op.OutOfMemory):
        run.wait(timeout=SECONDS)


@pytest.mark.parametrize("name", ["NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"])
def test_variables_that_say_which_gpus_are_seen_are_not_the_users(
    client: op.OuterProductClient, image: op.Image, name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        client.run(fn=os.getcwd, image=image, env_vars={name: "all"})
