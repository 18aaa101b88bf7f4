"""To the scheduler through the agent's socket, from inside a container (docs/runner-protocol.md).

Standard library only. A request takes an idle connection or opens one; strictly one request at a time on each, so a
long wait blocks nobody else, and a forked child, which must not use its parent's connections, opens its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from outerproduct._errors import BY_CODE, OuterProductError, SchedulerUnavailable
from outerproduct._wire import CHUNK_BYTES, Message

_LENGTHS = struct.Struct(">II")
MAX_HEADER_BYTES = 64 * 1024
MAX_BODY_BYTES = 4 * 1024**2
MAX_CONNECTIONS = 200
"""Requests under way at once in one process; more wait for their turn. The agent closes what is over 256."""
RETRY_SECONDS = 20.0
PAUSE_SECONDS = 0.2


class SocketTransport:
    """`path` is the agent's socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[socket.socket] = []
        self._pid = os.getpid()
        self._threads: ThreadPoolExecutor | None = None

    def _in_this_process(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid() or self._threads is None:
            self._pid = os.getpid()
            self._idle = []
            self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, "outerproduct-rpc")
        return self._threads

    async def call(self, method: str, request: Message, *, timeout_seconds: float, patient: bool = False) -> Message:
        body = json.dumps(request).encode()
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"request {method} has {len(body)} bytes, more than the {MAX_BODY_BYTES} that can be sent")

        def exchange(connection: socket.socket) -> Message:
            _send(connection, {"type": "rpc", "method": method, "timeout_seconds": timeout_seconds}, body)
            _, answer = _reply(connection)
            decoded: Message = json.loads(answer)
            return decoded

        answer: Message = await self._exchange(exchange, patient=patient)
        return answer

    async def upload(self, data: bytes, sha256: str) -> None:
        def exchange(connection: socket.socket) -> None:
            _send(connection, {"type": "upload", "sha256": sha256, "size_bytes": len(data)})
            view = memoryview(data)
            for start in range(0, len(view), CHUNK_BYTES):
                _send(connection, {"type": "data"}, bytes(view[start : start + CHUNK_BYTES]))
            _reply(connection)

        await self._exchange(exchange)

    async def download(self, sha256: str, size_bytes: int) -> bytes:
        def exchange(connection: socket.socket) -> bytes:
            _send(connection, {"type": "download", "sha256": sha256, "size_bytes": size_bytes})
            _reply(connection)
            data = bytearray()
            while len(data) < size_bytes:
                _, piece = _receive(connection)
                data.extend(piece)
            return bytes(data)

        data: bytes = await self._exchange(exchange)
        return data

    def read_logs(self, request: Message) -> Iterator[Message]:
        raise OuterProductError(f"logs of {request['attempt']} can not be read from inside a container")

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, exchange: Any, *, patient: bool = False) -> Any:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            try:
                return await loop.run_in_executor(self._in_this_process(), self._on_a_connection, exchange)
            except _Refused as refused:
                if not isinstance(refused.error, SchedulerUnavailable):
                    raise refused.error from None
                unavailable = refused.error
            except OSError as error:
                # The agent may be starting again.
                unavailable = SchedulerUnavailable(f"The agent's socket {self._path} does not answer: {error}")
            if not patient and loop.time() - started > RETRY_SECONDS:
                raise unavailable
            await asyncio.sleep(PAUSE_SECONDS)

    def _on_a_connection(self, exchange: Any) -> Any:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            answer = exchange(connection)
        except _Refused:
            self._idle.append(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._path)
            _send(connection, {"type": "hello", "protocol": 1, "role": "client"})
        except BaseException:
            connection.close()
            raise
        return connection


class _Refused(Exception):
    """The request was answered with an error; the connection is still good."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _reply(connection: socket.socket) -> tuple[Message, bytes]:
    header, body = _receive(connection)
    if header["type"] == "error":
        kind = BY_CODE.get(header["code"], OuterProductError)
        raise _Refused(kind(header["message"]))
    return header, body


def _send(connection: socket.socket, header: Message, body: bytes = b"") -> None:
    encoded = json.dumps(header).encode()
    connection.sendall(_LENGTHS.pack(len(encoded), len(body)) + encoded + body)


def _receive(connection: socket.socket) -> tuple[Message, bytes]:
    header_length, body_length = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    header: Message = json.loads(_exactly(connection, header_length))
    return header, _exactly(connection, body_length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), CHUNK_BYTES))
        if not piece:
            raise ConnectionResetError("the agent closed the connection")
        data.extend(piece)
    return bytes(data)
