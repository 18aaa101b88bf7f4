"""Every RPC of every service is in the table of roles, and refuses everybody who is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.unit.scheduler.scripted_agent import Scheduler, running_scheduler

from outerproduct.v1 import agent_gateway_pb2, blob_service_pb2, node_service_pb2, run_service_pb2
from outerproduct_scheduler import auth, keys
from outerproduct_scheduler.database import make_engine
from outerproduct_scheduler.errors import Conflict, InvalidArgument

MODULES = (run_service_pb2, node_service_pb2, blob_service_pb2, agent_gateway_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[Scheduler]:
    async with running_scheduler(tmp_path / "data") as running:
        yield running


async def code_of(scheduler: Scheduler, path: str, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    """The status of an empty request."""
    method = METHODS[path]
    kind = {
        (False, False): scheduler.channel.unary_unary,
        (False, True): scheduler.channel.unary_stream,
        (True, False): scheduler.channel.stream_unary,
        (True, True): scheduler.channel.stream_stream,
    }[method.client_streaming, method.server_streaming]
    call: Any = kind(path)

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield

    request: Any = nothing() if method.client_streaming else b""
    made = call(request, metadata=metadata, timeout=10)
    return grpc.StatusCode(await made.code())


def test_the_table_has_every_rpc_and_no_other() -> None:
    assert set(auth.ROLES) == set(METHODS)


@pytest.mark.parametrize("credential", ["", "wrong", "revoked", "forged attempt"])
async def test_no_rpc_answers_an_outsider(scheduler: Scheduler, credential: str) -> None:
    key = credential
    if credential == "revoked":
        engine = make_engine(scheduler.config.url)
        key = keys.create(engine, "gone", "operator")
        keys.revoke(engine, "gone")
    elif credential == "forged attempt":
        key = f"attempt:runs/x/calls/0/attempts/1:{'0' * 64}"
    metadata = scheduler.as_(key) if credential else ()
    for path in METHODS:
        assert await code_of(scheduler, path, metadata) == grpc.StatusCode.UNAUTHENTICATED, path


@pytest.mark.parametrize(("name", "role"), [("alice", "user"), ("root", "operator"), ("agent", "agent")])
async def test_every_rpc_refuses_the_roles_that_it_is_not_for(scheduler: Scheduler, name: str, role: str) -> None:
    for path in METHODS:
        code = await code_of(scheduler, path, scheduler.as_(name))
        if role in auth.ROLES[path]:
            assert code not in {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}, path
        else:
            assert code == grpc.StatusCode.PERMISSION_DENIED, path


async def test_a_key_is_stored_only_as_its_digest(scheduler: Scheduler) -> None:
    key = scheduler.keys["alice"]
    stored = b"".join(path.read_bytes() for path in scheduler.config.data_dir.glob("scheduler.sqlite3*"))
    assert key.encode() not in stored
    assert auth.digest_of(key).encode() in stored


async def test_names_of_keys_are_unique_until_revoked(scheduler: Scheduler) -> None:
    engine = make_engine(scheduler.config.url)
    keys.create(engine, "carol", "user")
    with pytest.raises(Conflict):
        keys.create(engine, "carol", "user")
    keys.revoke(engine, "carol")
    keys.create(engine, "carol", "user")
    with pytest.raises(InvalidArgument):
        keys.create(engine, "dave", "emperor")
