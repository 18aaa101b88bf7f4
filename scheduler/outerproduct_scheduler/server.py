"""Wires it: database, stores, controller, services, health and reflection on one gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outerproduct.v1 import (
    agent_gateway_pb2,
    agent_gateway_pb2_grpc,
    blob_service_pb2,
    blob_service_pb2_grpc,
    node_service_pb2,
    node_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
)
from outerproduct_scheduler.agent_gateway import AgentGateway
from outerproduct_scheduler.auth import Authenticator, AuthInterceptor, attempt_token, load_secret
from outerproduct_scheduler.blob_service import BlobService
from outerproduct_scheduler.blobs import BlobStore
from outerproduct_scheduler.config import SchedulerConfig
from outerproduct_scheduler.controller import Controller
from outerproduct_scheduler.database import Database
from outerproduct_scheduler.logs import LogStore
from outerproduct_scheduler.node_service import NodeService
from outerproduct_scheduler.run_service import RunService

log = structlog.get_logger()

SERVICES = tuple(
    service.full_name
    for module in (run_service_pb2, node_service_pb2, blob_service_pb2, agent_gateway_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
)

MAX_MESSAGE_BYTES = 16 * 1024**2
"""Batches of Calls with inline payloads; single values beyond 256 KiB are blobs and come in chunks of 1 MiB."""
STOP_SECONDS = 2.0
"""For answers under way at the end; waiters reconnect, and agents too."""
LEASE_SHARE = 0.9
"""An agent gives its repeatable Attempts up before the scheduler starts them elsewhere."""

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # Long waits and agents' streams are idle for minutes; clients ping every 30 s, and the default floor is 5 minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two schedulers on one port would each have half of the truth.
    ("grpc.so_reuseport", 0),
]


async def serve(config: SchedulerConfig) -> None:
    """Runs until SIGTERM or SIGINT, or until a part dies: then it raises what killed it."""
    config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _only_one(config.data_dir):
        await _serve(config)


@contextlib.contextmanager
def _only_one(data_dir: Path) -> Iterator[None]:
    """Two schedulers on one database would each have half of the truth in memory."""
    with (data_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                f"another scheduler works in data_dir={data_dir}: stop it, or give this one its own"
            ) from None
        yield


async def _serve(config: SchedulerConfig) -> None:
    database = Database(config.url)
    blobs = BlobStore(config.data_dir / "blobs")
    logs = LogStore(config.data_dir / "logs")
    secret = await load_secret(database)
    controller = Controller(
        database, blobs, functools.partial(attempt_token, secret), lost_seconds=config.node_lost_seconds
    )
    authenticator = Authenticator(database, secret, controller.attempt_runs)
    await controller.load()

    server = grpc.aio.server(interceptors=[AuthInterceptor(authenticator)], options=OPTIONS)
    run_service_pb2_grpc.add_RunServiceServicer_to_server(RunService(controller, database, logs), server)
    node_service_pb2_grpc.add_NodeServiceServicer_to_server(NodeService(controller), server)
    blob_service_pb2_grpc.add_BlobServiceServicer_to_server(BlobService(blobs), server)
    agent_gateway_pb2_grpc.add_AgentGatewayServicer_to_server(
        AgentGateway(
            controller,
            logs,
            heartbeat_seconds=config.heartbeat_seconds,
            lease_seconds=config.node_lost_seconds * LEASE_SHARE,
        ),
        server,
    )
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    _open_port(server, config)
    await server.start()
    for name in ("", *SERVICES):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    log.info("scheduler_started", listen=config.listen, database=database_kind(config), tls=bool(config.tls_cert))
    try:
        await _until_stopped(controller, database)
    finally:
        await checks.enter_graceful_shutdown()
        await server.stop(STOP_SECONDS)
        await database.close()
        log.info("scheduler_stopped")


def _open_port(server: grpc.aio.Server, config: SchedulerConfig) -> None:
    try:
        if config.tls_cert and config.tls_key:
            pair = (Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes())
            server.add_secure_port(config.listen, grpc.ssl_server_credentials([pair]))
        else:
            server.add_insecure_port(config.listen)
    except RuntimeError as error:
        raise OSError(
            f"listen={config.listen} can not be opened: {error}. Is another scheduler running? Choose another port."
        ) from error


async def _until_stopped(controller: Controller, database: Database) -> None:
    """Until a signal comes, or a background part ends, which it never does on its own."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait(), name="stop")
    working = asyncio.create_task(controller.run(), name="controller")
    ends: set[asyncio.Future[Any]] = {stopping, working, database.failed}
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, working):
        task.cancel()
    await asyncio.gather(stopping, working, return_exceptions=True)
    for end in done:
        if end is not stopping:
            end.result()


def database_kind(config: SchedulerConfig) -> str:
    """What kind of database it is, without the password that a URL may have."""
    return config.url.partition(":")[0]
