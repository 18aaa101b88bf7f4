"""`outerproduct up`: scheduler and agent of one machine in the foreground, on the loopback interface only.

It starts both as processes, tells the SDK where they are, and stops them. What is in the data folder is
`data_folder.py`'s business, how processes live and die `supervisor.py`'s, and what a scheduler or an agent does theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outerproduct._cli.data_folder import (
    default_data_dir,
    key_file,
    key_of,
    locked,
    make_private,
    scheduler_dir,
    user_name,
    write_private,
)
from outerproduct._cli.errors import EXIT_FAILED, CommandError
from outerproduct._cli.output import clean, resources
from outerproduct._cli.servers import AGENT, SCHEDULER, require
from outerproduct._cli.supervisor import ChildEnded, Stopped, Supervisor, describe_exit
from outerproduct._credentials import local_file

if TYPE_CHECKING:
    import grpc

    from outerproduct.v1.node_service_pb2 import Node

START_SECONDS = 120.0
"""How long the servers together may take to be ready, a slow disk and a Docker engine that starts included."""
AGENT_STOP_SECONDS = 60.0
"""How long the agent may take to stop its containers: their grace period, then the kill and the removal of each."""
SCHEDULER_STOP_SECONDS = 15.0
"""How long the scheduler may take to answer what is under way and to close its database."""
RPC_SECONDS = 10.0
PATIENCE_SECONDS = 2.0
"""How long the node may wait for something before it is mentioned: most reasons at a start pass at once."""
POLL_SECONDS = 0.1
"""Between two looks at the list of nodes, which has no notification."""


@dataclass(frozen=True)
class Settings:
    """What was asked for on the command line."""

    data_dir: Path
    port: int
    agent_port: int
    gpus: str | None
    reserve_cpus: int | None
    verbose: bool

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


PORT = click.IntRange(1, 65535)


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_data_dir,
    show_default="$XDG_DATA_HOME/outerproduct, else ~/.local/share/outerproduct",
    help="Folder for the database, results, keys and logs.",
)
@click.option("--port", type=PORT, default=50051, show_default=True, help="Port of the scheduler on 127.0.0.1.")
@click.option("--agent-port", type=PORT, default=50052, show_default=True, help="Port of the agent on 127.0.0.1.")
@click.option("--gpus", metavar="all|none|UUID,...", help="GPUs to offer.  [default: all]")
@click.option("--reserve-cpus", type=click.IntRange(0), help="Logical CPUs that are left to the system.")
@click.option("-v", "--verbose", is_flag=True, help="Show the logs of both here too.")
def up(
    data_dir: Path, port: int, agent_port: int, gpus: str | None, reserve_cpus: int | None, *, verbose: bool
) -> None:
    """Runs scheduler and agent on this machine until Ctrl-C.

    `op.init()` of the same user on this machine finds them by itself. At the end nothing runs any more, and no
    container, network or mount is left; Runs and results stay in the data folder for the next start.
    """
    if port == agent_port:
        raise click.BadParameter(
            f"{port} is the scheduler's port already: give each its own", param_hint="--agent-port"
        )
    require(SCHEDULER, AGENT)
    settings = Settings(data_dir.absolute(), port, agent_port, gpus, reserve_cpus, verbose)
    make_private(settings.data_dir)
    with locked(settings.data_dir) as lock_fd:
        _check_port_free(port, "--port")
        _check_port_free(agent_port, "--agent-port")
        key = key_of(settings.data_dir, "user", user_name(), "operator")
        key_of(settings.data_dir, "agent", "agent", "agent")
        asyncio.run(_run(settings, key, lock_fd))


async def _run(settings: Settings, key: str, lock_fd: int) -> None:
    """From the start of the servers to their end."""
    supervisor = Supervisor(lock_fd=lock_fd, verbose=settings.verbose)
    supervisor.handle_signals()
    try:
        async with asyncio.timeout(START_SECONDS):
            await supervisor.start(
                "scheduler",
                SCHEDULER.module,
                ["--listen", settings.address, "--data-dir", str(scheduler_dir(settings.data_dir))],
                settings.data_dir / "scheduler.log",
                SCHEDULER_STOP_SECONDS,
            )
            await supervisor.until(_scheduler_serves(settings.address))
            await supervisor.start(
                "agent", AGENT.module, _agent_arguments(settings), settings.data_dir / "agent.log", AGENT_STOP_SECONDS
            )
            node = await supervisor.until(_node_ready(settings, key))
        with _announced(settings, key):
            click.echo(_ready_message(settings, node))
            await supervisor.until_ended()
    except Stopped:
        click.echo("Stopping.", err=True)
    except ChildEnded as ended:
        child = ended.child
        raise CommandError(
            f"the {child.name} ended by itself ({describe_exit(child.ended.result())}); everything is stopped",
            f"last lines of {child.log_path}:\n{child.log_tail()}",
            "remove the cause that the log names, and start `outerproduct up` again",
        ) from None
    except TimeoutError:
        raise CommandError(
            f"not ready within {START_SECONDS:.0f} seconds; everything is stopped",
            f"logs: {settings.data_dir / 'scheduler.log'}, {settings.data_dir / 'agent.log'}",
            "see in the logs what they waited for (Docker, most likely), and start `outerproduct up` again",
        ) from None
    finally:
        killed = await supervisor.stop()
        for name in killed:
            click.echo(
                f"warning: the {name} did not stop in time and was killed. What it left behind, containers included, "
                "is taken care of by the next `outerproduct up` on this data folder.",
                err=True,
            )
    if killed:
        sys.exit(EXIT_FAILED)


def _agent_arguments(settings: Settings) -> list[str]:
    arguments = [
        *("--scheduler", settings.address),
        *("--listen", f"127.0.0.1:{settings.agent_port}"),
        *("--data-dir", str(settings.data_dir / "agent")),
        *("--token-file", str(key_file(settings.data_dir, "agent"))),
        "--stop-attempts-on-exit",
    ]
    if settings.gpus is not None:
        arguments += ["--gpus", settings.gpus]
    if settings.reserve_cpus is not None:
        arguments += ["--reserve-cpus", str(settings.reserve_cpus)]
    return arguments


# --- readiness


async def _scheduler_serves(address: str) -> None:
    """Returns when the health service says SERVING. That the scheduler has died is for its supervisor to notice."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(address, _CHANNEL_OPTIONS) as channel:
        # Its published types know Check only.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(POLL_SECONDS)


