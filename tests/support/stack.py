"""A scheduler and agents as real processes on free ports, for integration tests.

What the operator does by hand (keys, two commands) is done here, in a data folder of the test's own;
nothing is imported from the servers. At the end everything is stopped; what an agent leaves behind is an error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import outerproduct as op
from outerproduct.v1 import node_service_pb2, node_service_pb2_grpc

READY_SECONDS = 60
"""How long a process may take to serve on a loaded machine before the test gives up on it."""

STOP_SECONDS = 60
"""How long an agent may take to stop and remove its containers."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Process:
    """One server process with its log file."""

    name: str
    command: list[str]
    log_path: Path
    env: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env},
                start_new_session=True,
            )

    def kill(self) -> None:
        """kill -9, as the kernel's out-of-memory killer would."""
        assert self.popen is not None
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def stop(self) -> int:
        """SIGTERM and wait; the exit code."""
        if self.popen is None:
            return 0
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise AssertionError(f"{self.name} did not stop within {STOP_SECONDS} s:\n{self.log_tail()}") from None

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def check_alive(self) -> None:
        if self.popen is not None and self.popen.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self.popen.returncode}:\n{self.log_tail()}")


class Stack:
    """One scheduler and any number of agents."""

    def __init__(
        self, folder: Path, scheduler_args: tuple[str, ...] = (), scheduler_env: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.base_url = f"http://{self.address}"
        self.data_dir = folder / "scheduler"
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.scheduler = Process(
            "scheduler",
            [
                sys.executable,
                "-m",
                "outerproduct_scheduler",
                "--listen",
                self.address,
                "--data-dir",
                str(self.data_dir),
                *scheduler_args,
            ],
            folder / "scheduler.log",
            scheduler_env or {},
        )
        self.agents: dict[str, Process] = {}
        self.agent_ports: dict[str, int] = {}
        self.api_key = ""
        self.agent_key = ""

    def create_key(self, name: str, role: str) -> str:
        done = subprocess.run(
            [
                sys.executable, "-m", "outerproduct_scheduler", "keys", "create",
                "--name", name, "--role", role, "--data-dir", str(self.data_dir),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )  # fmt: skip
        return done.stdout.strip().splitlines()[-1]

    def start(self) -> None:
        self.api_key = self.create_key("tester", "operator")
        self.agent_key = self.create_key("agent", "agent")
        self.start_scheduler()

    def start_scheduler(self) -> None:
        self.scheduler.start()
        wait_serving(self.address, self.scheduler)

    def add_agent(
        self,
        name: str = "box",
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        wait: bool = True,
    ) -> Process:
        token_file = self.folder / "agent.token"
        token_file.touch(mode=0o600)
        token_file.write_text(self.agent_key)
        self.agent_ports[name] = free_port()
        process = Process(
            f"agent {name}",
            [
                sys.executable, "-m", "outerproduct_agent",
                "--scheduler", self.address,
                "--listen", f"127.0.0.1:{self.agent_ports[name]}",
                "--node-name", name,
                "--data-dir", str(self.folder / f"agent-{name}"),
                "--token-file", str(token_file),
                "--stop-attempts-on-exit",
                *args,
            ],
            self.folder / f"agent-{name}.log",
            env or {},
        )  # fmt: skip
        self.agents[name] = process
        process.start()
        if wait:
            self.wait_node(name)
        return process

    def wait_node(self, name: str) -> None:
        """Until the scheduler lists the node as ready."""
        deadline = time.monotonic() + READY_SECONDS
        with self.channel() as channel:
            stub = node_service_pb2_grpc.NodeServiceStub(channel)
            while True:
                self.agents[name].check_alive()
                self.scheduler.check_alive()
                nodes = stub.ListNodes(node_service_pb2.ListNodesRequest(), metadata=self.metadata, timeout=10).nodes
                if any(node.name == name for node in nodes):
                    return
                if time.monotonic() > deadline:
                    raise AssertionError(f"node {name} did not register:\n{self.agents[name].log_tail()}")
                time.sleep(0.05)

    def agent_id(self, name: str = "box") -> str:
        """What an agent's containers are labelled with."""
        return (self.folder / f"agent-{name}" / "agent-id").read_text()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),)

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address)

    def client(self, api_key: str | None = None) -> op.OuterProductClient:
        return op.init(api_key=api_key or self.api_key, base_url=self.base_url)

    def stop(self) -> None:
        errors = []
        for process in [*self.agents.values(), self.scheduler]:
            try:
                process.stop()
            except AssertionError as error:
                errors.append(str(error))
        if errors:
            raise AssertionError("\n".join(errors))


def wait_serving(address: str, process: Process) -> None:
    """Until the health service answers SERVING."""
    deadline = time.monotonic() + READY_SECONDS
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            process.check_alive()
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)
            except grpc.RpcError:
                answer = None
            if answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"{process.name} did not serve:\n{process.log_tail()}")


@contextlib.contextmanager
def running_stack(
    folder: Path, *, agents: tuple[str, ...] = ("box",), agent_args: tuple[str, ...] = ()
) -> Iterator[Stack]:
    """A stack with these agents; stopped at the end, whatever happens."""
    stack = Stack(folder)
    try:
        stack.start()
        for name in agents:
            stack.add_agent(name, agent_args)
        yield stack
    finally:
        stack.stop()
