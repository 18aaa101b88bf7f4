"""The frames of the runner's socket (`docs/runner-protocol.md`): a JSON header and a body of raw bytes.

Connecting and the order of frames are left to `connection`.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    import socket

MAX_HEADER_BYTES = 64 * 1024
MAX_BODY_BYTES = 4 * 1024 * 1024
DATA_BYTES = 1024 * 1024
"""Longer things are cut in `data` frames of this size."""

_LENGTHS = struct.Struct(">II")

Header = dict[str, Any]
Bytes = Union[bytes, bytearray, memoryview]  # noqa: UP007 - evaluated on Python 3.9


class ProtocolError(ConnectionError):
    """The other side sent something that is no frame, or one over the limits."""


def send(connection: socket.socket, header: Header, body: Bytes = b"") -> None:
    """Sends one frame. Raises `OSError` when the connection is gone."""
    encoded = json.dumps(header, ensure_ascii=False).encode("utf-8", "replace")
    if len(encoded) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
        raise ProtocolError(f"frame {header.get('type')!r} is over the limits of the runner's socket")
    connection.sendall(_LENGTHS.pack(len(encoded), len(body)) + encoded)
    if body:
        connection.sendall(body)


def send_data(connection: socket.socket, data: Bytes) -> None:
    """Sends `data` as `data` frames; none when it is empty."""
    view = memoryview(data)
    for start in range(0, len(view), DATA_BYTES):
        send(connection, {"type": "data"}, view[start : start + DATA_BYTES])


def receive(connection: socket.socket) -> tuple[Header, bytearray]:
    """Receives one frame.

    Raises:
        ConnectionError: the connection ended, or what came is no frame.
    """
    header_bytes, body_bytes = _LENGTHS.unpack(_receive_exactly(connection, _LENGTHS.size))
    if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise ProtocolError("frame over the limits of the runner's socket")
    try:
        header = json.loads(_receive_exactly(connection, header_bytes))
    except ValueError as error:
        raise ProtocolError(f"header of a frame is no JSON: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise ProtocolError("header of a frame has no type")
    return header, _receive_exactly(connection, body_bytes)


def receive_data(connection: socket.socket, size_bytes: int) -> bytearray:
    """Receives `data` frames with `size_bytes` bytes in all."""
    data = bytearray()
    while len(data) < size_bytes:
        header, body = receive(connection)
        if header["type"] != "data" or not body or len(data) + len(body) > size_bytes:
            raise ProtocolError(f"expected {size_bytes - len(data)} more bytes, got frame {header['type']!r}")
        data += body
    return data


def _receive_exactly(connection: socket.socket, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    view = memoryview(data)
    received = 0
    while received < size_bytes:
        count = connection.recv_into(view[received:])
        if count == 0:
            raise ConnectionError("the agent closed the connection")
        received += count
    return data
