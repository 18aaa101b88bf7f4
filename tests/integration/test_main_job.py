"""The main job on the real stack: what a Call asked for is what its function sees, and what comes back."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.integration.programs import inside
from tests.support.engine import attempt_containers, build_image
from tests.support.stack import Stack

import outerproduct as op

pytestmark = pytest.mark.docker
MIB = 1024**2


def node(client: op.OuterProductClient) -> op.Node:
    [found] = [node for node in client.list_nodes() if node.name == "box"]
    return found


def test_the_function_sees_exactly_what_it_asked_for(client: op.OuterProductClient, image: op.Image) -> None:
    seen = client.run(fn=inside.look, image=image, cpu=1, memory_bytes=300 * MIB).wait(timeout=120)
    assert len(seen["affinity"]) == 1
    assert seen["memory_limit"] == 300 * MIB
    assert seen["swap_extra"] == 0
    assert seen["shm_bytes"] == 300 * MIB
    assert seen["omp"] == "1"
    assert seen["no_new_privileges"] == "1"


def test_memory_defaults_to_two_gib_per_cpu(client: op.OuterProductClient, image: op.Image) -> None:
    assert client.run(fn=inside.look, image=image).wait(timeout=120)["memory_limit"] == 2 * 1024**3


def test_two_calls_at_once_share_no_cpu(client: op.OuterProductClient, image: op.Image) -> None:
    runs = [client.run(fn=inside.look_and_hold, args=(3.0,), image=image, memory_bytes=128 * MIB) for _ in range(2)]
    (cpus_a, start_a, end_a), (cpus_b, start_b, end_b) = (run.wait(timeout=120) for run in runs)
    assert max(start_a, start_b) < min(end_a, end_b), "the two did not run at the same time"
    assert not set(cpus_a) & set(cpus_b)


def test_without_gpus_none_is_seen_even_in_an_image_that_asks_for_all(
    client: op.OuterProductClient, image: op.Image
) -> None:
    tag = build_image("outerproduct-test:cuda-env", ["ENV NVIDIA_VISIBLE_DEVICES=all"])
    seen = client.run(fn=inside.look, image=op.Image.from_registry(tag), memory_bytes=128 * MIB).wait(timeout=120)
    assert seen["visible_devices"] == "void"
    assert seen["gpu_nodes"] == []


def test_user_variables_cannot_widen_what_gpus_are_seen(client: op.OuterProductClient, image: op.Image) -> None:
    with pytest.raises(ValueError, match="NVIDIA_VISIBLE_DEVICES"):
        client.run(fn=inside.look, image=image, env_vars={"NVIDIA_VISIBLE_DEVICES": "all"})


def test_too_much_memory_ends_the_call_and_says_limit_and_peak(client: op.OuterProductClient, image: op.Image) -> None:
    neighbour = client.run(fn=inside.look_and_hold, args=(4.0,), image=image, memory_bytes=128 * MIB)
    greedy = client.run(fn=inside.fill_memory, args=(400,), image=image, memory_bytes=128 * MIB)
    with pytest.raises(op.OutOfMemory) as caught:
        greedy.wait(timeout=120)
    assert "memory_bytes" in str(caught.value)
    assert "128" in str(caught.value)
    assert len(neighbour.wait(timeout=120)[0]) == 1


def test_filling_shm_counts_against_the_memory_limit(client: op.OuterProductClient, image: op.Image) -> None:
    run = client.run(fn=inside.fill_shm, args=(200,), image=image, memory_bytes=128 * MIB)
    with pytest.raises(op.OutOfMemory, match="/dev/shm"):
        run.wait(timeout=120)


def test_a_child_process_killed_for_memory_fails_the_call(client: op.OuterProductClient, image: op.Image) -> None:
    run = client.run(fn=inside.fill_memory_in_child, args=(400,), image=image, memory_bytes=128 * MIB)
    with pytest.raises(op.OutOfMemory):
        run.wait(timeout=120)


def test_functions_of_the_main_module_and_closures_go_by_value(client: op.OuterProductClient, image: op.Image) -> None:
    offset = 40

    def add_offset(n: int) -> int:
        return n + offset

    assert client.run(fn=add_offset, args=(2,), image=image, memory_bytes=128 * MIB).wait(timeout=120) == 42


def test_async_functions_are_awaited(client: op.OuterProductClient, image: op.Image) -> None:
    assert client.run(fn=inside.nap, args=(4,), image=image, memory_bytes=128 * MIB).wait(timeout=120) == 8


def test_a_function_that_names_its_client_gets_it(client: op.OuterProductClient, image: op.Image) -> None:
    call_id, n = client.run(fn=inside.with_client, args=(3,), image=image, memory_bytes=128 * MIB).wait(timeout=120)
    assert call_id is not None
    assert n == 3


def test_an_exception_arrives_with_its_type_and_traceback(client: op.OuterProductClient, image: op.Image) -> None:
    run = client.run(fn=inside.fail, args=("value",), image=image, memory_bytes=128 * MIB)
    with pytest.raises(op.RunFailed, match="the value was wrong") as caught:
        run.wait(timeout=120)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "inside.py" in str(caught.value)


def test_an_exception_that_cannot_be_rebuilt_still_says_what_it_was(
    client: op.OuterProductClient, image: op.Image
) -> None:
    run = client.run(fn=inside.fail, args=("two",), image=image, memory_bytes=128 * MIB)
    with pytest.raises(op.RunFailed, match="NeedsTwo"):
        run.wait(timeout=120)


@pytest.mark.parametrize(("how", "text"), [("exit", "7"), ("kill", "SIGKILL")])
def test_a_process_that_dies_says_how(client: op.OuterProductClient, image: op.Image, how: str, text: str) -> None:
    run = client.run(fn=inside.fail, args=(how,), image=image, memory_bytes=128 * MIB)
    with pytest.raises(op.ProcessDied, match=text):
        run.wait(timeout=120)


def test_an_image_that_does_not_exist_says_so(client: op.OuterProductClient) -> None:
    absent = op.Image.from_registry("localhost:1/no-such-image:latest")
    with pytest.raises(op.ImageUnavailable, match="no-such-image"):
        client.run(fn=inside.add, args=(1, 2), image=absent, memory_bytes=128 * MIB).wait(timeout=240)


def test_an_image_without_python_says_so(client: op.OuterProductClient, bare_image: str) -> None:
    run = client.run(fn=inside.add, args=(1, 2), image=op.Image.from_registry(bare_image), memory_bytes=128 * MIB)
    with pytest.raises(op.ImageHasNoPython, match=bare_image):
        run.wait(timeout=120)


def test_cancel_ends_a_running_call_and_its_container(
    stack: Stack, client: op.OuterProductClient, image: op.Image
) -> None:
    run = client.run(fn=inside.sleep, args=(600,), image=image, memory_bytes=128 * MIB)
    wait_for(lambda: run.refresh().root_call.started_at is not None)
    run.cancel()
    with pytest.raises(op.Cancelled):
        run.wait(timeout=120)
    assert run.refresh().status == op.RunStatus.CANCELLED
    assert run.cancel().status == op.RunStatus.CANCELLED, "cancelling twice is harmless"
    assert attempt_containers(stack.agent_id()) == []


def test_child_calls_run_over_the_socket_without_network(
    client: op.OuterProductClient, image: op.Image, base_image: str
) -> None:
    assert client.run(fn=inside.tree, args=(1,), image=image, memory_bytes=128 * MIB).wait(timeout=120) == 2


@pytest.mark.parametrize("size", [0, 1, 256 * 1024, 256 * 1024 + 1, 20 * MIB])
def test_arguments_and_results_of_any_size_arrive_intact(
    client: op.OuterProductClient, image: op.Image, size: int
) -> None:
    data = bytes(range(256)) * (size // 256) + b"\x01" * (size % 256)
    got = client.run(fn=inside.echo, args=(data,), image=image, memory_bytes=512 * MIB).wait(timeout=120)
    assert got == data


def test_the_last_lines_of_a_process_that_dies_are_kept(client: op.OuterProductClient, image: op.Image) -> None:
    run = client.run(fn=inside.talk, args=(2000,), image=image, memory_bytes=128 * MIB)
    with pytest.raises(op.ProcessDied):
        run.wait(timeout=120)
    text = "".join(str(piece) for piece in run.logs())
    assert text.splitlines() == [f"line {number}" for number in range(2000)]


def test_map_gives_results_in_input_order(client: op.OuterProductClient, image: op.Image) -> None:
    got = list(client.map(inside.add, range(6), range(10, 16), image=image, memory_bytes=128 * MIB))
    assert got == [10, 12, 14, 16, 18, 20]


def test_blocking_and_aio_forms_agree(client: op.OuterProductClient, image: op.Image) -> None:

    async def both() -> tuple[int, int]:
        run = await client.run.aio(fn=inside.add, args=(1, 2), image=image, memory_bytes=128 * MIB)
        # A blocking form inside a running loop, as a notebook does.
        return await run.wait.aio(timeout=120), run.wait(timeout=120)

    assert asyncio.run(both()) == (3, 3)


def test_a_call_that_waits_says_why(client: op.OuterProductClient, image: op.Image) -> None:
    total = node(client).total_resources
    assert total is not None
    holder = client.run(fn=inside.sleep, args=(600,), image=image, cpu=total.cpus, memory_bytes=128 * MIB)
    wait_for(lambda: holder.refresh().root_call.started_at is not None)
    waiting = client.run(fn=inside.add, args=(1, 2), image=image, memory_bytes=128 * MIB)
    try:
        reason = waiting.refresh().root_call.pending_reason
        assert "waiting for" in reason
        assert "box" in reason
        with pytest.raises(TimeoutError):
            waiting.wait(timeout=0)
    finally:
        holder.cancel()
    assert waiting.wait(timeout=120) == 3


def test_one_hundred_calls_one_after_another(stack: Stack, client: op.OuterProductClient, image: op.Image) -> None:
    for number in range(100):
        run = client.run(fn=inside.add, args=(number, 1), image=image, memory_bytes=128 * MIB)
        assert run.wait(timeout=60) == number + 1
    everything_is_given_back(stack, client)


def test_one_hundred_calls_at_once(stack: Stack, client: op.OuterProductClient, image: op.Image) -> None:
    runs = [client.run(fn=inside.add, args=(number, 1), image=image, memory_bytes=128 * MIB) for number in range(100)]
    assert [run.wait(timeout=250) for run in runs] == [number + 1 for number in range(100)]
    everything_is_given_back(stack, client)


def everything_is_given_back(stack: Stack, client: op.OuterProductClient) -> None:
    assert attempt_containers(stack.agent_id()) == []
    allocated = node(client).status.allocated_resources
    assert (allocated.cpus, allocated.memory_bytes, allocated.accelerator_count) == (0, 0, 0)


def wait_for(condition: object, seconds: float = 60) -> None:
    """Polls; used where the contract offers no event to wait for."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


def test_stack_has_the_node(stack: Stack, client: op.OuterProductClient) -> None:
    total = node(client).total_resources
    assert total is not None
    assert total.cpus >= 1
    assert total.accelerator == ""
    assert {
        (n.total_resources.accelerator, n.total_resources.accelerator_count)
        for n in client.list_nodes()
        if n.total_resources
    } == {("", 0)}
