"""Methods block when called plainly, wherever that is, and are awaited as `.aio(...)` from any event loop."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.sdk import programs
from tests.unit.sdk.fake_scheduler import FakeScheduler

import outerproduct as op
from outerproduct._blocking import Blocking, run_blocking


class Thing:
    """Knows which thread its coroutines run in."""

    async def _where(self, delay_seconds: float = 0.0) -> str:
        await asyncio.sleep(delay_seconds)
        return threading.current_thread().name

    where = Blocking(_where)


def test_a_plain_call_blocks_without_an_event_loop() -> None:
    assert Thing().where() == "outerproduct"


async def test_a_plain_call_blocks_inside_a_running_event_loop() -> None:
    assert Thing().where() == "outerproduct"


async def test_aio_is_awaited_on_the_callers_loop_and_others_go_on() -> None:
    both = tuple(await asyncio.gather(Thing().where.aio(0.01), asyncio.sleep(0, "went on")))
    assert both == ("outerproduct", "went on")


def test_many_threads_share_one_loop() -> None:
    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(lambda _: Thing().where(0.001), range(64))) == {"outerproduct"}


def test_ctrl_c_ends_the_wait_and_the_sdk_goes_on() -> None:
    waiter, cancelled = threading.get_ident(), threading.Event()

    async def for_ever() -> None:
        try:
            while sys._current_frames()[waiter].f_code is not threading.Condition.wait.__code__:
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        run_blocking(for_ever())
    assert cancelled.wait(30)
    assert Thing().where() == "outerproduct"


async def test_a_cancelled_aio_call_is_cancelled_where_it_runs() -> None:
    started, cancelled = threading.Event(), threading.Event()

    class Waiter:
        async def _wait(self) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        wait = Blocking(_wait)

    task = asyncio.ensure_future(Waiter().wait.aio())
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(cancelled.wait, 30)


class CallsTheSdkWhenUnpickled:
    """Stands for a module whose top level calls the SDK and that is imported to unpickle a result."""

    def __init__(self, thread: str = "") -> None:
        self.thread = thread

    def __reduce__(self) -> tuple[object, ...]:
        return _made_by_calling_the_sdk, ()


def _made_by_calling_the_sdk() -> CallsTheSdkWhenUnpickled:
    assert Thing().where() == "outerproduct"
    return CallsTheSdkWhenUnpickled(threading.current_thread().name)


def give_it() -> CallsTheSdkWhenUnpickled:
    return CallsTheSdkWhenUnpickled()


def test_results_are_unpickled_in_the_thread_that_waits(client: op.OuterProductClient, image: op.Image) -> None:
    main = threading.current_thread().name
    assert client.run(fn=give_it, image=image).wait().thread == main
    assert [result.thread for result in client.map(lambda _: CallsTheSdkWhenUnpickled(), [1], image=image)] == [main]


def test_inputs_of_a_map_may_come_from_another_map(client: op.OuterProductClient, image: op.Image) -> None:
    inner = client.map(programs.double, range(5), image=image)
    assert list(client.map(programs.double, inner, image=image)) == [0, 4, 8, 12, 16]


async def test_every_marked_method_has_both_forms(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    run = await client.run.aio(fn=programs.add, args=(1,), image=image)
    assert await run.wait.aio() == 2
    assert (await run.refresh.aio()).name == run.name
    assert (await client.get_run.aio(run.id)).name == run.name
    assert [found.name for found in await client.list_runs.aio()] == [run.name]
    assert [node.name for node in await client.list_nodes.aio()] == ["gpu-1"]
    assert [x async for x in client.map.aio(programs.double, [1, 2], image=image)] == [2, 4]
    assert (await client.me())["name"] == "alice"
    assert pickle.loads(scheduler.bytes_of(scheduler.specs[0].arguments)) == ((1,), {})
