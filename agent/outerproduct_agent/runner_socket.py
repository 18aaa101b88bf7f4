"""The Unix socket of one container (docs/runner-protocol.md), the agent's end of it.

Nothing that arrives here is trusted: frames are bounded, bodies are never unpickled, large values go straight to disk,
and a connection that does not keep to the protocol is closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from outerproduct.v1 import call_pb2, payload_pb2
from outerproduct_agent.scheduler_link import Refused, SchedulerLink

log = structlog.get_logger()

MAX_HEADER_BYTES = 64 * 1024
MAX_BODY_BYTES = 4 * 1024**2
CHUNK_BYTES = 1024**2
INLINE_BYTES = 256 * 1024
MAX_OUTCOME_BYTES = 64 * 1024**3
MAX_CONNECTIONS = 256
"""At once from one container; more are closed. A function with that many open requests is a mistake or an attack."""
HELLO_SECONDS = 30.0

_LENGTHS = struct.Struct(">II")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_EXCEPTION_KINDS = {
    "EXCEPTION": call_pb2.FAILURE_KIND_EXCEPTION,
    "FUNCTION_NOT_LOADED": call_pb2.FAILURE_KIND_FUNCTION_NOT_LOADED,
    "RESULT_NOT_SERIALIZABLE": call_pb2.FAILURE_KIND_RESULT_NOT_SERIALIZABLE,
    "PYTHON_VERSION_MISMATCH": call_pb2.FAILURE_KIND_PYTHON_VERSION_MISMATCH,
    "DISK_FULL": call_pb2.FAILURE_KIND_DISK_FULL,
}


class ProtocolError(Exception):
    """The other side does not keep to the protocol."""


@dataclass(frozen=True, slots=True)
class CallForRunner:
    """What a runner gets. Function and arguments are bytes, or files when they are large."""

    header: dict[str, Any]
    env_vars: dict[str, str]
    function: bytes | Path
    arguments: bytes | Path


class RunnerHandler(Protocol):
    """What the socket's owner does."""

    async def call_for_runner(self, python: str) -> CallForRunner:
        """A runner has asked. On return, the Attempt is on record as running."""
        ...

    async def accepted(self) -> None:
        """The runner has everything."""
        ...

    async def take_outcome(self, outcome: call_pb2.Outcome, payload_file: Path | None) -> None:
        """Stores what the runner brought; it is told `received` on return."""
        ...


class RunnerSocket:
    """Serves one container."""

    def __init__(  # noqa: PLR0917
        self, folder: Path, scratch: Path, attempt: str, token: str, link: SchedulerLink, handler: RunnerHandler
    ) -> None:
        self._folder = folder
        self._scratch = scratch
        self._attempt = attempt
        self._token = token
        self._link = link
        self._handler = handler
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Binds the socket, over the one that an earlier agent may have left."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # The kernel bounds the path of a socket to 107 bytes; through the descriptor it is short.
            path = f"/proc/self/fd/{folder}/agent.sock"
            with suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
            # Any user of the image may connect; only this container has the folder.
            os.chmod(path, 0o666)  # noqa: S103
        finally:
            os.close(folder)
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
        self._server = await asyncio.start_unix_server(self._connected, sock=listener, limit=CHUNK_BYTES)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs this callback as a task
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._serve(_Connection(reader, writer))
        except (ProtocolError, ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
            if not isinstance(error, asyncio.IncompleteReadError) or error.partial:
                log.info("container_connection_closed", attempt=self._attempt, reason=repr(error)[:200])
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, connection: _Connection) -> None:
        async with asyncio.timeout(HELLO_SECONDS):
            hello, _ = await connection.receive("hello")
        if hello.get("protocol") != 1:
            raise ProtocolError(f"protocol {hello.get('protocol')!r}")
        role, state = hello.get("role"), hello.get("state")
        if role == "runner" and state == "ready":
            await self._give_call(connection, str(hello.get("python", "")))
        elif role == "runner" and state == "finished":
            await self._take_outcome(connection)
        elif role == "client":
            while True:
                await self._answer(connection)
        else:
            raise ProtocolError(f"role {role!r}, state {state!r}")

    async def _give_call(self, connection: _Connection, python: str) -> None:
        call = await self._handler.call_for_runner(python)
        await connection.send(call.header, json.dumps(call.env_vars).encode())
        for part in (call.function, call.arguments):
            await connection.send_data(part)
        await connection.receive("accepted")
        await self._handler.accepted()

    async def _take_outcome(self, connection: _Connection) -> None:
        header, _ = await connection.receive(None)
        size = header.get("bytes")
        if not isinstance(size, int) or not 0 <= size <= MAX_OUTCOME_BYTES:
            raise ProtocolError(f"outcome of {size!r} bytes")
        payload, file = await self._payload(connection, size)
        outcome = call_pb2.Outcome()
        if header["type"] == "result":
            outcome.result.CopyFrom(payload)
            outcome.result_preview = _text(header, "preview", 200)
        elif header["type"] == "exception":
            failure = outcome.failure
            failure.kind = _EXCEPTION_KINDS.get(str(header.get("kind")), call_pb2.FAILURE_KIND_EXCEPTION)
            failure.message = _text(header, "message", 16 * 1024)
            failure.exception_type = _text(header, "exception_type", 512)
            failure.traceback = _text(header, "traceback", 64 * 1024)
            if size:
                failure.exception.CopyFrom(payload)
        else:
            raise ProtocolError(f"frame {header['type']!r} where an outcome had to come")
        await self._handler.take_outcome(outcome, file)
        await connection.send({"type": "received"})

    async def _payload(self, connection: _Connection, size: int) -> tuple[payload_pb2.Payload, Path | None]:
        if size <= INLINE_BYTES:
            data = b"".join([piece async for piece in connection.data(size)])
            return payload_pb2.Payload(inline=data), None
        path = self._scratch / "outcome"
        digest = await _to_file(connection.data(size), path)
        return payload_pb2.Payload(blob=payload_pb2.BlobRef(sha256=digest, size_bytes=size)), path

    async def _answer(self, connection: _Connection) -> None:
        header, body = await connection.receive(None)
        try:
            if header["type"] == "rpc":
                answer = await self._link.forward(str(header.get("method", "")), body, self._token)
                await connection.send({"type": "reply"}, answer)
            elif header["type"] == "upload":
                await self._upload(connection, header)
            elif header["type"] == "download":
                await self._download(connection, header)
            else:
                raise ProtocolError(f"frame {header['type']!r} where a request had to come")
        except Refused as refused:
            await connection.send({"type": "error", "code": refused.code, "message": str(refused)[: 32 * 1024]})

    async def _upload(self, connection: _Connection, header: dict[str, Any]) -> None:
        ref = _blob_ref(header)
        path = self._scratch / f"upload-{os.urandom(8).hex()}"
        try:
            digest = await _to_file(connection.data(ref.size_bytes), path)
            if digest != ref.sha256:
                raise Refused("INVALID_ARGUMENT", f"the content has digest {digest}, not {ref.sha256}")
            await self._link.upload(path, ref)
        finally:
            path.unlink(missing_ok=True)
        await connection.send({"type": "reply"}, json.dumps({"sha256": ref.sha256}).encode())

    async def _download(self, connection: _Connection, header: dict[str, Any]) -> None:
        ref = _blob_ref(header)
        path = self._scratch / f"download-{os.urandom(8).hex()}"
        try:
            await self._link.download(ref, path)
            if path.stat().st_size != ref.size_bytes:
                raise Refused("INVALID_ARGUMENT", f"blob {ref.sha256} does not have {ref.size_bytes} bytes")
            await connection.send({"type": "reply"})
            await connection.send_data(path)
        finally:
            path.unlink(missing_ok=True)


