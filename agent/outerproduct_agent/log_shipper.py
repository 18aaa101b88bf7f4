"""Brings spooled output to the scheduler: in order, within a window, from the last acknowledged byte after a cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from outerproduct.v1 import agent_gateway_pb2 as pb
from outerproduct_agent.log_spool import LogSpool

WINDOW_BYTES = 2 * 1024**2
"""Output of one Attempt under way: a chatty one does not fill the stream for the others."""


class LogShipper:
    """All spools of this agent that are not yet at the scheduler as a whole."""

    def __init__(self) -> None:
        self._spools: dict[str, LogSpool] = {}
        self._acked: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._unanswered: dict[str, int] = {}
        """Chunks sent on this connection without an answer: each gets one, also the last, which has no bytes."""
        self._last_sent: set[str] = set()
        self._changed = asyncio.Event()

    def add(self, attempt: str, spool: LogSpool) -> None:
        self._spools[attempt] = spool
        self._acked.setdefault(attempt, 0)
        self.wake()

    def wake(self) -> None:
        """There may be something to send."""
        self._changed.set()

    def acknowledged(self, attempt: str, offset: int) -> None:
        """The scheduler has it up to here; a spool that is there as a whole is removed."""
        spool = self._spools.get(attempt)
        if spool is None:
            return
        self._acked[attempt] = max(self._acked[attempt], offset)
        self._sent[attempt] = max(self._sent.get(attempt, 0), self._acked[attempt])
        self._unanswered[attempt] = self._unanswered.get(attempt, 0) - 1
        if attempt in self._last_sent and not self._unanswered[attempt]:
            spool.remove()
            for known in (self._spools, self._acked, self._sent, self._unanswered):
                known.pop(attempt, None)
            self._last_sent.discard(attempt)
        self.wake()

    async def ship(self, send: Callable[[pb.AgentMessage], Awaitable[None]]) -> None:
        """Sends on one connection, for as long as it lasts."""
        self._sent = dict(self._acked)
        self._last_sent.clear()
        self._unanswered.clear()
        while True:
            self._changed.clear()
            sent = False
            for attempt, spool in list(self._spools.items()):
                sent |= await self._send_next(attempt, spool, send)
            if not sent:
                await self._changed.wait()

    async def _send_next(
        self, attempt: str, spool: LogSpool, send: Callable[[pb.AgentMessage], Awaitable[None]]
    ) -> bool:
        position = self._sent.get(attempt, 0)
        if attempt in self._last_sent or position - self._acked.get(attempt, 0) >= WINDOW_BYTES:
            return False
        chunk = await spool.chunk_from(position)
        if chunk is None:
            return False
        self._unanswered[attempt] = self._unanswered.get(attempt, 0) + 1
        await send(pb.AgentMessage(log=chunk))
        self._sent[attempt] = position + len(chunk.data)
        if chunk.last:
            self._last_sent.add(attempt)
        return True
