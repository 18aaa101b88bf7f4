"""What arrives from a container is not trusted: malformed frames end their connection and nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outerproduct.v1 import call_pb2
from outerproduct_agent.runner_socket import MAX_BODY_BYTES, MAX_HEADER_BYTES, CallForRunner, RunnerSocket
from outerproduct_agent.scheduler_link import Refused, SchedulerLink

LENGTHS = struct.Struct(">II")


class Handler:
    """Records what the socket was told."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[call_pb2.Outcome, bytes | None]] = []
        self.accepted_calls = 0

    async def call_for_runner(self, python: str) -> CallForRunner:
        header = {"type": "call", "python": python, "function_bytes": 0, "arguments_bytes": 3}
        return CallForRunner(header, {"NAME": "value"}, b"", b"abc")

    async def accepted(self) -> None:
        self.accepted_calls += 1

    async def take_outcome(self, outcome: call_pb2.Outcome, payload_file: Path | None) -> None:
        self.outcomes.append((outcome, payload_file.read_bytes() if payload_file else None))


class Link:
    """Answers one method; everything else is refused, as the real link does."""

    async def forward(self, method: str, request_json: bytes, token: str) -> bytes:
        if method != "RunService/GetMe":
            raise Refused("PERMISSION_DENIED", f"{method} can not be called")
        return json.dumps({"token": token, "asked": json.loads(request_json)}).encode()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Path, Handler]]:
    # A long path, beyond what the kernel takes for a socket.
    folder = tmp_path / ("deep" * 20) / ("deeper" * 10)
    folder.mkdir(parents=True)
    handler = Handler()
    server = RunnerSocket(folder, tmp_path, "a", "secret", cast("SchedulerLink", Link()), handler)
    await server.open()
    yield folder, handler
    await server.close()


class Client:
    """Frames over a plain socket, as the runner sends them."""

    def __init__(self, folder: Path) -> None:
        import os

        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(10)
        descriptor = os.open(folder, os.O_RDONLY)
        self._socket.connect(f"/proc/self/fd/{descriptor}/agent.sock")
        os.close(descriptor)

    def send(self, header: Any, body: bytes = b"") -> None:
        encoded = json.dumps(header).encode()
        self._socket.sendall(LENGTHS.pack(len(encoded), len(body)) + encoded + body)

    def send_raw(self, data: bytes) -> None:
        self._socket.sendall(data)
        self._socket.shutdown(socket.SHUT_WR)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        header, body = LENGTHS.unpack(self._exactly(8))
        return json.loads(self._exactly(header)), self._exactly(body)

    def rest(self) -> bytes:
        data = b""
        while piece := self._socket.recv(65536):
            data += piece
        return data

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise ConnectionResetError
            data += piece
        return data

    def close(self) -> None:
        self._socket.close()


def hello(role: str, **fields: Any) -> dict[str, Any]:
    return {"type": "hello", "protocol": 1, "role": role, **fields}


async def test_a_runner_gets_its_call_and_brings_its_outcome(served: tuple[Path, Handler]) -> None:
    folder, handler = served

    def talk() -> None:
        client = Client(folder)
        client.send(hello("runner", state="ready", python="3.12"))
        header, body = client.receive()
        assert (header["python"], json.loads(body)) == ("3.12", {"NAME": "value"})
        assert client.receive() == ({"type": "data"}, b"abc")
        client.send({"type": "accepted"})
        client.close()
        client = Client(folder)
        client.send(hello("runner", state="finished"))
        client.send({"type": "result", "bytes": 5, "preview": "p\ud800"})
        client.send({"type": "data"}, b"hello")
        assert client.receive()[0] == {"type": "received"}
        client.close()

    await asyncio.to_thread(talk)
    [(outcome, file)] = handler.outcomes
    assert (outcome.result.inline, file) == (b"hello", None)
    assert handler.accepted_calls == 1


async def test_a_large_outcome_goes_to_a_file(served: tuple[Path, Handler]) -> None:
    folder, handler = served
    data = bytes(range(256)) * 4096

    def talk() -> None:
        client = Client(folder)
        client.send(hello("runner", state="finished"))
        client.send({"type": "result", "bytes": len(data)})
        client.send({"type": "data"}, data)
        assert client.receive()[0] == {"type": "received"}
        client.close()

    await asyncio.to_thread(talk)
    [(outcome, file)] = handler.outcomes
    assert file == data
    assert outcome.result.blob.size_bytes == len(data)


async def test_rpcs_go_on_with_the_attempts_credential_and_others_are_refused(served: tuple[Path, Handler]) -> None:
    folder, _ = served

    def talk() -> None:
        client = Client(folder)
        client.send(hello("client"))
        client.send({"type": "rpc", "method": "RunService/GetMe"}, b"{}")
        header, body = client.receive()
        assert header == {"type": "reply"}
        assert json.loads(body)["token"] == "secret"
        client.send({"type": "rpc", "method": "NodeService/DrainNode"}, b"{}")
        assert client.receive()[0]["code"] == "PERMISSION_DENIED"
        client.close()

    await asyncio.to_thread(talk)


@pytest.mark.parametrize(
    "data",
    [
        LENGTHS.pack(MAX_HEADER_BYTES + 1, 0),
        LENGTHS.pack(2, MAX_BODY_BYTES + 1) + b"{}",
        LENGTHS.pack(2, 0) + b"[]",
        LENGTHS.pack(3, 0) + b"\xff\xff\xff",
        b"\x00",
    ],
)
async def test_a_malformed_frame_ends_its_connection_only(served: tuple[Path, Handler], data: bytes) -> None:
    folder, handler = served

    def talk() -> None:
        client = Client(folder)
        client.send_raw(data)
        assert client.rest() == b""
        client.close()

    await asyncio.to_thread(talk)
    await test_a_runner_gets_its_call_and_brings_its_outcome((folder, handler))


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=64),
            st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8), max_size=4),
        ),
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_sequence_of_frames_brings_it_down(tmp_path_factory: pytest.TempPathFactory, frames: list[Any]) -> None:
    async def run() -> None:
        folder = tmp_path_factory.mktemp("fuzz")
        handler = Handler()
        server = RunnerSocket(folder, folder, "a", "secret", cast("SchedulerLink", Link()), handler)
        await server.open()

        def talk() -> None:
            client = Client(folder)
            data = b""
            for frame in frames:
                encoded = frame if isinstance(frame, bytes) else json.dumps({"type": "hello", **frame}).encode()
                data += encoded if isinstance(frame, bytes) else LENGTHS.pack(len(encoded), 0) + encoded
            client.send_raw(data)
            client.rest()
            client.close()

        await asyncio.to_thread(talk)
        assert handler.outcomes == []
        await server.close()

    asyncio.run(run())
