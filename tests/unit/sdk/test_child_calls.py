"""The client inside a container: child Calls through the agent's socket, and their indices."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.sdk import programs
from tests.unit.sdk.fake_agent_socket import FakeAgentSocket
from tests.unit.sdk.fake_scheduler import API_KEY, Refused

import outerproduct as op
from outerproduct import _client, _socket_transport
from outerproduct._child_indices import ChildIndices
from outerproduct._client import OuterProductClient
from outerproduct._socket_transport import SocketTransport


def test_the_client_knows_where_it_is(inside: op.OuterProductClient) -> None:
    assert inside.run_id == "runs/r"
    assert inside.call_id == "runs/r/calls/c"
    assert inside.attempt == "runs/r/calls/c/attempts/2"


def test_run_makes_a_child_call(inside: op.OuterProductClient, agent_socket: FakeAgentSocket, image: op.Image) -> None:
    child = inside.run(fn=programs.add, args=(1,), image=image)
    assert isinstance(child, op.Call)
    assert child.wait() == 2
    assert agent_socket.hellos[0] == {"type": "hello", "protocol": 1, "role": "client"}


def test_children_take_their_indices_in_the_order_of_run(
    inside: op.OuterProductClient, agent_socket: FakeAgentSocket, image: op.Image
) -> None:
    async def main() -> None:
        started = [inside.run.aio(fn=programs.add, args=(x,), image=image) for x in range(5)]
        # Awaited in the other order.
        children = [await pending for pending in reversed(started)]
        assert [child.child_index for child in children if isinstance(child, op.Call)] == [4, 3, 2, 1, 0]

    asyncio.run(main())
    assert list(inside.map(programs.double, range(3), image=image)) == [0, 2, 4]
    assert sorted(agent_socket.scheduler.child_indices) == list(range(8))


def test_a_call_that_is_refused_here_takes_no_index(
    inside: op.OuterProductClient, agent_socket: FakeAgentSocket, image: op.Image
) -> None:
    with pytest.raises(ValueError, match="cpu=0"):
        inside.run(fn=programs.add, args=(1,), image=image, cpu=0)
    with pytest.raises(TypeError, match=r"args\[0\]"):
        inside.run(fn=programs.double, args=(threading.Lock(),), image=image)
    inside.run(fn=programs.add, args=(1,), image=image)
    assert agent_socket.scheduler.child_indices == [0]


def test_no_index_is_claimed_twice_by_threads() -> None:
    indices = ChildIndices()
    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(lambda _: indices.claim(), range(200))) == list(range(200))


def test_forked_processes_share_the_count() -> None:
    indices = ChildIndices()
    assert indices.claim() == 0
    child = os.fork()
    if child == 0:
        os._exit(indices.claim())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert indices.claim() == 2


def test_a_forked_process_opens_connections_of_its_own(
    inside: op.OuterProductClient, agent_socket: FakeAgentSocket
) -> None:
    inside.list_nodes()
    child = os.fork()
    if child == 0:
        os._exit(len(inside.list_nodes()))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert [node.name for node in inside.list_nodes()] == ["gpu-1"]
    assert len(agent_socket.hellos) == 2


def test_large_arguments_and_results_pass_the_socket(inside: op.OuterProductClient, image: op.Image) -> None:
    large = b"x" * 9_000_000
    assert inside.run(fn=lambda data: data, args=(large,), image=image).wait() == large


def test_answers_of_a_map_fit_a_frame(inside: op.OuterProductClient, image: op.Image) -> None:
    inputs = [bytes([x]) * 250_000 for x in range(40)]
    assert list(inside.map(lambda data: data, inputs, image=image)) == inputs


def test_many_waits_at_once_do_not_hold_each_other_up(
    inside: op.OuterProductClient, agent_socket: FakeAgentSocket, image: op.Image
) -> None:
    scheduler = agent_socket.scheduler
    scheduler.held.add("tests.unit.sdk.programs:double")
    children = [inside.run(fn=programs.double, args=(x,), image=image) for x in range(100)]

    async def main() -> list[int]:
        waits = [asyncio.ensure_future(child.wait.aio()) for child in children]
        await asyncio.to_thread(scheduler.wait_until, lambda: scheduler.waits >= 100)
        await asyncio.to_thread(scheduler.release)
        return await asyncio.gather(*waits)

    assert asyncio.run(main()) == [2 * x for x in range(100)]


def test_an_agent_that_restarts_is_met_again(inside: op.OuterProductClient, agent_socket: FakeAgentSocket) -> None:
    inside.list_nodes()
    agent_socket.stop()
    restart = threading.Timer(0.3, agent_socket.start)
    restart.start()
    assert len(inside.list_nodes()) == 1
    restart.join()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("FAILED_PRECONDITION", op.UnsupportedConfiguration),
        ("ALREADY_EXISTS", op.ChildMismatch),
        ("PERMISSION_DENIED", op.AccessDenied),
        ("NOT_FOUND", op.NotFound),
        ("INTERNAL", op.OuterProductError),
    ],
)
def test_refusals_become_the_errors_that_fit_at_once(
    inside: op.OuterProductClient, agent_socket: FakeAgentSocket, code: str, expected: type[Exception]
) -> None:
    agent_socket.refusals.append(Refused(code, "told why"))
    with pytest.raises(expected, match="told why"):
        inside.list_nodes()
    assert len(agent_socket.hellos) == 1
    assert len(inside.list_nodes()) == 1
    assert len(agent_socket.hellos) == 1  # The connection was still good.


def test_a_scheduler_that_is_away_is_asked_again(
    inside: op.OuterProductClient, agent_socket: FakeAgentSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_socket.refusals.append(Refused("UNAVAILABLE", "restarting"))
    assert len(inside.list_nodes()) == 1
    monkeypatch.setattr(_socket_transport, "RETRY_SECONDS", 0.0)
    agent_socket.refusals.append(Refused("UNAVAILABLE", "restarting"))
    with pytest.raises(op.SchedulerUnavailable, match="restarting"):
        inside.list_nodes()


def test_children_name_images_whose_files_only_the_caller_has(
    agent_socket: FakeAgentSocket, image: op.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = agent_socket.scheduler
    scheduler.start()
    (tmp_path / "weights").write_text("w")
    with_files = image.add_local_file(tmp_path / "weights", "/weights")
    monkeypatch.setattr(programs, "IMAGE", with_files, raising=False)
    op.init(API_KEY, scheduler.address).run(fn=programs.add, args=(1,), image=image)
    (tmp_path / "weights").unlink()

    monkeypatch.setenv(_client.LOCAL_FILES_VARIABLE, scheduler.specs[0].env_vars[_client.LOCAL_FILES_VARIABLE])
    inside = OuterProductClient(SocketTransport(str(agent_socket.path)), "runs/r/calls/c/attempts/1")
    inside.run(fn=programs.double, args=(1,), image=with_files)
    [mount] = scheduler.specs[1].image.mounts
    assert scheduler.blobs[mount.content.sha256] == b"w"
    # Its own children may name them as well.
    assert _client.LOCAL_FILES_VARIABLE in scheduler.specs[1].env_vars
    scheduler.stop()


def test_logs_can_not_be_read_inside(inside: op.OuterProductClient, image: op.Image) -> None:
    with pytest.raises(op.OuterProductError, match="inside a container"):
        list(inside._transport.read_logs({"attempt": "runs/r/calls/c/attempts/1"}))


def test_init_gives_the_attempts_client_once_per_process(
    agent_socket: FakeAgentSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_client, "_in_container", None)
    monkeypatch.setenv("OUTERPRODUCT_SOCKET", str(agent_socket.path))
    monkeypatch.setenv("OUTERPRODUCT_ATTEMPT", "runs/r/calls/c/attempts/1")
    first, second = op.init(), op.init()
    assert first is second
    assert first.run_id == "runs/r"
    assert len(first.list_nodes()) == 1
