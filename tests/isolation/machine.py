"""The machine around the containers that are looked at: networks, a stand-in for a cloud's metadata service, and
containers made straight from a body of `container_spec`.

Needs root, as the agent does: it makes a network namespace, and bridges.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker

from outerproduct_agent.container_spec import ContainerRequest, ContainerSettings, Mount, container_spec
from outerproduct_agent.cpuset import CpuSet
from outerproduct_agent.ledger import Allocation
from outerproduct_agent.network import DNS_PORT
from tests.isolation import probe
from tests.isolation.properties import Look

METADATA_ADDRESS = "169.254.77.1"
"""Link-local, as all metadata services are, but not the one that this machine may really have."""
METADATA_PORT = 80
HOST_ADDRESS = "169.254.77.2"
MIB = 1024**2
MEMORY_BYTES = 256 * MIB
NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "cgroup")
ATTEMPT = "runs/0123456789/calls/0/attempts/1"
PROBE_PATH = "/run/probe.py"


def host_namespaces() -> dict[str, str]:
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}


@contextlib.contextmanager
def metadata_service() -> Iterator[None]:
    """Something that listens at a link-local address beyond this machine: a network namespace of its own."""
    name = f"opmeta{os.getpid()}"
    inner, outer = f"opi{os.getpid()}", f"opo{os.getpid()}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        _run("ip", "addr", "add", f"{HOST_ADDRESS}/30", "dev", outer)
        _run("ip", "link", "set", outer, "up")
        _run("ip", "-n", name, "addr", "add", f"{METADATA_ADDRESS}/30", "dev", inner)
        _run("ip", "-n", name, "link", "set", inner, "up")
        ports = [str(METADATA_PORT), str(DNS_PORT)]
        command = ["ip", "netns", "exec", name, sys.executable, "-u", "-c", _SERVER, METADATA_ADDRESS, *ports]
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield
        finally:
            server.kill()
            server.communicate()
    finally:
        _run("ip", "netns", "del", name)


_SERVER = """
import selectors, socket, sys
servers = selectors.DefaultSelector()
for port in sys.argv[2:]:
    servers.register(socket.create_server((sys.argv[1], int(port))), selectors.EVENT_READ)
print("ready")
while True:
    for key, _ in servers.select():
        key.fileobj.accept()[0].close()
"""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


@dataclass
class DirectContainers:
    """Containers with the agent's settings but without an agent, so that one setting can be taken away."""

    image: str
    network: str
    targets: Mapping[str, tuple[str, int]]
    folder: Path
    nofile: int

    def body(self, cpu: int) -> dict[str, Any]:
        """What the agent would create, except that the probe runs in the runner's place."""
        run_folder = Path(tempfile.mkdtemp(dir=self.folder))
        library = self.folder / "lib"
        for path in (library, run_folder / "lib", run_folder / "source"):
            path.mkdir(exist_ok=True)
        request = ContainerRequest(
            attempt=ATTEMPT,
            image=self.image,
            python="python3",
            cpus=1,
            allocation=Allocation(CpuSet.of([cpu]), MEMORY_BYTES),
            run_folder=str(run_folder),
            library_folder=str(library),
            mounts=(Mount(probe.__file__, PROBE_PATH),),
        )
        settings = ContainerSettings(
            node="isolation-test",
            agent_id="isolation-test",
            network=self.network,
            cgroup_v2=Path("/sys/fs/cgroup/cgroup.controllers").exists(),
            nofile_limit=self.nofile,
            memlock_limit=64 * 1024,
        )
        body = container_spec(request, settings)
        # The labels are the agent's: one on this machine would take the container for its own.
        del body["Labels"]
        body["Entrypoint"] = ["python3", "-I", PROBE_PATH]
        return body

    def look(self, cpu: int, change: Callable[[dict[str, Any]], object] = lambda body: None) -> Look:
        """Runs the probe on one CPU in a container whose body was changed."""
        body = self.body(cpu)
        body["Cmd"] = [json.dumps(self.targets)]
        folders = tuple(mount["Source"] for mount in body["HostConfig"]["Mounts"])
        change(body)
        with started(body) as (client, container):
            code = client.wait(container, timeout=60)["StatusCode"]
            output = client.logs(container, stdout=True, stderr=True)
            assert code == 0, output.decode()
            config = client.inspect_container(container)["HostConfig"]
        return Look(
            inside=json.loads(output.splitlines()[-1]),
            host_config=config,
            cpus=frozenset({cpu}),
            memory_bytes=MEMORY_BYTES,
            host_name="01234567-0-1",
            nofile=self.nofile,
            host_namespaces=host_namespaces(),
            own_folders=folders,
        )


@contextlib.contextmanager
def started(body: dict[str, Any]) -> Iterator[tuple[docker.APIClient, str]]:
    """A container while it is used; gone afterwards."""
    client = docker.from_env()
    try:
        created: Any = client.api.create_container_from_config
        container = str(created(body)["Id"])
        try:
            client.api.start(container)
            yield client.api, container
        finally:
            client.api.remove_container(container, force=True)
    finally:
        client.close()


def wait_until_ready(container: str) -> None:
    """Until it has written its first line."""
    client = docker.from_env(timeout=60)
    try:
        line: bytes = next(client.api.logs(container, stream=True, follow=True))
        assert line.startswith(b"ready"), line
    finally:
        client.close()


def address_of(container: str, network: str) -> str:
    """Its IP address on a network."""
    client = docker.from_env()
    try:
        found = client.api.inspect_container(container)["NetworkSettings"]["Networks"][network]
        return str(found["IPAddress"])
    finally:
        client.close()


def gateway_of(network: str) -> str:
    client = docker.from_env()
    try:
        return str(client.api.inspect_network(network)["IPAM"]["Config"][0]["Gateway"])
    finally:
        client.close()
