"""How requests reach the scheduler: directly, or through the agent's socket from inside a container."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from outerproduct._wire import Message


class Transport(Protocol):
    """One way to the scheduler. Every request may be repeated without harm, and is, when the connection is lost."""

    async def call(self, method: str, request: Message, *, timeout_seconds: float, patient: bool = False) -> Message:
        """A unary RPC, as "RunService/GetRun". `patient`: while the scheduler is away, try again for ever.

        Raises the exceptions of `_errors.BY_CODE`.
        """
        ...

    async def upload(self, data: bytes, sha256: str) -> None:
        """Stores a blob."""
        ...

    async def download(self, sha256: str, size_bytes: int) -> bytes:
        """Reads a blob."""
        ...

    def read_logs(self, request: Message) -> Iterator[Message]:
        """Blocks between pieces; ends with the output."""
        ...

    def close(self) -> None:
        """Ends all connections; later calls open new ones."""
        ...