class _Connection:
    """Frames on a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def receive(self, expected: str | None) -> tuple[dict[str, Any], bytes]:
        header_length, body_length = _LENGTHS.unpack(await self._reader.readexactly(_LENGTHS.size))
        if header_length > MAX_HEADER_BYTES or body_length > MAX_BODY_BYTES:
            raise ProtocolError(f"frame of {header_length} + {body_length} bytes")
        try:
            header = json.loads(await self._reader.readexactly(header_length))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"header is not JSON: {error}") from None
        if not isinstance(header, dict) or not isinstance(header.get("type"), str):
            raise ProtocolError("header is not an object with a type")
        if expected is not None and header["type"] != expected:
            raise ProtocolError(f"frame {header['type']!r} where {expected!r} had to come")
        return header, await self._reader.readexactly(body_length)

    async def data(self, size: int) -> AsyncIterator[bytes]:
        left = size
        while left:
            _, body = await self.receive("data")
            if not body or len(body) > left:
                raise ProtocolError(f"data of {len(body)} bytes where {left} are left")
            left -= len(body)
            yield body

    async def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        encoded = json.dumps(header).encode()
        self._writer.write(_LENGTHS.pack(len(encoded), len(body)) + encoded + body)
        await self._writer.drain()

    async def send_data(self, part: bytes | Path) -> None:
        if isinstance(part, bytes):
            for start in range(0, len(part), CHUNK_BYTES):
                await self.send({"type": "data"}, part[start : start + CHUNK_BYTES])
            return
        file = await asyncio.to_thread(part.open, "rb")
        with file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                await self.send({"type": "data"}, chunk)


async def _to_file(pieces: AsyncIterator[bytes], path: Path) -> str:
    """Writes and syncs; the SHA-256 of it."""
    digest = hashlib.sha256()
    file = await asyncio.to_thread(path.open, "wb")
    with file:
        async for piece in pieces:
            digest.update(piece)
            await asyncio.to_thread(file.write, piece)
        await asyncio.to_thread(_sync, file)
    return digest.hexdigest()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _blob_ref(header: dict[str, Any]) -> payload_pb2.BlobRef:
    sha256, size = header.get("sha256"), header.get("size_bytes")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ProtocolError("a blob needs sha256 with 64 lower-case hex digits")
    if not isinstance(size, int) or not 0 <= size <= MAX_OUTCOME_BYTES:
        raise ProtocolError("a blob needs size_bytes")
    return payload_pb2.BlobRef(sha256=sha256, size_bytes=size)


def _text(header: dict[str, Any], name: str, limit: int) -> str:
    # Lone surrogates can stand in JSON and not in protobuf.
    return str(header.get(name, ""))[:limit].encode(errors="replace").decode()