_CHANNEL_OPTIONS = [
    # The first connection is tried before the server listens; grpc's own pause would be a second.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]


async def _node_ready(settings: Settings, key: str) -> Node:
    """The node of this machine, when it takes Attempts. Says on stderr what it waits for otherwise."""
    import grpc

    from outerproduct.v1 import node_service_pb2, node_service_pb2_grpc

    request = node_service_pb2.ListNodesRequest(include_unavailable=True)
    metadata = (("authorization", f"Bearer {key}"),)
    loop = asyncio.get_running_loop()
    reason, since, shown = "", loop.time(), ""
    async with grpc.aio.insecure_channel(settings.address, _CHANNEL_OPTIONS) as channel:
        stub = node_service_pb2_grpc.NodeServiceStub(channel)
        while True:
            try:
                answer = await stub.ListNodes(request, metadata=metadata, timeout=RPC_SECONDS)
            except grpc.aio.AioRpcError as error:
                # That it has died is for the supervisor to notice.
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise _start_error(settings, error) from None
                answer = node_service_pb2.ListNodesResponse()
            for node in answer.nodes:
                if node.status.condition == node_service_pb2.NODE_CONDITION_READY:
                    return node
                # That the agent is not connected yet is how every start begins.
                connected = node.status.condition != node_service_pb2.NODE_CONDITION_UNREACHABLE
                if connected and node.status.reason != reason:
                    reason, since = node.status.reason, loop.time()
            if reason != shown and loop.time() - since > PATIENCE_SECONDS:
                shown = reason
                click.echo(f"waiting for the node: {clean(reason)}", err=True)
            await asyncio.sleep(POLL_SECONDS)


def _start_error(settings: Settings, error: grpc.aio.AioRpcError) -> CommandError:
    import grpc

    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
        key_path = key_file(settings.data_dir, "user")
        return CommandError(
            "the scheduler does not know the key of this data folder",
            f"{key_path} and the database in {scheduler_dir(settings.data_dir)} do not belong together",
            f"delete the folder {key_path.parent}, and start `outerproduct up` again",
        )
    return CommandError(
        "the scheduler does not list its nodes",
        f"{error.code().name}: {error.details()}",
        f"see {settings.data_dir / 'scheduler.log'}",
    )


def _check_port_free(port: int, flag: str) -> None:
    with socket.socket() as probe:
        # As grpc does it: connections of an earlier server that still linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise CommandError(
                f"port {port} can not be opened",
                f"127.0.0.1:{port}: {os.strerror(error.errno or 0)}",
                f"stop what listens there (`ss -ltnp sport = :{port}` names it), or choose another port with {flag}",
            ) from None


# --- what the user sees


@contextlib.contextmanager
def _announced(settings: Settings, key: str) -> Iterator[None]:
    """The file by which the SDK finds the scheduler, for as long as it runs."""
    path = local_file()
    text = json.dumps({"base_url": f"http://{settings.address}", "api_key": key})
    write_private(path, text)
    try:
        yield
    finally:
        # Another `up` with another data folder may have replaced it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if path.read_text() == text:
                path.unlink()


def _ready_message(settings: Settings, node: Node) -> str:
    python = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
    key_path = shlex.quote(str(key_file(settings.data_dir, "user")))
    return f"""\
Ready. Node {clean(node.name)} offers {resources(node.total_resources)}.

In Python, on this machine:
    import outerproduct as op

    def double(x):
        return 2 * x

    run = op.init().run(fn=double, args=(21,), image=op.Image.from_registry("{python}"))
    print(run.wait())

In another terminal:
    outerproduct nodes
    grpcurl -plaintext -H "authorization: Bearer $(cat {key_path})" \\
        {settings.address} outerproduct.v1.NodeService/ListNodes

Logs: {settings.data_dir}/scheduler.log, {settings.data_dir}/agent.log
Ctrl-C stops everything."""
