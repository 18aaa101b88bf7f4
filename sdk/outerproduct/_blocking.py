"""Methods that block when called plainly and have an `.aio(...)` form.

All of the SDK's work is coroutines on one event loop in a thread of its own, so a plain call works from any thread,
also where an event loop runs already (a notebook), and an `.aio` form works from any event loop. The thread does not
survive a fork; the child gets its own at its first call.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def event_loop() -> asyncio.AbstractEventLoop:
    """The SDK's event loop in this process; started when it is first needed."""
    global _loop  # noqa: PLW0603 - one loop per process is the point
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="outerproduct", daemon=True).start()
        return _loop


def _forget_after_fork() -> None:
    # The thread is gone in the child, and the lock may have been held by a thread that is gone too.
    global _lock, _loop  # noqa: PLW0603
    _lock = threading.Lock()
    _loop = None


os.register_at_fork(after_in_child=_forget_after_fork)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs it on the SDK's loop and waits. Ctrl-C ends the wait and cancels the coroutine, nothing else."""
    loop = event_loop()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def run_elsewhere(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs it on the SDK's loop and awaits it from the caller's."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, event_loop()))


class BoundBlocking(Generic[P, T]):
    """A method on its instance: call it, or await its `.aio(...)`."""

    def __init__(self, coroutine_function: Callable[P, Coroutine[Any, Any, T]]) -> None:
        self._function = coroutine_function
        functools.update_wrapper(self, coroutine_function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(self._function(*args, **kwargs))

    def aio(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        """The same, to be awaited."""
        return run_elsewhere(self._function(*args, **kwargs))


class Blocking(Generic[S, P, T]):
    """Decorator for a coroutine method; see BoundBlocking."""

    def __init__(self, function: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> None:
        self._function = function
        functools.update_wrapper(self, function)  # type: ignore[arg-type]

    def __get__(self, instance: S, owner: type | None = None) -> BoundBlocking[P, T]:
        if instance is None:
            return self  # type: ignore[return-value]
        return BoundBlocking(functools.partial(self._function, instance))


def elsewhere(
    function: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Decorator for a plain coroutine method: its body runs on the SDK's loop, whatever loop awaits it."""

    async def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await run_elsewhere(function(self, *args, **kwargs))

    functools.update_wrapper(wrapper, function)
    return wrapper
