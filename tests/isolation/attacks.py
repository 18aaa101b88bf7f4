"""Functions that run as Calls and do their worst to the machine, the agent and other Calls; standard library only."""

from __future__ import annotations

import _thread
import json
import os
import socket
import struct

SOCKET = "/run/outerproduct/agent.sock"
_LENGTHS = struct.Struct(">II")
_HELLO = {"type": "hello", "protocol": 1, "role": "client"}


def start_threads_until_refused() -> int:
    """How many could be started. Threads count against the limit of processes, and need least memory."""
    gate = _thread.allocate_lock()
    gate.acquire()
    _thread.stack_size(64 * 1024)
    started = 0
    try:
        while started < 100_000:
            _thread.start_new_thread(gate.acquire, ())
            started += 1
    except RuntimeError:
        return started
    return started


def ask(requests: list[tuple[str, dict[str, object]]]) -> list[str]:
    """Sends RPCs as the SDK does; of each the error's code, or "reply"."""
    answers = []
    for method, request in requests:
        with _connection() as connection:
            _send(connection, {"type": "rpc", "method": method}, json.dumps(request).encode())
            header = _header(connection)
            answers.append(str(header.get("code", header["type"])))
    return answers


def send_forged_frames() -> list[str]:
    """Whatever the protocol forbids, one on each connection, and then a request in order: what came of that."""
    forged = [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        _LENGTHS.pack(2**32 - 1, 2**32 - 1),
        _LENGTHS.pack(64 * 1024, 4 * 1024**2) + b"x",
        _frame(b"{"),
        _frame(b"[" * 60_000),
        _frame(b'"text"'),
        _frame(b'{"type": 1}'),
        _frame(b"\xff\xfe"),
        _frame(json.dumps({"type": "hello", "protocol": 2, "role": "client"}).encode()),
        _frame(json.dumps({"type": "hello", "protocol": 1, "role": ["client"]}).encode()),
        _frame(json.dumps({"type": "hello", "protocol": 1, "role": "scheduler"}).encode()),
        *(
            _frame(json.dumps(_HELLO).encode()) + _frame(json.dumps(header).encode())
            for header in (
                {"type": "shutdown"},
                {"type": "rpc"},
                {"type": "rpc", "method": None},
                {"type": "rpc", "method": ["RunService/GetMe"]},
                {"type": "rpc", "method": "RunService/GetMe" + "x" * 1000},
                {"type": "upload", "sha256": "../../../etc/passwd", "size_bytes": 0},
                {"type": "upload", "sha256": "0" * 64, "size_bytes": -1},
                {"type": "upload", "sha256": "0" * 64, "size_bytes": 2**80},
                {"type": "upload", "sha256": "0" * 64, "size_bytes": True},
                {"type": "download", "sha256": "\ud800", "size_bytes": 1},
                {"type": "download", "sha256": "../agent.sqlite3", "size_bytes": 1},
            )
        ),
        *(
            _frame(json.dumps({"type": "hello", "protocol": 1, "role": "runner", "state": "finished"}).encode())
            + _frame(json.dumps(header).encode())
            for header in (
                {"type": "nothing"},
                {"type": "result", "bytes": "many"},
                {"type": "result", "bytes": 2**70},
            )
        ),
    ]
    for data in forged:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(SOCKET)
            connection.sendall(data)
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(400)]
    for one in crowd:
        one.setblocking(False)
        one.connect_ex(SOCKET)
    for one in crowd:
        one.close()
    return ask([("RunService/GetMe", {})])


def fill_memory() -> None:
    """Takes and touches it until it is killed."""
    held = []
    while True:
        held.append(b"x" * 1024**2)


def paths_that_exist(paths: list[str]) -> list[str]:
    """Of these."""
    return [path for path in paths if os.path.exists(path)]


def _connection() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(SOCKET)
    _send(connection, _HELLO)
    return connection


def _send(connection: socket.socket, header: dict[str, object], body: bytes = b"") -> None:
    connection.sendall(_frame(json.dumps(header).encode(), body))


def _frame(header: bytes, body: bytes = b"") -> bytes:
    return _LENGTHS.pack(len(header), len(body)) + header + body


def _header(connection: socket.socket) -> dict[str, object]:
    with connection.makefile("rb") as stream:
        header_bytes, _ = _LENGTHS.unpack(stream.read(_LENGTHS.size))
        header: dict[str, object] = json.loads(stream.read(header_bytes))
        return header
