"""`kill -9` of the real thing: what was acknowledged ends with its one true outcome."""

from __future__ import annotations

import time

import docker
import pytest
from tests.integration.programs import inside
from tests.support.engine import attempt_containers
from tests.support.stack import Stack

import outerproduct as op

pytestmark = pytest.mark.docker
MIB = 1024**2
SMALL = {"memory_bytes": 128 * MIB}


def until(condition: object, seconds: float = 60) -> None:
    """Polls; used where there is no event to wait for."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


def started(run: op.Run[object]) -> bool:
    return run.refresh().root_call.started_at is not None


def container_of(stack: Stack) -> str:
    """Id of the one container of the agent."""
    client = docker.from_env()
    try:
        [found] = client.containers.list(filters={"label": f"outerproduct.agent={stack.agent_id()}"})
        return str(found.id)
    finally:
        client.close()


def test_a_call_outlives_its_agent_and_runs_once(stack: Stack, image: op.Image) -> None:
    run = stack.client().run(fn=inside.count_slowly, args=(60,), image=image, **SMALL)
    until(lambda: started(run))
    container = container_of(stack)
    stack.agents["box"].kill()
    stack.agents["box"].start()
    stack.wait_node("box")
    assert container_of(stack) == container
    assert run.wait(timeout=120) == 60
    assert run.refresh().root_call.attempt_count == 1
    text = "".join(str(piece) for piece in run.logs(follow=True))
    assert text.splitlines() == [f"line {number}" for number in range(60)]


def test_an_outcome_waits_for_an_agent_that_is_away(stack: Stack, image: op.Image) -> None:
    run = stack.client().run(fn=inside.count_slowly, args=(20,), image=image, **SMALL)
    until(lambda: started(run))
    stack.agents["box"].kill()
    time.sleep(4)  # The function ends while nobody listens.
    stack.agents["box"].start()
    assert run.wait(timeout=120) == 20
    assert run.refresh().root_call.attempt_count == 1


def test_a_process_that_dies_while_its_agent_is_away_is_told_as_it_was(stack: Stack, image: op.Image) -> None:
    run = stack.client().run(fn=inside.sleep, args=(600,), image=image, **SMALL)
    until(lambda: started(run))
    container = container_of(stack)
    stack.agents["box"].kill()
    client = docker.from_env()
    client.api.kill(container)
    client.close()
    stack.agents["box"].start()
    with pytest.raises(op.KilledExternally):
        run.wait(timeout=120)


def test_a_call_outlives_its_scheduler_and_the_waiter_notices_nothing(stack: Stack, image: op.Image) -> None:
    client = stack.client()
    run = client.run(fn=inside.count_slowly, args=(40,), image=image, **SMALL)
    waiting = client.run(fn=inside.add, args=(1, 2), image=image, cpu=2, **SMALL)
    until(lambda: started(run))
    container = container_of(stack)
    stack.scheduler.kill()
    stack.start_scheduler()
    assert run.wait(timeout=120) == 40
    assert waiting.wait(timeout=120) == 3
    assert run.refresh().root_call.attempt_count == 1
    assert container not in attempt_containers(stack.agent_id())


def test_both_killed_at_once(stack: Stack, image: op.Image) -> None:
    run = stack.client().run(fn=inside.count_slowly, args=(40,), image=image, **SMALL)
    until(lambda: started(run))
    stack.scheduler.kill()
    stack.agents["box"].kill()
    stack.start_scheduler()
    stack.agents["box"].start()
    assert run.wait(timeout=120) == 40
    assert run.refresh().root_call.attempt_count == 1


def test_a_cancellation_reaches_an_agent_that_was_away(stack: Stack, image: op.Image) -> None:
    run = stack.client().run(fn=inside.sleep, args=(600,), image=image, **SMALL)
    until(lambda: started(run))
    stack.agents["box"].kill()
    run.cancel()
    assert run.refresh().status == op.RunStatus.CANCELLING
    stack.agents["box"].start()
    with pytest.raises(op.Cancelled):
        run.wait(timeout=120)
    assert attempt_containers(stack.agent_id()) == []


def test_an_adopted_call_keeps_its_cpus_from_others(stack: Stack, image: op.Image) -> None:
    client = stack.client()
    first = client.run(fn=inside.look_and_hold, args=(8.0,), image=image, **SMALL)
    until(lambda: started(first))
    stack.agents["box"].kill()
    stack.agents["box"].start()
    stack.wait_node("box")
    second = client.run(fn=inside.look_and_hold, args=(0.1,), image=image, **SMALL)
    cpus_second, began, _ = second.wait(timeout=120)
    cpus_first, _, ended = first.wait(timeout=120)
    assert began < ended, "the two did not run at the same time"
    assert not set(cpus_first) & set(cpus_second)
