"""A scheduler with a client, and the same from inside a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.sdk.fake_agent_socket import FakeAgentSocket
from tests.unit.sdk.fake_scheduler import API_KEY, FakeScheduler

import outerproduct as op
from outerproduct._client import OuterProductClient
from outerproduct._socket_transport import SocketTransport


@pytest.fixture(scope="session")
def image() -> op.Image:
    return op.Image.from_registry("python:3.12-slim")


@pytest.fixture
def scheduler() -> Iterator[FakeScheduler]:
    fake = FakeScheduler()  # type: ignore[abstract]
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def client(scheduler: FakeScheduler) -> Iterator[OuterProductClient]:
    made = op.init(API_KEY, scheduler.address)
    yield made
    made.close()


@pytest.fixture
def agent_socket(tmp_path: Path) -> Iterator[FakeAgentSocket]:
    fake = FakeAgentSocket(tmp_path / "agent.sock", FakeScheduler())  # type: ignore[abstract]
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def inside(agent_socket: FakeAgentSocket) -> Iterator[OuterProductClient]:
    """The client of an Attempt."""
    made = OuterProductClient(SocketTransport(str(agent_socket.path)), "runs/r/calls/c/attempts/2")
    yield made
    made.close()
