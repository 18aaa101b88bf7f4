"""The agent's end of the socket for the SDK inside a container (docs/runner-protocol.md), before a FakeScheduler."""

from __future__ import annotations

import json
import re
import socketserver
import struct
import threading
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from tests.unit.sdk.fake_scheduler import FakeScheduler, Refused

from outerproduct.v1 import blob_service_pb2, node_service_pb2, run_service_pb2

_MODULES = {"RunService": run_service_pb2, "NodeService": node_service_pb2, "BlobService": blob_service_pb2}
_MAX_FRAME_BYTES = 4 * 1024**2


class FakeAgentSocket:
    """Serves one container. `refusals` are answered to the next RPCs, one each."""

    def __init__(self, path: Path, scheduler: FakeScheduler) -> None:
        self.path = path
        self.scheduler = scheduler
        self.refusals: list[Refused] = []
        self.hellos: list[dict[str, Any]] = []
        self.connections: set[Any] = set()
        self._server: socketserver.ThreadingUnixStreamServer | None = None

    def start(self) -> None:
        agent = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                agent.connections.add(self.connection)
                agent.serve(self.rfile, self.wfile)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            request_queue_size = 256

        self._server = Server(str(self.path), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """What a restart of the agent looks like from inside: every connection ends, and nobody listens."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            connection.close()
        self.connections.clear()
        self.path.unlink()

    def serve(self, reader: Any, writer: Any) -> None:
        try:
            self.hellos.append(_receive(reader)[0])
            while True:
                self._answer(reader, writer)
        except (ConnectionError, EOFError, ValueError):
            return

    def _answer(self, reader: Any, writer: Any) -> None:
        header, body = _receive(reader)
        try:
            if header["type"] == "rpc":
                if self.refusals:
                    raise self.refusals.pop(0)
                _send(writer, {"type": "reply"}, self._rpc(header["method"], body))
            elif header["type"] == "upload":
                data = b""
                while len(data) < header["size_bytes"]:
                    data += _receive(reader)[1]
                ref = self.scheduler.store(data)
                _send(writer, {"type": "reply"}, json.dumps({"sha256": ref.sha256}).encode())
            else:
                data = self.scheduler.blobs[header["sha256"]]
                _send(writer, {"type": "reply"})
                for start in range(0, len(data), 2**20):
                    _send(writer, {"type": "data"}, data[start : start + 2**20])
        except Refused as refused:
            _send(writer, {"type": "error", "code": refused.code, "message": str(refused)})

    def _rpc(self, method: str, body: bytes) -> bytes:
        service, _, name = method.partition("/")
        request = json_format.Parse(body, getattr(_MODULES[service], f"{name}Request")())
        answer = getattr(self.scheduler, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())(request)
        return json_format.MessageToJson(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ).encode()


def _receive(reader: Any) -> tuple[dict[str, Any], bytes]:
    lengths = reader.read(8)
    if len(lengths) < 8:
        raise EOFError
    header_length, body_length = struct.unpack(">II", lengths)
    assert header_length <= 65_536
    assert body_length <= _MAX_FRAME_BYTES
    header: dict[str, Any] = json.loads(reader.read(header_length))
    return header, reader.read(body_length)


def _send(writer: Any, header: dict[str, Any], body: bytes = b"") -> None:
    assert len(body) <= _MAX_FRAME_BYTES
    encoded = json.dumps(header).encode()
    writer.write(struct.pack(">II", len(encoded), len(body)) + encoded + body)
