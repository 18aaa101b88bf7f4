"""Methods that block when called plainly and have an `.aio(...)` form.

All of the SDK's talking is coroutines on one event loop in a thread of its own, so a plain call works from any thread,
also where an event loop runs already (a notebook), and an `.aio` form works from any event loop. The thread does not
survive a fork; the child gets its own at its first call.

Code of the user's (iterators, pickling, unpickling) must never run on that loop: it may call the SDK, which would wait
for itself, or wait for an import that the calling thread is in the middle of.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
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


class Decodable(Protocol[T_co]):
    """What the SDK's loop has fetched, and what the caller makes a value of."""

    def value(self) -> T_co:
        """Unpickles, or raises."""
        ...


class BoundBlockingValue(Generic[P, T]):
    """Like BoundBlocking; the value is made in the thread, or on the loop, of the caller."""

    def __init__(self, coroutine_function: Callable[P, Coroutine[Any, Any, Decodable[T]]]) -> None:
        self._function = coroutine_function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(self._function(*args, **kwargs)).value()

    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """The same, to be awaited."""
        return (await run_elsewhere(self._function(*args, **kwargs))).value()


class BlockingValue(Generic[S, P, T]):
    """Decorator for a coroutine method that gives a Decodable; see BoundBlockingValue."""

    def __init__(self, function: Callable[Concatenate[S, P], Coroutine[Any, Any, Decodable[T]]]) -> None:
        self._function = function
        functools.update_wrapper(self, function)  # type: ignore[arg-type]

    def __get__(self, instance: S, owner: type | None = None) -> BoundBlockingValue[P, T]:
        if instance is None:
            return self  # type: ignore[return-value]
        return BoundBlockingValue(functools.partial(self._function, instance))


def elsewhere(
    function: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Decorator for a plain coroutine method: its body runs on the SDK's loop, whatever loop awaits it."""

    async def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await run_elsewhere(function(self, *args, **kwargs))

    functools.update_wrapper(wrapper, function)
    return wrapper
