"""The stream to the scheduler: dialled again and again, with everything that the other side may have missed.

It carries messages and holds no policy; the agent decides what they mean.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog

from outerproduct.v1 import agent_gateway_pb2 as pb
from outerproduct.v1 import agent_gateway_pb2_grpc
from outerproduct_agent.log_shipper import LogShipper
from outerproduct_agent.scheduler_link import SchedulerLink
from outerproduct_agent.state import AgentState

log = structlog.get_logger()

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
MAX_QUEUED_MESSAGES = 64


class StreamEnded(Exception):
    """The scheduler has ended the stream."""


class Gateway:
    """One stream at a time, for as long as the agent lives."""

    def __init__(
        self,
        link: SchedulerLink,
        state: AgentState,
        shipper: LogShipper,
        *,
        hello: Callable[[], Awaitable[pb.Hello]],
        heartbeat: Callable[[], pb.Heartbeat],
        handle: Callable[[pb.SchedulerMessage], Awaitable[None]],
    ) -> None:
        self._stub: Any = agent_gateway_pb2_grpc.AgentGatewayStub(link.channel)
        self._link = link
        self._state = state
        self._shipper = shipper
        self._hello = hello
        self._heartbeat = heartbeat
        self._handle = handle
        self._changed = asyncio.Event()
        self._beat = asyncio.Event()
        self.connected = False
        self.lease_seconds = float("inf")
        self.last_connected = time.monotonic()

    def changed(self) -> None:
        """There may be a new update or new output."""
        self._changed.set()
        self._shipper.wake()

    def beat(self) -> None:
        """The next heartbeat goes out now."""
        self._beat.set()

    async def run(self) -> None:
        """Never returns."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = time.monotonic()
            try:
                await self._session()
            except* (grpc.aio.AioRpcError, StreamEnded) as errors:
                error = errors.exceptions[0]
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.warning("scheduler_away", reason=reason)
            if self.connected:
                self.last_connected = time.monotonic()
            self.connected = False
            if time.monotonic() - began > LONGEST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            # Jitter, so that a hundred agents do not knock at a restarted scheduler at the same moment.
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _session(self) -> None:
        outgoing: asyncio.Queue[pb.AgentMessage] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        await outgoing.put(pb.AgentMessage(hello=await self._hello()))
        call = self._stub.Connect(_queued(outgoing), metadata=self._link.metadata)
        try:
            async with asyncio.TaskGroup() as group:
                welcome = await call.read()
                if welcome is grpc.aio.EOF or welcome.WhichOneof("kind") != "welcome":
                    await call.code()
                    raise StreamEnded("no welcome came")
                self.connected = True
                self.lease_seconds = welcome.welcome.lease_seconds or float("inf")
                log.info("scheduler_connected")
                group.create_task(self._read(call))
                group.create_task(self._send_heartbeats(outgoing, welcome.welcome.heartbeat_seconds))
                group.create_task(self._send_updates(outgoing))
                group.create_task(self._shipper.ship(outgoing.put))
        finally:
            call.cancel()

    async def _read(self, call: Any) -> None:
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                raise StreamEnded(f"the scheduler ended the stream: {await call.details()}")
            kind = message.WhichOneof("kind")
            if kind == "acknowledge":
                await self._state.acknowledged(message.acknowledge.sequence)
            elif kind == "log_acknowledge":
                self._shipper.acknowledged(message.log_acknowledge.attempt, message.log_acknowledge.offset)
            else:
                await self._handle(message)

    async def _send_heartbeats(self, outgoing: asyncio.Queue[pb.AgentMessage], seconds: float) -> None:
        while True:
            self._beat.clear()
            try:
                async with asyncio.timeout(seconds or 5.0):
                    await self._beat.wait()
            except TimeoutError:
                pass  # The regular beat.
            await outgoing.put(pb.AgentMessage(heartbeat=self._heartbeat()))

    async def _send_updates(self, outgoing: asyncio.Queue[pb.AgentMessage]) -> None:
        """All that are not acknowledged, in order; after a reconnect from the first of them."""
        sent = 0
        while True:
            self._changed.clear()
            updates = await self._state.updates(sent)
            for update in updates:
                await outgoing.put(pb.AgentMessage(update=update))
                sent = update.sequence
            if not updates:
                await self._changed.wait()


async def _queued(queue: asyncio.Queue[pb.AgentMessage]) -> AsyncIterator[pb.AgentMessage]:
    while True:
        yield await queue.get()
