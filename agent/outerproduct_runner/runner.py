"""The life of a runner: get the Call, run it, bring the outcome. One Call, then it ends."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
import socket
import sys
from types import FrameType, ModuleType
from typing import Any

from outerproduct_runner import call as calls
from outerproduct_runner import frames, outcome
from outerproduct_runner.agent_connection import converse


class Interrupted(KeyboardInterrupt):
    """Raised in the function when its Attempt is asked to stop: a chance to save a checkpoint before SIGKILL."""


def main() -> int:
    """Runs one Call; the exit code of the container's process."""
    call = converse(calls.ask)
    os.environ.update(call.env_vars)
    # A function by value belongs to a `__main__` that is not here; this one is the runner's, and nobody's business.
    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv[:] = [call.qualified_name]
    ended = run(call)
    flush()
    converse(functools.partial(bring, ended))
    return ended.exit_code


def run(call: calls.Call) -> outcome.Outcome:
    """Loads and calls the function in the main thread, where signals arrive and event loops expect to be."""
    signal.signal(signal.SIGTERM, interrupt)
    try:
        try:
            function, args, kwargs = calls.load(call)
        except calls.NotLoaded as error:
            cause = error.__cause__ or error
            return outcome.of_exception(cause, error.kind, str(error))
        value: Any = function(*args, **kwargs)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        ended = outcome.of_result(value)
    except BaseException as error:  # noqa: BLE001 - whatever ends the function is its outcome, SystemExit as well
        ended = outcome.of_exception(error)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return ended


async def _await(value: Any) -> Any:
    return await value


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """The first SIGTERM interrupts the function; later ones are ignored, so that its clean-up is not disturbed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted("the Attempt was asked to stop")


def bring(ended: outcome.Outcome, connection: socket.socket) -> None:
    """The runner's last conversation. The agent has stored the outcome when it answers."""
    frames.send(connection, {"type": "hello", "protocol": frames.PROTOCOL, "role": "runner", "state": "finished"})
    frames.send(connection, ended.header)
    frames.send_data(connection, ended.data)
    frames.receive_type(connection, "received")


def flush() -> None:
    """What the function printed comes before its outcome. A stream that it has closed is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue
