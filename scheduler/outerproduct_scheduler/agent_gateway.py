"""AgentGateway: the stream of one agent, between its messages and the controller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import structlog

from outerproduct.v1 import agent_gateway_pb2 as pb
from outerproduct.v1 import agent_gateway_pb2_grpc
from outerproduct_scheduler.adapters import streaming
from outerproduct_scheduler.controller import Controller
from outerproduct_scheduler.errors import InvalidArgument
from outerproduct_scheduler.logs import LogStore
from outerproduct_scheduler.nodes import Session

log = structlog.get_logger()

PROTOCOL = 1
MAX_NODE_NAME = 200


class AgentGateway(agent_gateway_pb2_grpc.AgentGatewayServicer):
    """See proto/outerproduct/v1/agent_gateway.proto."""

    def __init__(
        self, controller: Controller, logs: LogStore, *, heartbeat_seconds: float, lease_seconds: float
    ) -> None:
        self._controller = controller
        self._logs = logs
        self._heartbeat_seconds = heartbeat_seconds
        self._lease_seconds = lease_seconds

    @streaming
    async def Connect(  # noqa: N802
        self, request: AsyncIterator[pb.AgentMessage], context: Any
    ) -> AsyncIterator[pb.SchedulerMessage]:
        first = await anext(request, None)
        if first is None or first.WhichOneof("kind") != "hello":
            raise InvalidArgument("the first message of an agent must be `hello`")
        hello = first.hello
        if not 1 <= len(hello.node) <= MAX_NODE_NAME or "/" in hello.node or not hello.node.isprintable():
            raise InvalidArgument(f'node={hello.node[:200]!r} must be 1 to {MAX_NODE_NAME} characters without "/"')
        if abs(hello.protocol - PROTOCOL) > 1:
            raise InvalidArgument(
                f"protocol={hello.protocol}: this scheduler speaks {PROTOCOL}; upgrade the older of the two"
            )
        session = Session(hello.node)
        session.send(
            pb.SchedulerMessage(
                welcome=pb.Welcome(heartbeat_seconds=self._heartbeat_seconds, lease_seconds=self._lease_seconds)
            )
        )
        reader = asyncio.create_task(self._read(session, request), name=f"agent-{hello.node}")
        try:
            await self._controller.connect(session, hello)
            async for message in _outgoing(session, reader):
                yield message
        finally:
            self._controller.disconnect(session)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _read(self, session: Session, requests: AsyncIterator[pb.AgentMessage]) -> None:
        """Until the agent ends the stream. Nothing counts before its hello was taken up."""
        await session.accepted.wait()
        async for message in requests:
            kind = message.WhichOneof("kind")
            if kind == "heartbeat":
                self._controller.heartbeat(session, message.heartbeat)
            elif kind == "update":
                self._update(session, message.update)
            elif kind == "log":
                await self._log(session, message.log)
            else:
                log.warning("agent_message_ignored", node=session.node, kind=kind)

    def _update(self, session: Session, update: pb.AttemptUpdate) -> None:
        acknowledge = pb.SchedulerMessage(acknowledge=pb.Acknowledge(sequence=update.sequence))
        written = self._controller.update(session, update)
        if written is None:
            session.send(acknowledge)
        else:
            # Commits come in the order of the updates, so an acknowledgement covers all before it.
            written.add_done_callback(lambda done: None if done.exception() else session.send(acknowledge))

    async def _log(self, session: Session, chunk: pb.LogChunk) -> None:
        try:
            offset = await self._logs.append(
                chunk.attempt, chunk.stream, chunk.offset, chunk.data, chunk.dropped_bytes, chunk.last
            )
        except InvalidArgument as error:
            log.warning("log_chunk_refused", node=session.node, error=str(error))
            return
        session.send(pb.SchedulerMessage(log_acknowledge=pb.LogAcknowledge(attempt=chunk.attempt, offset=offset)))
        if chunk.last:
            self._logs.forget(chunk.attempt)


async def _outgoing(session: Session, reader: asyncio.Task[None]) -> AsyncIterator[pb.SchedulerMessage]:
    """Messages for the agent, until its stream ends, fails or is replaced by a newer one."""
    closed = asyncio.create_task(session.closed.wait())
    message = asyncio.create_task(session.outgoing.get())
    try:
        while True:
            done, _ = await asyncio.wait({message, closed, reader}, return_when=asyncio.FIRST_COMPLETED)
            if message not in done:
                break
            yield message.result()
            message = asyncio.create_task(session.outgoing.get())
        if reader.done():
            reader.result()
    finally:
        for task in (closed, message):
            task.cancel()
        await asyncio.gather(closed, message, return_exceptions=True)
