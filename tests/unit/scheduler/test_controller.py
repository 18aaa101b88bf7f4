"""The life of Runs, Calls and Attempts, through the real server and agents that follow a script."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.unit.scheduler.scripted_agent import GIB, Scheduler, ScriptedAgent, call_spec, running_scheduler

from outerproduct.v1 import call_pb2 as pb
from outerproduct.v1 import node_service_pb2, resources_pb2, run_service_pb2
from outerproduct_scheduler import retry


@pytest.fixture
async def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scheduler]:
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(retry, "LONGEST_PAUSE_SECONDS", 0.02)
    async with running_scheduler(tmp_path / "data") as running:
        yield running


@pytest.fixture
async def agent(scheduler: Scheduler) -> ScriptedAgent:
    made = ScriptedAgent(scheduler)
    await made.connect()
    return made


async def test_a_call_is_assigned_runs_and_its_result_wakes_the_waiter(
    scheduler: Scheduler, agent: ScriptedAgent
) -> None:
    run = await scheduler.submit()
    assign = await agent.next_of("assign")
    assert assign.attempt == f"{run.root_call.name}/attempts/1"
    assert assign.created_by == "alice"
    await agent.running(assign.attempt)
    await agent.completed(assign.attempt, b"42")
    call = await scheduler.wait(run.root_call.name)
    assert call.status == pb.CALL_STATUS_COMPLETED
    assert call.outcome.result.inline == b"42"
    assert call.HasField("started_at")


async def test_every_update_is_acknowledged_after_it_is_stored(scheduler: Scheduler, agent: ScriptedAgent) -> None:
    await scheduler.submit()
    assign = await agent.next_of("assign")
    sequence = await agent.report(assign.attempt, pb.ATTEMPT_STATUS_RUNNING)
    assert (await agent.next_of("acknowledge")).sequence == sequence


async def test_the_same_request_is_the_same_run_and_another_is_an_error(
    scheduler: Scheduler, agent: ScriptedAgent
) -> None:
    run_id = str(uuid.uuid4())
    first = await scheduler.submit(run_id=run_id)
    assert (await scheduler.submit(run_id=run_id)).name == first.name
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scheduler.submit(call_spec(compute={"cpus": 2}), run_id=run_id)
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS


async def test_without_a_node_and_without_a_fit_submission_is_refused_with_what_there_is(scheduler: Scheduler) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no node has registered") as caught:
        await scheduler.submit()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    agent = ScriptedAgent(scheduler, node="gpu-1", accelerators={"L4": 2})
    await agent.connect()
    with pytest.raises(grpc.aio.AioRpcError, match="L4"):
        await scheduler.submit(call_spec(compute={"accelerator": "H100", "accelerator_count": 1}))


async def test_a_declined_attempt_is_placed_again_and_never_counts(scheduler: Scheduler, agent: ScriptedAgent) -> None:
    run = await scheduler.submit()
    for number in range(1, retry.INFRASTRUCTURE_ALLOWANCE + 3):
        assign = await agent.next_of("assign")
        assert assign.number == number
        await agent.failed(assign.attempt, pb.FAILURE_KIND_DECLINED, never_started=True)
    assign = await agent.next_of("assign")
    await agent.completed(assign.attempt)
    assert (await scheduler.wait(run.root_call.name)).status == pb.CALL_STATUS_COMPLETED


async def test_failures_before_the_start_are_repeated_until_their_allowance_is_used(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outerproduct_scheduler.nodes.FIRST_QUARANTINE_SECONDS", 0.0)
    agent = ScriptedAgent(scheduler)
    await agent.connect()
    run = await scheduler.submit()
    for _ in range(retry.INFRASTRUCTURE_ALLOWANCE + 1):
        assign = await agent.next_of("assign")
        await agent.failed(assign.attempt, pb.FAILURE_KIND_CONTAINER_ENGINE, never_started=True)
    call = await scheduler.wait(run.root_call.name)
    assert call.status == pb.CALL_STATUS_FAILED
    assert call.attempt_count == retry.INFRASTRUCTURE_ALLOWANCE + 1


async def test_a_node_that_fails_starts_one_after_another_is_set_aside_visibly(
    scheduler: Scheduler, agent: ScriptedAgent
) -> None:
    run = await scheduler.submit()
    for _ in range(3):
        assign = await agent.next_of("assign")
        await agent.failed(
            assign.attempt, pb.FAILURE_KIND_CONTAINER_ENGINE, never_started=True, message="no space on device"
        )
    await agent.next_of("acknowledge")
    node = await scheduler.nodes.GetNode(
        node_service_pb2.GetNodeRequest(name="box"), metadata=scheduler.as_("alice"), timeout=10
    )
    assert node.status.condition == node_service_pb2.NODE_CONDITION_QUARANTINED
    assert "no space on device" in node.status.reason
    assert (await scheduler.get_call(run.root_call.name)).status == pb.CALL_STATUS_RUNNING


async def test_once_started_only_the_retry_strategy_repeats(scheduler: Scheduler, agent: ScriptedAgent) -> None:
    spec = call_spec(retry_strategy=pb.RetryStrategy(max_attempts=2))
    run = await scheduler.submit(spec)
    for number in (1, 2):
        assign = await agent.next_of("assign")
        assert assign.number == number
        await agent.running(assign.attempt)
        await agent.failed(assign.attempt, pb.FAILURE_KIND_EXCEPTION)
    call = await scheduler.wait(run.root_call.name)
    assert (call.status, call.attempt_count) == (pb.CALL_STATUS_FAILED, 2)


async def test_a_kind_of_failure_that_only_a_newer_agent_knows_is_still_an_end(
    scheduler: Scheduler, agent: ScriptedAgent
) -> None:
    run = await scheduler.submit()
    assign = await agent.next_of("assign")
    await agent.running(assign.attempt)
    await agent.failed(assign.attempt, 99)
    assert (await scheduler.wait(run.root_call.name)).status == pb.CALL_STATUS_FAILED


async def test_a_waiting_call_is_cancelled_at_once(scheduler: Scheduler, agent: ScriptedAgent) -> None:
    await scheduler.submit(call_spec(compute={"cpus": 4}))
    await agent.next_of("assign")
    waiting = await scheduler.submit()
    assert "waiting for" in (await scheduler.get_call(waiting.root_call.name)).pending_reason
    cancelled = await scheduler.runs.CancelRun(
        run_service_pb2.CancelRunRequest(name=waiting.name), metadata=scheduler.as_("alice"), timeout=10
    )
    assert cancelled.status == pb.RUN_STATUS_CANCELLED


async def test_cancelling_a_running_call_tells_the_agent_and_ends_with_its_word(
    scheduler: Scheduler, agent: ScriptedAgent
) -> None:
    run = await scheduler.submit()
    assign = await agent.next_of("assign")
    await agent.running(assign.attempt)
    await agent.next_of("acknowledge")
    await scheduler.runs.CancelRun(
        run_service_pb2.CancelRunRequest(name=run.name), metadata=scheduler.as_("alice"), timeout=10
    )
    cancel = await agent.next_of("cancel")
    assert (cancel.attempt, cancel.reason) == (assign.attempt, pb.FAILURE_KIND_CANCELLED)
    assert (await scheduler.get_call(run.root_call.name)).status == pb.CALL_STATUS_CANCELLING
    await agent.failed(assign.attempt, pb.FAILURE_KIND_CANCELLED)
    call = await scheduler.wait(run.root_call.name)
    assert call.status == pb.CALL_STATUS_CANCELLED
    assert "alice" in call.error_message


async def test_children_are_found_again_by_a_repeated_parent_and_end_with_it(
    scheduler: Scheduler, agent: ScriptedAgent
) -> None:
    run = await scheduler.submit(call_spec(retry_strategy=pb.RetryStrategy(max_attempts=2)))
    parent = await agent.next_of("assign")
    await agent.running(parent.attempt)

    async def create(token: str, *specs: pb.CallSpec) -> list[pb.Call]:
        calls = [run_service_pb2.NewCall(child_index=index, spec=spec) for index, spec in enumerate(specs)]
        answer = await scheduler.runs.CreateCalls(
            run_service_pb2.CreateCallsRequest(calls=calls), metadata=scheduler.as_(token), timeout=10
        )
        return list(answer.calls)

    done, unfinished = await create(parent.token, call_spec(arguments=b"a"), call_spec(arguments=b"b"))
    first = await agent.next_of("assign")
    second = await agent.next_of("assign")
    assert {first.attempt, second.attempt} == {f"{done.name}/attempts/1", f"{unfinished.name}/attempts/1"}
    await agent.completed(f"{done.name}/attempts/1", b"done")
    await scheduler.wait(done.name)
    # The parent fails: what still runs below it is told to stop.
    await agent.failed(parent.attempt, pb.FAILURE_KIND_EXCEPTION)
    cancel = await agent.next_of("cancel")
    assert (cancel.attempt, cancel.reason) == (f"{unfinished.name}/attempts/1", pb.FAILURE_KIND_PARENT_ENDED)
    await agent.failed(cancel.attempt, pb.FAILURE_KIND_PARENT_ENDED)
    again = await agent.next_of("assign")
    assert again.number == 2
    # Its old token is good for nothing any more.
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await create(parent.token, call_spec(arguments=b"a"))
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    reused, restarted = await create(again.token, call_spec(arguments=b"a"), call_spec(arguments=b"b"))
    assert (reused.name, reused.status) == (done.name, pb.CALL_STATUS_COMPLETED)
    assert restarted.name != unfinished.name
    with pytest.raises(grpc.aio.AioRpcError, match="same order") as mismatch:
        await create(again.token, call_spec(arguments=b"other"))
    assert mismatch.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert run.root_call.name == restarted.parent_call


async def test_a_child_that_can_never_fit_beside_its_parent_is_an_error_at_once(
    scheduler: Scheduler, agent: ScriptedAgent
) -> None:
    await scheduler.submit(call_spec(compute={"cpus": 3}))
    parent = await agent.next_of("assign")
    calls = [run_service_pb2.NewCall(child_index=0, spec=call_spec(compute={"cpus": 2}))]
    with pytest.raises(grpc.aio.AioRpcError, match="wait for ever") as caught:
        await scheduler.runs.CreateCalls(
            run_service_pb2.CreateCallsRequest(calls=calls), metadata=scheduler.as_(parent.token), timeout=10
        )
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_an_update_of_an_attempt_that_was_replaced_is_answered_with_stop_it(
    scheduler: Scheduler, agent: ScriptedAgent
) -> None:
    run = await scheduler.submit()
    assign = await agent.next_of("assign")
    await agent.completed(assign.attempt)
    await scheduler.wait(run.root_call.name)
    await agent.running(assign.attempt)
    assert (await agent.next_of("cancel")).attempt == assign.attempt


async def test_what_a_connected_agent_no_longer_holds_is_lost(scheduler: Scheduler, agent: ScriptedAgent) -> None:
    run = await scheduler.submit()
    assign = await agent.next_of("assign")
    await agent.running(assign.attempt)
    await agent.next_of("acknowledge")
    await agent.disconnect()
    await agent.connect(held=())
    call = await scheduler.wait(run.root_call.name)
    assert call.outcome.failure.kind == pb.FAILURE_KIND_NODE_LOST


async def test_an_assignment_that_never_arrived_is_sent_again(scheduler: Scheduler, agent: ScriptedAgent) -> None:
    await scheduler.submit()
    first = await agent.next_of("assign")
    await agent.disconnect()
    await agent.connect(held=())
    assert (await agent.next_of("assign")).attempt == first.attempt


async def test_another_machine_under_a_taken_name_is_refused(scheduler: Scheduler, agent: ScriptedAgent) -> None:
    intruder = ScriptedAgent(scheduler)
    intruder.boot_id = "boot-2"
    with pytest.raises(grpc.aio.AioRpcError, match="its own node_name"):
        await intruder.connect()
    await scheduler.submit()
    assert (await agent.next_of("assign")).number == 1


async def test_a_restarted_scheduler_has_everything_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with running_scheduler(folder) as before:
        agent = ScriptedAgent(before, cpus=1)
        await agent.connect()
        running = await before.submit()
        assign = await agent.next_of("assign")
        await agent.running(assign.attempt)
        await agent.next_of("acknowledge")
        waiting = await before.submit()
    async with running_scheduler(folder) as after:
        assert (await after.get_call(running.root_call.name, who="root")).status == pb.CALL_STATUS_RUNNING
        agent = ScriptedAgent(after, cpus=1)
        await agent.connect(held=(assign.attempt,))
        await agent.completed(assign.attempt, b"survived")
        call = await after.wait(running.root_call.name, who="root")
        assert call.outcome.result.inline == b"survived"
        assert (await agent.next_of("assign")).attempt == f"{waiting.root_call.name}/attempts/1"


async def test_a_node_that_stays_away_is_lost_and_its_repeatable_calls_go_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outerproduct_scheduler.controller.MONITOR_SECONDS", 0.05)
    async with running_scheduler(tmp_path / "data", node_lost_seconds=0.5) as scheduler:
        lost = ScriptedAgent(scheduler, "first")
        await lost.connect()
        run = await scheduler.submit(call_spec(retry_strategy=pb.RetryStrategy(max_attempts=2)))
        assign = await lost.next_of("assign")
        await lost.running(assign.attempt)
        await lost.next_of("acknowledge")
        await lost.disconnect()
        other = ScriptedAgent(scheduler, "second")
        await other.connect()
        again = await other.next_of("assign")
        assert again.number == 2
        await other.completed(again.attempt, b"second")
        call = await scheduler.wait(run.root_call.name)
        assert call.outcome.result.inline == b"second"
        # The first comes back with what nobody wants any more.
        await lost.connect(held=(assign.attempt,))
        assert (await lost.next_of("cancel")).attempt == assign.attempt


async def test_a_cordoned_node_gets_nothing_and_says_so(scheduler: Scheduler, agent: ScriptedAgent) -> None:
    cordon = node_service_pb2.CordonNodeRequest(name="box", reason="new disk")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await scheduler.nodes.CordonNode(cordon, metadata=scheduler.as_("alice"), timeout=10)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    node = await scheduler.nodes.CordonNode(cordon, metadata=scheduler.as_("root"), timeout=10)
    assert (node.status.condition, node.status.reason) == (node_service_pb2.NODE_CONDITION_CORDONED, "new disk")
    run = await scheduler.submit()
    assert "cordoned" in (await scheduler.get_call(run.root_call.name)).pending_reason
    await scheduler.nodes.UncordonNode(
        node_service_pb2.UncordonNodeRequest(name="box"), metadata=scheduler.as_("root"), timeout=10
    )
    assert (await agent.next_of("assign")).attempt == f"{run.root_call.name}/attempts/1"


async def test_a_machine_with_two_kinds_of_gpu_shows_as_two_nodes(scheduler: Scheduler) -> None:
    agent = ScriptedAgent(scheduler, "mixed", accelerators={"L4": 1, "A100-80GB": 2}, cpus=8, memory_bytes=64 * GIB)
    await agent.connect()
    await scheduler.submit(call_spec(compute={"accelerator": "l4", "accelerator_count": 1}))
    assert (await agent.next_of("assign")).accelerator == "L4"
    answer = await scheduler.nodes.ListNodes(
        node_service_pb2.ListNodesRequest(), metadata=scheduler.as_("alice"), timeout=10
    )
    shown = {
        node.name: (
            node.total_resources.cpus,
            node.total_resources.accelerator,
            node.total_resources.accelerator_count,
            node.status.allocated_resources.accelerator_count,
        )
        for node in answer.nodes
    }
    assert shown == {"mixed": (8, "A100-80GB", 2, 0), "mixed/L4": (0, "L4", 1, 1)}


async def test_a_user_does_not_see_anothers_run(scheduler: Scheduler, agent: ScriptedAgent) -> None:
    run = await scheduler.submit(who="alice")
    for request in (
        scheduler.runs.GetRun(run_service_pb2.GetRunRequest(name=run.name), metadata=scheduler.as_("bob")),
        scheduler.runs.CancelRun(run_service_pb2.CancelRunRequest(name=run.name), metadata=scheduler.as_("bob")),
        scheduler.runs.WaitCalls(
            run_service_pb2.WaitCallsRequest(names=[run.root_call.name]), metadata=scheduler.as_("bob")
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await request
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    listed = await scheduler.runs.ListRuns(run_service_pb2.ListRunsRequest(), metadata=scheduler.as_("bob"))
    assert not listed.runs
    assert (await scheduler.get_call(run.root_call.name, who="root")).created_by == "alice"


async def test_live_attempts_show_what_runs_where_with_its_use_to_those_who_may_see_it(
    scheduler: Scheduler, agent: ScriptedAgent
) -> None:
    async def listed(who: str) -> list[run_service_pb2.LiveAttempt]:
        answer = await scheduler.runs.ListLiveAttempts(
            run_service_pb2.ListLiveAttemptsRequest(), metadata=scheduler.as_(who)
        )
        return list(answer.attempts)

    run = await scheduler.submit()
    assign = await agent.next_of("assign")
    await agent.running(assign.attempt)
    await agent.next_of("acknowledge")
    (found,) = await listed("alice")
    assert found.attempt.name == assign.attempt
    assert found.attempt.node == agent.node
    assert found.created_by == "alice"
    assert found.compute.cpus == assign.spec.compute.cpus
    assert not found.HasField("usage")
    assert not await listed("bob")

    await agent.heartbeat(resources_pb2.AttemptUsage(name=assign.attempt, memory_bytes=123))
    await agent.report(assign.attempt, pb.ATTEMPT_STATUS_RUNNING)
    await agent.next_of("acknowledge")
    assert (await listed("root"))[0].usage.memory_bytes == 123

    waiting = await scheduler.runs.WaitCalls(
        run_service_pb2.WaitCallsRequest(names=[run.root_call.name]), metadata=scheduler.as_("alice")
    )
    assert (waiting.waiting_count, waiting.running_count) == (0, 1)


async def test_a_node_is_forgotten_only_when_nothing_of_it_can_still_run(
    scheduler: Scheduler, agent: ScriptedAgent
) -> None:
    async def refused(name: str, who: str = "root") -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scheduler.nodes.ForgetNode(node_service_pb2.ForgetNodeRequest(name=name), metadata=scheduler.as_(who))
        code: grpc.StatusCode = caught.value.code()
        return code

    assert await refused("box", who="alice") is grpc.StatusCode.PERMISSION_DENIED
    assert await refused("elsewhere") is grpc.StatusCode.NOT_FOUND
    assert await refused("box") is grpc.StatusCode.FAILED_PRECONDITION, "it is connected"
    run = await scheduler.submit()
    assign = await agent.next_of("assign")
    await agent.running(assign.attempt)
    await agent.next_of("acknowledge")
    await agent.disconnect()
    assert await refused("box") is grpc.StatusCode.FAILED_PRECONDITION, "its Attempt may still run"

    await agent.connect(held=(assign.attempt,))
    await agent.completed(assign.attempt)
    await scheduler.wait(run.root_call.name)
    await agent.disconnect()
    await scheduler.nodes.ForgetNode(node_service_pb2.ForgetNodeRequest(name="box"), metadata=scheduler.as_("root"))
    answer = await scheduler.nodes.ListNodes(node_service_pb2.ListNodesRequest(), metadata=scheduler.as_("root"))
    assert not answer.nodes
