"""Frames of the runner's socket (docs/runner-protocol.md): how they look on the wire, and nothing else.

Standard library and Python 3.9 only, as everything in this package: it runs in images that we know nothing of.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

PROTOCOL = 1
MAX_HEADER_BYTES = 64 * 1024
MAX_BODY_BYTES = 4 * 1024**2
CHUNK_BYTES = 1024**2
"""Large values travel in pieces of this size, so that neither side holds more than one beside the value itself."""

_LENGTHS = struct.Struct(">II")


class ProtocolError(Exception):
    """The other side sent something that is not a frame, or not the frame that had to come."""


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame as bytes."""
    encoded = json.dumps(header, separators=(",", ":")).encode()
    if len(encoded) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
        raise ProtocolError(f"frame {header.get('type')!r} is too large: {len(encoded)} + {len(body)} bytes")
    return _LENGTHS.pack(len(encoded), len(body)) + encoded + body


def send(connection: socket.socket, header: dict[str, Any], body: bytes = b"") -> None:
    connection.sendall(pack(header, body))


def send_data(connection: socket.socket, data: bytes | memoryview) -> None:
    """A value of any size as `data` frames; none for an empty one."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        send(connection, {"type": "data"}, bytes(view[start : start + CHUNK_BYTES]))


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The next frame. Raises ConnectionError when the connection has ended, ProtocolError when it is malformed."""
    header_length, body_length = _LENGTHS.unpack(_receive_exactly(connection, _LENGTHS.size))
    if header_length > MAX_HEADER_BYTES or body_length > MAX_BODY_BYTES:
        raise ProtocolError(f"frame is too large: {header_length} + {body_length} bytes")
    try:
        header = json.loads(_receive_exactly(connection, header_length))
    except ValueError as error:
        raise ProtocolError(f"frame header is not JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise ProtocolError("frame header is not a JSON object with a type")
    return header, bytes(_receive_exactly(connection, body_length))


def receive_type(connection: socket.socket, expected: str) -> tuple[dict[str, Any], bytes]:
    """The next frame, which must be of this type."""
    header, body = receive(connection)
    if header["type"] != expected:
        raise ProtocolError(f"expected a frame {expected!r}, got {header['type']!r}")
    return header, body


def receive_pieces(connection: socket.socket, size_bytes: int) -> Iterator[bytes]:
    """The bodies of `data` frames until `size_bytes` have come."""
    left = size_bytes
    while left:
        _, body = receive_type(connection, "data")
        if not body or len(body) > left:
            raise ProtocolError(f"data frame of {len(body)} bytes where {left} are left")
        left -= len(body)
        yield body


def receive_data(connection: socket.socket, size_bytes: int) -> bytearray:
    """A value that was sent by `send_data`."""
    data = bytearray(size_bytes)
    position = 0
    for piece in receive_pieces(connection, size_bytes):
        data[position : position + len(piece)] = piece
        position += len(piece)
    return data


def _receive_exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    position = 0
    while position < count:
        received = connection.recv_into(view[position:])
        if received == 0:
            raise ConnectionResetError("the connection was closed")
        position += received
    return data
