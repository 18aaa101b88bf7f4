"""A gRPC server in this process for the commands to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from fake_scheduler import KEY, FakeScheduler

from outerproduct.v1 import node_service_pb2_grpc, run_service_pb2_grpc


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeScheduler]:
    """A scheduler that the commands of this test find by the environment."""
    # What it leaves out no command asks for; the generated class answers UNIMPLEMENTED.
    fake = FakeScheduler()  # type: ignore[abstract]
    server = grpc.server(futures.ThreadPoolExecutor(4))
    node_service_pb2_grpc.add_NodeServiceServicer_to_server(fake, server)
    run_service_pb2_grpc.add_RunServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    fake.base_url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("OUTERPRODUCT_BASE_URL", fake.base_url)
    monkeypatch.setenv("OUTERPRODUCT_API_KEY", KEY)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield fake
    server.stop(None).wait()
