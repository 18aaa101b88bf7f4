"""The way to the scheduler from outside: credentials, a scheduler that restarts, and fork."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.unit.sdk import programs
from tests.unit.sdk.fake_scheduler import API_KEY, FakeScheduler

import outerproduct as op
from outerproduct import _grpc_transport
from outerproduct._grpc_transport import GrpcTransport


def test_each_request_carries_the_key(client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image) -> None:
    client.run(fn=programs.add, args=(1,), image=image).wait()
    assert set(scheduler.authorizations) == {f"Bearer {API_KEY}"}


def test_an_unknown_key_is_denied(scheduler: FakeScheduler) -> None:
    with pytest.raises(op.AccessDenied, match="unknown API key"):
        op.init("wrong", scheduler.address).list_nodes()


@pytest.mark.parametrize("base_url", ["127.0.0.1:50051", "grpc://127.0.0.1:1", "http://", ""])
def test_an_address_of_another_form_is_refused(base_url: str) -> None:
    with pytest.raises(ValueError, match="base_url="):
        GrpcTransport(base_url, API_KEY)


def test_a_scheduler_that_is_away_is_named_with_what_to_check(
    client: op.OuterProductClient, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_grpc_transport, "RETRY_SECONDS", 0.0)
    scheduler.stop()
    with pytest.raises(op.SchedulerUnavailable, match=rf"127\.0\.0\.1:{scheduler.port}.*outerproduct up"):
        client.list_nodes()


def test_a_submission_outlasts_a_restart_of_the_scheduler(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    client.list_nodes()
    scheduler.stop()
    restart = threading.Timer(0.5, scheduler.start)
    restart.start()
    assert client.run(fn=programs.add, args=(1,), image=image).wait() == 2
    restart.join()


def test_a_submission_whose_answer_was_lost_is_made_once(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    scheduler.lost_answers = 2
    client.run(fn=programs.add, args=(1,), image=image)
    assert len(scheduler.specs) == 1


def test_a_wait_outlasts_a_restart_of_the_scheduler(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    scheduler.held.add("tests.unit.sdk.programs:double")
    run = client.run(fn=programs.double, args=(4,), image=image)
    values: list[int] = []
    waiter = threading.Thread(target=lambda: values.append(run.wait()))
    waiter.start()
    scheduler.wait_until(lambda: scheduler.waits >= 1)
    scheduler.stop()
    scheduler.start()
    scheduler.wait_until(lambda: scheduler.waits >= 2)
    scheduler.release()
    waiter.join(30)
    assert values == [8]


def test_answers_may_be_larger_than_a_message_of_grpc(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    scheduler.largest_page = 1000
    for x in range(30):
        client.run(fn=lambda y: bytes([y]) * 250_000, args=(x,), image=image)
    assert [len(run.wait()) for run in client.list_runs()] == [250_000] * 30


FORKS = """
import multiprocessing, os, sys, threading
import outerproduct as op
from tests.unit.sdk import programs

client = op.init("op_test_key", sys.argv[1])
image = op.Image.from_registry("python:3.12-slim")

def child(x):
    return client.run(fn=programs.double, args=(x,), image=image).wait()

if __name__ == "__main__":
    assert client.run(fn=programs.double, args=(1,), image=image).wait() == 2
    held = client.run(fn=programs.add, args=(1,), image=image)
    waiter = threading.Thread(target=held.wait, daemon=True)
    waiter.start()
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        with context.Pool(1) as pool:
            assert pool.apply(child, (21,)) == 42
    assert client.run(fn=programs.double, args=(1,), image=image).wait() == 2
    print("done", flush=True)
    os._exit(0)
"""


def test_forked_processes_have_a_working_sdk_while_their_parent_waits(scheduler: FakeScheduler, tmp_path: Path) -> None:
    scheduler.held.add("tests.unit.sdk.programs:add")
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    repository = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, str(script), scheduler.address],
        capture_output=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": str(repository), "PATH": "/usr/bin"},
    )
    assert (ended.returncode, ended.stdout) == (0, b"done\n"), ended.stderr.decode()
